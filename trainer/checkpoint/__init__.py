"""Keeps a run's state so that no step is lost for good: checkpoints of all ranks, written beside the training.

A checkpoint holds tensors under global names and a manifest of facts. Reading takes the newest one that is whole.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.manifest import NAME, file_facts, read_manifest, write_manifest
from trainer.checkpoint.store import Store, damage_of
from trainer.device import host_copy, use_in_thread
from trainer.errors import UserError
from trainer.mesh import Mesh
from trainer.slices import Piece

Facts = dict[str, Any]
Shape = tuple[int, ...]
METADATA = ".metadata"
OVERHEAD = 1.05  # headers, manifest and metadata, when free space is looked at


class Checkpoints:
    def __init__(
        self,
        output: Path,
        keep_last: int | None,
        mesh: Mesh,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.store, self.keep_last, self.mesh = Store(output), keep_last, mesh
        self.say, self.warn = say, warn
        self.saved_step: int | None = (
            None  # of the newest checkpoint that this run wrote or began from
        )
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self.failure = ""  # what went wrong with the last save

    def find(self, ckpt_dir: str) -> Path | None:
        """The newest whole checkpoint at a path, or of this run (`auto`); None when `auto` finds nothing at all."""
        where = self.store.folder if ckpt_dir == "auto" else Path(ckpt_dir)
        named = os.path.exists(where / NAME)  # and False where the folder may not be looked into
        everywhere = self.mesh.gather([where] if named else Store(where).checkpoints())[
            :: self.mesh.per_disk
        ]
        candidates = [
            folder for folder in everywhere[0] if all(folder in others for others in everywhere)
        ]
        for folder in candidates:
            damage = damage_of(folder, self.mesh.rank_on_disk, self.mesh.per_disk)
            damage = next(filter(None, self.mesh.gather(damage)), "")
            if not damage:
                return folder
            if self.mesh.is_first:
                self.warn(f"{folder} cannot be used: {damage}")
        if any(everywhere) and not candidates and ckpt_dir == "auto":
            self._require_torn_first_save(everywhere)
            self._set_aside(-1, "is not on all nodes, each of which has a disk of its own")
            return None
        if candidates or ckpt_dir != "auto":
            hint = "name another one as Engine.save_load.ckpt_dir, or leave it empty to start anew"
            raise UserError(f"{where} holds no checkpoint that can be used", hint)
        return None

    def load(
        self,
        folder: Path,
        pieces: dict[str, Piece],
        shapes: dict[str, Shape],
        check: Callable[[Facts], None],
    ) -> Facts:
        """Overwrites the pieces with a checkpoint that `find` returned, once `check` agrees with its facts.

        `shapes` are those of all tensors of the whole model: a checkpoint has them all, whoever wrote it.
        """
        from trainer.checkpoint.shards import (
            Untrusted,
            load_shards,
        )  # torch's part takes a second to import

        self.say(f"Try to load checkpoint from {folder}")
        facts = read_manifest(folder)
        check(facts)
        try:
            load_shards(folder, pieces, shapes, facts["files"])
        except Untrusted as error:
            raise UserError(
                f"{folder} is refused: {error}", "use only checkpoints that you or your team wrote"
            ) from None
        except ValueError as error:
            raise UserError(
                f"{folder} is a checkpoint of another model: {error}",
                "use the config it was made with",
            ) from None
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise UserError(
                f"{folder} is refused: {_reason(error)}", "use another checkpoint"
            ) from None
        self.say("successfully load checkpoints")
        return facts

    def _require_torn_first_save(self, everywhere: list[list[Path]]) -> None:
        """A run that ended while its first checkpoint was written begins anew; a disk that lost all of them is told."""
        if max(map(len, everywhere)) > 1:
            lacking = [str(node) for node, folders in enumerate(everywhere) if not folders]
            hint = "copy the folder of another node there, or delete it everywhere to begin anew"
            raise UserError(
                f"{self.store.folder} has no checkpoint on node {', '.join(lacking)}, but on others",
                hint,
            )

    def go_on_from(self, step: int) -> None:
        """This run goes on from an own checkpoint; newer ones, damaged or not wanted, step aside."""
        self.saved_step = step
        self._set_aside(step, "is newer than what this run goes on from")

    def _set_aside(self, step: int, why: str) -> None:
        """Every own checkpoint after this step."""
        if self.mesh.rank_on_disk == 0:
            for folder, aside in self.store.set_aside(step):
                self.warn(f"{folder} {why}: renamed to {aside.name}")
        self.mesh.barrier()

    def save(self, step: int, pieces: dict[str, Piece], facts: Facts) -> None:
        """Copies the tensors and returns; a thread writes them. Waits first for the save before, if it still runs."""
        self.wait()
        if step == self.saved_step:
            return
        arguments = (step, self._staged(pieces), {"step": step, **facts})
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> str:
        """Until the last save has ended; what went wrong with it, or nothing."""
        if self._thread:
            self._thread.join()
            self._thread = None
        return self.failure

    def close(self) -> None:
        self.wait()
        self.store.close()

    def _staged(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Copies of this rank's share: what several ranks hold alike is written by one of them."""
        mine = {name: pieces[name] for name in own_share(pieces, self.mesh.disks)}
        for name, piece in mine.items():
            if name not in self._buffers:
                self._buffers[name] = host_copy(piece.tensor)
            self._buffers[name].copy_(piece.tensor)
        return {name: piece._replace(tensor=self._buffers[name]) for name, piece in mine.items()}

    def _write(self, step: int, pieces: dict[str, Piece], facts: Facts) -> None:
        """In the thread. Ranks agree after each part, so that all of them end together, in success or failure."""
        use_in_thread(self.mesh.device)
        part = self.store.part(step)
        files: dict[str, Facts] = {}
        try:
            wanted = sum(self._on_disk(sum(piece.tensor.nbytes for piece in pieces.values())))
            failure = self._agree(lambda: self._prepare(part, int(OVERHEAD * wanted)))
            failure = failure or self._agree(lambda: files.update(self._write_shards(part, pieces)))
            everything = {
                name: known for share in self._on_disk(files) for name, known in share.items()
            }
            failure = failure or self._agree(lambda: self._commit(part, facts, everything))
        except RuntimeError as error:  # a rank is gone; the training loop will notice as well
            failure = _reason(error)
        self.failure = failure
        with contextlib.suppress(BrokenPipeError):  # the training loop notices by itself
            if failure and self.mesh.rank_on_disk == 0:
                self.store.discard(part)
            if failure and self.mesh.is_first:
                self.warn(
                    f"checkpoint of step {step} is not saved: {failure}; those before are kept"
                )
            if not failure:
                self.saved_step = step
                self.say(f"Save model to {part.with_suffix('')}")
        if not failure and self.keep_last and self.mesh.rank_on_disk == 0:
            self.store.prune(
                self.keep_last
            )  # last: it reads whole checkpoints, and no rank waits for it

    def _on_disk(self, value: Any) -> list[Any]:
        """The values of the ranks that write to the same disk."""
        first = self.mesh.rank - self.mesh.rank_on_disk
        return self.mesh.gather(value)[first : first + self.mesh.per_disk]

    def _agree(self, part: Callable[[], None]) -> str:
        """Does a part; the first failure of any rank, or nothing."""
        failure = ""
        try:
            part()
        except BaseException as error:  # torch's CheckpointException is no Exception
            failure = _reason(error)
        return next(filter(None, self.mesh.gather(failure)), "")

    def _prepare(self, part: Path, wanted: int) -> None:
        from trainer.checkpoint import shards  # noqa: F401 - imported by the thread, not by the first step

        if self.mesh.rank_on_disk == 0:
            self.store.discard(part)
            self.store.require_space(wanted)
            part.mkdir()

    def _write_shards(self, part: Path, pieces: dict[str, Piece]) -> dict[str, Facts]:
        from trainer.checkpoint.shards import save_shards

        save_shards(part, pieces, self.mesh.disk_group)
        return {
            file.name: file_facts(file, sync=True)
            for file in part.glob(f"__{self.mesh.rank_on_disk}_*")
        }

    def _commit(self, part: Path, facts: Facts, files: dict[str, Facts]) -> None:
        if self.mesh.rank_on_disk:
            return
        metadata = part / METADATA
        write_manifest(part, facts, {**files, metadata.name: file_facts(metadata, sync=True)})
        self.store.commit(part)


def own_share(pieces: dict[str, Piece], disks: int = 1) -> list[str]:
    """The names that this rank writes: the ranks that hold the same pieces, and see the same disk, take turns, from the
    largest piece on. Of ranks that follow each other as replicas do, those of a disk do, too."""
    names = []
    for holders in {piece.holders for piece in pieces.values()}:
        alike = [
            name
            for name, piece in pieces.items()
            if piece.holders == holders and piece.tensor.numel()
        ]
        by_size = sorted(alike, key=lambda name: (-pieces[name].tensor.numel(), name))
        here = holders.total // disks
        names += by_size[holders.number % here :: here]
    return [name for name in names if not pieces[name].is_copy]


def _reason(error: BaseException) -> str:
    """The cause in one line: torch wraps the errors of all ranks into one."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    strerror = getattr(error, "strerror", None)
    text = strerror or str(error) or type(error).__name__
    return text.strip().splitlines()[-1][:300]
