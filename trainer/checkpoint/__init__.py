"""Checkpoints of all ranks, written in the background while training continues.

A checkpoint holds tensors under global names, and a manifest. Loading uses the newest checkpoint
that is complete and undamaged.
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
OVERHEAD = 1.05  # factor for headers, manifest and metadata when checking free space


class Checkpoints:
    def __init__(
        self,
        output: Path,
        keep_last: int | None,
        mesh: Mesh,
        info: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.store, self.keep_last, self.mesh = Store(output), keep_last, mesh
        self.info, self.warn = info, warn
        # The step of the newest checkpoint that this run wrote or resumed from.
        self.saved_step: int | None = None
        self._buffers: dict[str, Tensor] = {}  # allocated once: pinning memory is slow
        self._thread: threading.Thread | None = None
        self.failure = ""  # why the last save failed

    def find(self, ckpt_dir: str) -> Path | None:
        """The newest usable checkpoint at a path, or of this run (`auto`).

        None if `auto` finds no checkpoint at all.
        """
        where = self.store.folder if ckpt_dir == "auto" else Path(ckpt_dir)
        named = os.path.exists(where / NAME)  # False, not an error, without permission to look
        found = self.mesh.gather([where] if named else Store(where).checkpoints())
        # Nodes may have separate disks: only a checkpoint that is on all of them can be used.
        everywhere = found[:: self.mesh.per_disk]
        candidates = [
            folder for folder in everywhere[0] if all(folder in others for others in everywhere)
        ]
        for folder in candidates:
            damage = damage_of(folder, self.mesh.rank_on_disk, self.mesh.per_disk)
            # Each rank checked a share of the files; all of them must reach the same decision.
            damage = next(filter(None, self.mesh.gather(damage)), "")
            if not damage:
                return folder
            if self.mesh.is_first:
                self.warn(f"cannot use {folder}: {damage}")
        if any(everywhere) and not candidates and ckpt_dir == "auto":
            self._require_incomplete_first_save(everywhere)
            self._set_aside(-1, "is not on the disks of all nodes")
            return None
        if candidates or ckpt_dir != "auto":
            hint = "set Engine.save_load.ckpt_dir to another one, or leave it empty to start again"
            raise UserError(f"{where} contains no usable checkpoint", hint)
        return None

    def load(
        self,
        folder: Path,
        pieces: dict[str, Piece],
        shapes: dict[str, Shape],
        check: Callable[[Facts], None],
    ) -> Facts:
        """Load a checkpoint that `find` returned into the pieces, after `check` accepted its facts.

        `shapes` lists all tensors of the whole model: a checkpoint contains all of them, in
        whatever layout it was written.
        """
        # Imported here: torch's part takes a second to import.
        from trainer.checkpoint.shards import Untrusted, load_shards

        self.info(f"Try to load checkpoint from {folder}")
        facts = read_manifest(folder)
        check(facts)
        try:
            load_shards(folder, pieces, shapes, facts["files"])
        except Untrusted as error:
            raise UserError(
                f"cannot load {folder}: {error}",
                "use only checkpoints that you or your team wrote",
            ) from None
        except ValueError as error:
            raise UserError(
                f"{folder} is a checkpoint of another model: {error}",
                "use the config of that run",
            ) from None
        except BaseException as error:  # torch's CheckpointException is not an Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise UserError(
                f"cannot load {folder}: {_reason(error)}", "use another checkpoint"
            ) from None
        self.info("successfully load checkpoints")
        return facts

    def _require_incomplete_first_save(self, everywhere: list[list[Path]]) -> None:
        """Raise unless the run was killed while it saved its first checkpoint.

        In that case it may start again. But if a disk lost several checkpoints, the user must know.
        """
        if max(map(len, everywhere)) > 1:
            lacking = [str(node) for node, folders in enumerate(everywhere) if not folders]
            hint = "copy the folder from another node, or delete it on all nodes to start again"
            nodes = ", ".join(lacking)
            raise UserError(
                f"checkpoints in {self.store.folder} are missing on these nodes, "
                f"but not on others: {nodes}",
                hint,
            )

    def resumed_from(self, step: int) -> None:
        """Record that this run resumed from its own checkpoint, and rename newer ones."""
        self.saved_step = step
        self._set_aside(step, "is newer than the checkpoint that this run resumed from")

    def _set_aside(self, step: int, why: str) -> None:
        """Rename every checkpoint of this run after this step."""
        if self.mesh.rank_on_disk == 0:
            for folder, aside in self.store.set_aside(step):
                self.warn(f"{folder} {why}: renamed to {aside.name}")
        self.mesh.barrier()

    def save(self, step: int, pieces: dict[str, Piece], facts: Facts) -> None:
        """Copy the tensors and return; a thread writes them.

        First waits for the previous save, whose buffers are used again.
        """
        self.wait()
        if step == self.saved_step:
            return
        arguments = (step, self._staged(pieces), {"step": step, **facts})
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> str:
        """Wait for the last save. Returns why it failed, or an empty string."""
        if self._thread:
            self._thread.join()
            self._thread = None
        return self.failure

    def close(self) -> None:
        self.wait()
        self.store.close()

    def _staged(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Copy this rank's share to the buffers. If several ranks hold a piece, one writes it."""
        mine = {name: pieces[name] for name in own_share(pieces, self.mesh.disks)}
        for name, piece in mine.items():
            if name not in self._buffers:
                self._buffers[name] = host_copy(piece.tensor)
            self._buffers[name].copy_(piece.tensor)
        return {name: piece._replace(tensor=self._buffers[name]) for name, piece in mine.items()}

    def _write(self, step: int, pieces: dict[str, Piece], facts: Facts) -> None:
        """Write a checkpoint, in the background thread.

        Ranks agree on the result of every step, so that all of them succeed or fail together.
        """
        use_in_thread(self.mesh.device)
        part = self.store.part(step)
        files: dict[str, Facts] = {}
        try:
            # 1. Check the free space for the whole checkpoint, and create the temporary folder.
            wanted = sum(self._on_disk(sum(piece.tensor.nbytes for piece in pieces.values())))
            failure = self._agree(lambda: self._prepare(part, int(OVERHEAD * wanted)))
            # 2. Every rank writes and checksums its own file.
            failure = failure or self._agree(lambda: files.update(self._write_shards(part, pieces)))
            everything = {
                name: known for share in self._on_disk(files) for name, known in share.items()
            }
            # 3. Only when all files are on disk, write the manifest and rename the folder: its
            # final name means that it is complete.
            failure = failure or self._agree(lambda: self._commit(part, facts, everything))
        except RuntimeError as error:  # a rank exited; the training loop will notice it too
            failure = _reason(error)
        self.failure = failure
        with contextlib.suppress(BrokenPipeError):  # the training loop will notice it too
            if failure and self.mesh.rank_on_disk == 0:
                self.store.discard(part)
            if failure and self.mesh.is_first:
                self.warn(
                    f"cannot save checkpoint of step {step}: {failure}; earlier ones are kept"
                )
            if not failure:
                self.saved_step = step
                self.info(f"Save model to {part.with_suffix('')}")
        # Last, because it reads whole checkpoints to verify them, and no rank waits for it.
        if not failure and self.keep_last and self.mesh.rank_on_disk == 0:
            self.store.prune(self.keep_last)

    def _on_disk(self, value: Any) -> list[Any]:
        """The values of the ranks that write to the same disk."""
        first = self.mesh.rank - self.mesh.rank_on_disk
        return self.mesh.gather(value)[first : first + self.mesh.per_disk]

    def _agree(self, part: Callable[[], None]) -> str:
        """Run one step on all ranks. Returns the first failure of any rank, or an empty string."""
        failure = ""
        try:
            part()
        except BaseException as error:  # torch's CheckpointException is not an Exception
            failure = _reason(error)
        return next(filter(None, self.mesh.gather(failure)), "")

    def _prepare(self, part: Path, wanted: int) -> None:
        # Import it in this thread, so that no training step has to wait for the import.
        from trainer.checkpoint import shards  # noqa: F401

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
        if self.mesh.rank_on_disk:  # one rank per disk is enough
            return
        metadata = part / METADATA
        write_manifest(part, facts, {**files, metadata.name: file_facts(metadata, sync=True)})
        self.store.commit(part)


def own_share(pieces: dict[str, Piece], disks: int = 1) -> list[str]:
    """The names of the pieces that this rank writes.

    Ranks that hold the same pieces and write to the same disk take turns, starting with the largest
    piece. Replicas are numbered consecutively, and so are those of one disk.
    """
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
    """The cause in one line. torch wraps the errors of all ranks into one exception."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    strerror = getattr(error, "strerror", None)
    text = strerror or str(error) or type(error).__name__
    return text.strip().splitlines()[-1][:300]
