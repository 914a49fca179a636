"""The folder of a run's checkpoints: one `step_<n>/` each; the file `latest` names the newest.

A checkpoint is written to `step_<n>.tmp`, the manifest last, and renamed when all of it is on disk.
So a crash never leaves an incomplete checkpoint under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.folder_lock import FolderLock
from trainer.checkpoint.manifest import TORCH_FORMAT, find_damage, find_missing, read_manifest
from trainer.checkpoint.signing import current_keys
from trainer.checkpoint_names import STEP, is_verified
from trainer.durable import replacing, sync_folder
from trainer.errors import UserError

_ASIDE = re.compile(r"step_([0-9]+)\.aside([0-9]+)")
# What this program is writing or deleting, and what it replaces.
_PART = re.compile(r"step_[0-9]+(\.aside[0-9]+)?\.tmp")
_OLD = re.compile(r"step_[0-9]+\.old")
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # a link, a socket, a folder
KEPT_AT_LEAST = 2  # even if the user wants fewer: one may turn out to be damaged


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, FolderLock(folder)
        self._warn: Callable[[str], None] = lambda text: None

    def open_for_writing(self, warn: Callable[[str], None]) -> None:
        """Create and lock the folder, and clean up after a run that was killed while saving."""
        self._warn = warn
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.take(warn)
        except FileExistsError:
            raise UserError(
                f"{self.folder} is a file", "set Engine.save_load.output_dir to a folder"
            ) from None
        except OSError as error:
            hint = "set Engine.save_load.output_dir to a writable folder"
            if error.errno in _NOT_A_FILE:
                hint = "delete or rename it: the run needs a file with this name"
            place = error.filename or self.folder
            raise UserError(f"cannot write to {place}: {error.strerror}", hint) from None
        for part in self._named(_PART):
            self._make_room(part)
        for old in self._named(_OLD):  # killed during `commit`
            if os.path.isdir(old) and not os.path.lexists(old.with_suffix("")):
                old.rename(old.with_suffix(""))
            else:
                self._make_room(old)
        for place in self._named(STEP):
            if not os.path.isdir(place):
                self._make_room(place)

    def close(self) -> None:
        self.lock.release()

    def checkpoints(self) -> list[Path]:
        """All checkpoints, the newest first, including damaged ones."""
        # os.path.isdir: False, not an error, without permission to look.
        found = [folder for folder in self._named(STEP) if os.path.isdir(folder)]
        return sorted(found, key=_step_of, reverse=True)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        return [entry for entry in self.folder.glob("step_*") if pattern.fullmatch(entry.name)]

    def holds(self, folder: Path | None) -> bool:
        return folder is not None and folder.parent.resolve() == self.folder.resolve()

    def part(self, step: int) -> Path:
        return self.folder / f"step_{step}.tmp"

    def commit(self, part: Path) -> None:
        """Rename a complete checkpoint to its final name, replacing an existing one.

        At every moment, the old or the new checkpoint exists under a name that
        `open_for_writing` recovers.
        """
        target, old = part.with_suffix(""), part.with_suffix(".old")
        self.lock.require()
        sync_folder(part)
        self._make_room(old)
        if not os.path.isdir(target) or os.path.islink(target):
            self._make_room(target)
        else:
            target.rename(old)
        part.rename(target)
        sync_folder(self.folder)  # the rename must be durable before the old one is deleted
        self._make_room(old)
        # `latest` is only for people: if the disk is full, the checkpoint is still usable.
        with contextlib.suppress(OSError), replacing(self.folder / "latest") as stream:
            stream.write(f"{target.name}\n".encode())

    def set_aside(self, step: int) -> list[tuple[Path, Path]]:
        """Rename the checkpoints after this step, so that nothing mistakes them for the newest.

        Returns their old and new names.
        """
        moved = []
        for folder in self.checkpoints():
            if _step_of(folder) > step:
                taken = [number for (at, number), _ in self._aside() if at == _step_of(folder)]
                aside = folder.with_name(f"{folder.name}.aside{max(taken, default=0) + 1}")
                moved.append((folder, folder.rename(aside)))
        return moved

    def discard(self, part: Path) -> None:
        self.lock.require()
        self._make_room(part)

    def _make_room(self, place: Path) -> None:
        """Free a name that we need. Deletes our folders; renames anything else, which is not ours.

        A link is not followed: what it leads to stays as it is.
        """
        if os.path.isdir(place) and not os.path.islink(place):
            shutil.rmtree(place, ignore_errors=True)
        elif os.path.lexists(place):
            taken = {entry.name for entry in self.folder.glob("step_*")}
            names = (f"{place.name}.foreign{number}" for number in itertools.count(1))
            aside = place.with_name(next(name for name in names if name not in taken))
            place.rename(aside)
            self._warn(f"{place} is not a folder of a checkpoint: renamed to {aside.name}")

    def require_space(self, wanted: int) -> None:
        """Raise OSError before writing: a save that fails half-way may fill the disk for others."""
        free = shutil.disk_usage(self.folder).free
        if free < wanted:
            raise OSError(f"not enough disk space: {_mib(wanted)} needed, {_mib(free)} free")

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` verified checkpoints, and old ones that were set aside.

        A checkpoint is deleted only after at least two newer ones were verified. Reads no file:
        every rank verified what it wrote, and the result is beside it.
        """
        self.lock.require()
        keep, good = max(keep, KEPT_AT_LEAST), 0
        for folder in self.checkpoints():
            if good >= keep:
                self._delete(folder)
            else:  # an unverified checkpoint must not replace a good one
                good += is_verified(folder) and _is_accepted(folder)
        for _, folder in self._aside()[keep:]:
            self._delete(folder)

    def _aside(self) -> list[tuple[tuple[int, int], Path]]:
        """The checkpoints that were set aside: step, number and folder, the newest first."""
        found = [(_ASIDE.fullmatch(folder.name), folder) for folder in self._named(_ASIDE)]
        named = [((int(name[1]), int(name[2])), folder) for name, folder in found if name]
        return sorted(named, reverse=True)

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint. If the run is killed meanwhile, `open_for_writing` continues."""
        with contextlib.suppress(OSError):
            doomed = folder.rename(folder.with_name(f"{folder.name}.tmp"))
            if os.path.islink(doomed):
                doomed.unlink()  # a checkpoint on another disk: what it leads to is not ours
            else:
                shutil.rmtree(doomed, ignore_errors=True)


def _is_accepted(folder: Path) -> bool:
    """Whether a checkpoint could be loaded with the key of this run. Without one, reads nothing."""
    try:
        return not current_keys() or bool(read_manifest(folder))
    except ValueError:
        return False


def unusable(folder: Path, share: int = 0, of: int = 1) -> str:
    """Why a checkpoint cannot be loaded, as far as that is known without reading its tensors.

    Files of version 1 are read: their format has no checksums of parts. Several ranks can check a
    share of the files each.
    """
    try:
        manifest = read_manifest(folder)
        find = find_damage if manifest["version"] == TORCH_FORMAT else find_missing
        return find(folder, list(manifest["files"].items())[share::of])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def damage_of(folder: Path) -> str:
    """Read a whole checkpoint. Returns what is wrong with it, or an empty string."""
    try:
        return find_damage(folder, read_manifest(folder)["files"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
