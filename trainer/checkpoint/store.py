"""The folder of a run's checkpoints: one `step_<n>/` each; the file `latest` names the newest.

A checkpoint is written to `step_<n>.tmp`, the manifest last, and renamed when all of it is on disk.
So a crash never leaves an incomplete checkpoint under its final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
from pathlib import Path

from trainer.checkpoint.manifest import find_damage, read_manifest
from trainer.durable import replacing, sync_folder
from trainer.errors import UserError

_STEP = re.compile(r"step_(\d+)")
KEPT_AT_LEAST = 2  # even if the user wants fewer: one may turn out to be damaged


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None  # file descriptor, open until the run ends

    def open_for_writing(self) -> None:
        """Create and lock the folder, and clean up after a run that was killed while saving."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileExistsError:
            raise UserError(
                f"{self.folder} is a file", "set Engine.save_load.output_dir to a folder"
            ) from None
        except OSError as error:
            hint = "set Engine.save_load.output_dir to a writable folder"
            raise UserError(f"cannot write to {self.folder}: {error.strerror}", hint) from None
        self._take_lock(self._lock)
        for part in self.folder.glob("step_*.tmp"):
            shutil.rmtree(part, ignore_errors=True)
        for old in self.folder.glob("step_*.old"):  # killed during `commit`
            if old.with_suffix("").exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(old.with_suffix(""))

    def _take_lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 200).decode(errors="replace").strip() or "unknown"
            hint = "wait for it, stop it, or set Engine.save_load.output_dir to another folder"
            raise UserError(
                f"another run is writing to {self.folder} (process {owner})", hint
            ) from None
        except OSError:
            return  # this file system has no locks: better to train without than not at all
        with contextlib.suppress(OSError):  # if the disk is full, the lock works without the name
            os.ftruncate(lock, 0)  # the name of an earlier owner
            os.write(lock, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def checkpoints(self) -> list[Path]:
        """All checkpoints, the newest first, including damaged ones."""
        found = [
            folder
            for folder in self.folder.glob("step_*")
            if _STEP.fullmatch(folder.name) and folder.is_dir()
        ]
        return sorted(found, key=_step_of, reverse=True)

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
        sync_folder(part)
        if target.exists():
            target.rename(old)
        part.rename(target)
        sync_folder(self.folder)  # the rename must be durable before the old one is deleted
        shutil.rmtree(old, ignore_errors=True)
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
                taken = len(list(self.folder.glob(f"{folder.name}.aside*")))
                moved.append(
                    (folder, folder.rename(folder.with_name(f"{folder.name}.aside{taken + 1}")))
                )
        return moved

    def discard(self, part: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)

    def require_space(self, wanted: int) -> None:
        """Raise OSError before writing: a save that fails half-way may fill the disk for others."""
        free = shutil.disk_usage(self.folder).free
        if free < wanted:
            raise OSError(f"not enough disk space: {_mib(wanted)} needed, {_mib(free)} free")

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` good checkpoints.

        A checkpoint is deleted only after at least two newer ones were verified.
        """
        good = 0
        for folder in self.checkpoints():
            if good >= max(keep, KEPT_AT_LEAST):
                shutil.rmtree(folder, ignore_errors=True)
            elif not damage_of(folder):  # a damaged checkpoint must not replace a good one
                good += 1


def damage_of(folder: Path, share: int = 0, of: int = 1) -> str:
    """Why a checkpoint cannot be used, or an empty string.

    Several ranks can check a share of its files each.
    """
    try:
        manifest = read_manifest(folder)
        return find_damage(folder, list(manifest["files"].items())[share::of])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
