"""A folder that appears only when it is complete: it is renamed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.durable import sync_folder
from trainer.errors import UserError

MIB = 1 << 20
HEADROOM = 8 * MIB  # for configs and tokenizers
SUFFIX = ".gptctl-tmp"
MARKER = ".made-by-gptctl"  # in the temporary folder: what has none is not ours to delete


@contextmanager
def new_folder(output: Path, size: int) -> Iterator[Path]:
    """Write to a temporary folder beside `output`, which needs about `size` bytes.

    If the body raises, nothing is left. Raises UserError if the folder cannot be written.
    """
    part = output.with_name(f"{output.name}{SUFFIX}")
    try:
        _require_new(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        _require_space(output.parent, size + HEADROOM)
        lock = _created(part)
        try:
            yield part
            (part / MARKER).unlink()
            sync_folder(part)
            part.rename(output)  # replaces an empty folder
            sync_folder(output.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        place = error.filename or output
        raise UserError(
            f"cannot write {place}: {error.strerror or error}", "check --output"
        ) from None


def _require_new(output: Path) -> None:
    # Not followed: a link would be replaced by the rename, or lead to a folder of others.
    if os.path.lexists(output) and (output.is_symlink() or not output.is_dir()):
        raise UserError(f"{output} exists, and is not a folder", "use another --output")
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output} exists, and is not empty", "use another --output, or delete it")


def _require_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        message = (
            f"not enough disk space in {folder}: {wanted // MIB} MiB needed, {free // MIB} free"
        )
        raise UserError(message, "use another --output")


def _created(part: Path) -> int:
    """Create and lock the temporary folder, empty. Returns the descriptor that holds the lock."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        part.mkdir()
    lock = os.open(part, flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"another process is writing {part}", "wait until it ends") from None
    except OSError:
        pass  # a file system without locks
    try:
        _empty(part)
        (part / MARKER).touch()
    except BaseException:
        os.close(lock)
        raise
    return lock


def _empty(part: Path) -> None:
    """Delete what a process that was killed has left, the marker last. Nobody else's files."""
    entries = [entry for entry in os.scandir(part) if entry.name != MARKER]
    if entries and not os.path.lexists(part / MARKER):
        message = f"{part} exists, and no export has made it"
        raise UserError(message, "use another --output, or rename or delete that folder")
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
