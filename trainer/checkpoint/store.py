"""The folder of a run's checkpoints: `step_<n>/` each, `latest` names the newest. No crash leaves a half one.

A checkpoint is written into `step_<n>.tmp`, gets its manifest last, and is renamed when all of it is on the disk.
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
KEPT_AT_LEAST = 2  # whatever is asked for: one may turn out to be damaged


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None  # a descriptor, held while the run lasts

    def open_for_writing(self) -> None:
        """Makes the folder, keeps other runs out of it, and removes what a killed run left half-written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileExistsError:
            raise UserError(
                f"{self.folder} is a file", "set Engine.save_load.output_dir to a folder"
            ) from None
        except OSError as error:
            hint = "set Engine.save_load.output_dir to a folder that can be written"
            raise UserError(f"{self.folder} cannot be written: {error.strerror}", hint) from None
        self._take_lock(self._lock)
        for part in self.folder.glob("step_*.tmp"):
            shutil.rmtree(part, ignore_errors=True)
        for old in self.folder.glob("step_*.old"):
            if old.with_suffix("").exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(old.with_suffix(""))

    def _take_lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 200).decode(errors="replace").strip() or "unknown"
            hint = "wait for it, end it, or set Engine.save_load.output_dir to another folder"
            raise UserError(
                f"another run writes to {self.folder} (process {owner})", hint
            ) from None
        except OSError:
            return  # a file system without locks
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def checkpoints(self) -> list[Path]:
        """The newest first, whether they are good or not."""
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
        """Gives a complete checkpoint its name. One that has it already steps aside and is deleted last."""
        target, old = part.with_suffix(""), part.with_suffix(".old")
        sync_folder(part)
        if target.exists():
            target.rename(old)
        part.rename(target)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        # A full disk: the checkpoint is there, only the pointer is not.
        with contextlib.suppress(OSError), replacing(self.folder / "latest") as stream:
            stream.write(f"{target.name}\n".encode())

    def set_aside(self, step: int) -> list[tuple[Path, Path]]:
        """Renames the checkpoints of later steps: nothing may take them for the newest. Their old and new names."""
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
        """Raises OSError early: a save that fails half-way costs time and may fill the disk for others."""
        free = shutil.disk_usage(self.folder).free
        if free < wanted:
            raise OSError(f"{_mib(wanted)} are needed, {_mib(free)} are free")

    def prune(self, keep: int) -> None:
        """Deletes all but the newest `keep` good checkpoints, never before two newer ones were read back whole."""
        good = 0
        for folder in self.checkpoints():
            if good >= max(keep, KEPT_AT_LEAST):
                shutil.rmtree(folder, ignore_errors=True)
            elif not damage_of(folder):
                good += 1


def damage_of(folder: Path, share: int = 0, of: int = 1) -> str:
    """Why a checkpoint cannot be used, or nothing. Several ranks can look at a share of its files each."""
    try:
        manifest = read_manifest(folder)
        return find_damage(folder, list(manifest["files"].items())[share::of])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
