"""The folder of a run's checkpoints: one `step_<n>/` each; the file `latest` names the newest.

A checkpoint is written to `step_<n>.tmp`, the manifest last, and renamed when all of it is on disk.
So a crash never leaves an incomplete checkpoint under its final name.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint.folder_lock import FolderLock
from trainer.checkpoint.manifest import (
    TORCH_FORMAT,
    find_damage,
    find_missing,
    is_verified,
    read_manifest,
)
from trainer.durable import replacing, sync_folder
from trainer.errors import UserError

_STEP = re.compile(r"step_(\d+)")
_ASIDE = re.compile(r"step_(\d+)\.aside(\d+)")
KEPT_AT_LEAST = 2  # even if the user wants fewer: one may turn out to be damaged


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, FolderLock(folder)

    def open_for_writing(self, warn: Callable[[str], None]) -> None:
        """Create and lock the folder, and clean up after a run that was killed while saving."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.take(warn)
        except FileExistsError:
            raise UserError(
                f"{self.folder} is a file", "set Engine.save_load.output_dir to a folder"
            ) from None
        except OSError as error:
            hint = "set Engine.save_load.output_dir to a writable folder"
            raise UserError(f"cannot write to {self.folder}: {error.strerror}", hint) from None
        for part in self.folder.glob("step_*.tmp"):
            shutil.rmtree(part, ignore_errors=True)
        for old in self.folder.glob("step_*.old"):  # killed during `commit`
            if old.with_suffix("").exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(old.with_suffix(""))

    def close(self) -> None:
        self.lock.release()

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
        self.lock.require()
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
                taken = [number for (at, number), _ in self._aside() if at == _step_of(folder)]
                aside = folder.with_name(f"{folder.name}.aside{max(taken, default=0) + 1}")
                moved.append((folder, folder.rename(aside)))
        return moved

    def discard(self, part: Path) -> None:
        self.lock.require()
        shutil.rmtree(part, ignore_errors=True)

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
                good += is_verified(folder)
        for _, folder in self._aside()[keep:]:
            self._delete(folder)

    def _aside(self) -> list[tuple[tuple[int, int], Path]]:
        """The checkpoints that were set aside: step, number and folder, the newest first."""
        found = [(_ASIDE.fullmatch(folder.name), folder) for folder in self.folder.glob("step_*")]
        named = [((int(name[1]), int(name[2])), folder) for name, folder in found if name]
        return sorted(named, reverse=True)

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint. If the run is killed meanwhile, `open_for_writing` continues."""
        with contextlib.suppress(OSError):
            doomed = folder.rename(folder.with_name(f"{folder.name}.tmp"))
            shutil.rmtree(doomed, ignore_errors=True)


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
