"""Checkpoints of all ranks, written in the background while training continues.

A checkpoint holds tensors under global names, and a manifest. Loading uses the newest checkpoint
that is complete and undamaged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from trainer.checkpoint.loading import Shape, Untrusted, load_pieces
from trainer.checkpoint.manifest import (
    NAME,
    TORCH_FORMAT,
    is_signed,
    read_manifest,
    write_manifest,
)
from trainer.checkpoint.priority import lower_thread_priority
from trainer.checkpoint.sharing import Rows, bytes_of, share_out
from trainer.checkpoint.signing import (
    SIGNATURE_HINT,
    VARIABLE,
    current_keys,
    is_about_signature,
)
from trainer.checkpoint.store import Store, unusable
from trainer.checkpoint.tensor_files import Written, file_name, tensor_index, write_pieces
from trainer.checkpoint.verification import Job, Verifier, record_all
from trainer.checksums import Damaged
from trainer.device import host_copy, use_in_thread, wait_for_copies
from trainer.errors import UserError
from trainer.mesh import Mesh
from trainer.slices import Piece

Facts = dict[str, Any]
Named = TypeVar("Named")
OVERHEAD = 1.05  # factor for headers and manifest when checking free space


class Checkpoints:
    def __init__(
        self,
        output: Path,
        keep_last: int | None,
        mesh: Mesh,
        info: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        current_keys()  # raises UserError for an invalid key, before anything is trained
        self.store, self.keep_last, self.mesh = Store(output), keep_last, mesh
        self.info, self.warn = info, warn
        # Called with step and seconds when a checkpoint is complete, by the thread that wrote it.
        self.on_commit: Callable[..., None] = lambda **facts: None
        # The step of the newest checkpoint that this run wrote or resumed from.
        self.saved_step: int | None = None
        self._share: dict[str, Rows] | None = None  # what this rank writes
        self._size = 0  # bytes that the ranks of this disk write together
        self._buffers: dict[str, Tensor] = {}  # allocated once: pinning memory is slow
        self._thread: threading.Thread | None = None
        self._began = 0.0  # when the newest save began
        self.failure = ""  # why the last save failed
        self._unverified: Job | None = None  # this rank's newest file, if it was not read back
        # Why each checkpoint was rejected.
        self._source, self._rejected = "auto", dict[Path, str]()
        # One rank per disk deletes old checkpoints.
        deletes = keep_last and mesh.rank_on_disk == 0
        self.verifier = Verifier(warn, self._prune if deletes else None)

    def open(self) -> None:
        """Lock the folder: no other run may write to it meanwhile."""
        self.mesh.once_per_disk(lambda: self.store.open_for_writing(self.warn))

    def find(self, ckpt_dir: str) -> Path | None:
        """The newest usable checkpoint at a path, or of this run (`auto`).

        None if `auto` finds no checkpoint at all. Tensors are verified only when they are loaded.
        """
        self._source = ckpt_dir
        where = self.store.folder if ckpt_dir == "auto" else Path(ckpt_dir)
        named = os.path.exists(where / NAME)  # False, not an error, without permission to look
        found = [where] if named else Store(where).checkpoints()
        # Nodes may have separate disks: only a checkpoint that is on all of them can be used.
        everywhere = [
            list(map(Path, folders))
            for folders in self.mesh.gather(list(map(str, found)))[:: self.mesh.per_disk]
        ]
        candidates = [
            folder for folder in everywhere[0] if all(folder in others for others in everywhere)
        ]
        for folder in candidates:
            if folder not in self._rejected and not any(
                self._reject(folder, check(folder)) for check in (self._unusable, self._difference)
            ):
                return folder
        if any(everywhere) and not candidates and ckpt_dir == "auto":
            self._require_incomplete_first_save(everywhere)
            self._set_aside(-1, "is not on the disks of all nodes")
            return None
        if candidates or ckpt_dir != "auto":
            raise self._none_usable(where, candidates)
        return None

    def _none_usable(self, where: Path, candidates: Sequence[Path]) -> UserError:
        """Why no checkpoint can be used: the reason of the newest, since it is the wanted one."""
        reasons = [self._rejected[folder] for folder in candidates]
        hint = "set Engine.save_load.ckpt_dir to another one, or leave it empty to start again"
        if any(map(is_about_signature, reasons)):
            hint = f"{SIGNATURE_HINT}; or {hint}"
        message = f"{where} contains no usable checkpoint"
        if candidates:
            message += f": {candidates[0].name}: {reasons[0]}"
        if len(candidates) > 1:
            message += f"; and {len(candidates) - 1} more"
        return UserError(message, hint)

    def _unusable(self, folder: Path) -> str:
        return unusable(folder, self.mesh.rank_on_disk, self.mesh.per_disk)

    def _difference(self, folder: Path) -> str:
        """Whether the disks of the nodes have different checkpoints under one name."""
        if self.mesh.disks == 1:
            return ""
        # A node may have been in another run before: replicas of different weights would never
        # notice it, and with different steps the ranks would wait for each other forever.
        try:
            manifest = read_manifest(folder)
        except ValueError as error:  # changed since it was checked; no other rank may wait here
            manifest = {"save_id": str(error)}
        ours = [manifest.get(key) for key in ("save_id", "step", "updates", "samples")]
        is_same = all(others == ours for others in self.mesh.gather(ours))
        return "" if is_same else "it is not the same checkpoint on all nodes"

    def _reject(self, folder: Path, damage: str) -> bool:
        """Whether any rank found damage: all of them must reach the same decision."""
        damage = next(filter(None, self.mesh.gather(damage)), "")
        if damage:
            self._rejected[folder] = damage
            if self.mesh.is_first:
                self.warn(f"cannot use {folder}: {damage}")
        return bool(damage)

    def load(
        self,
        folder: Path,
        pieces: dict[str, Piece],
        shapes: dict[str, Shape],
        check: Callable[[Facts, Path], None],
    ) -> tuple[Path, Facts]:
        """Load the checkpoint that `find` returned into the pieces, after `check` accepted it.

        `shapes` lists all tensors of the whole model: a checkpoint contains all of them, in
        whatever layout it was written. If a rank finds damage, all of them load the checkpoint
        before it instead. Returns the checkpoint that was loaded, and its facts.
        """
        self.info(f"Try to load checkpoint from {folder}")
        facts: Facts = {}
        try:
            facts = read_manifest(folder)
            check(facts, folder)
            damage = load_tensors(folder, facts, pieces, shapes)
        except ValueError as error:  # the manifest was changed since `find` read it
            damage = str(error)
        if self._reject(folder, damage):
            older = self.find(self._source)
            assert older is not None  # it raises UserError if there is none
            return self.load(older, pieces, shapes, check)
        if self.store.holds(folder) and self.mesh.rank_on_disk == 0:
            record_all(folder, facts["files"])
        self.info("successfully load checkpoints")
        if self.mesh.is_first and not current_keys() and is_signed(folder):
            self.warn(f"{folder} is signed, but {VARIABLE} is not set: new ones are not signed")
        return folder, facts

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

    def save(
        self, step: int, pieces: dict[str, Piece], facts: Facts, is_waited_for: bool = False
    ) -> None:
        """Copy the tensors and return; a thread writes them, with low priority.

        First waits for the previous save, whose buffers are used again. `is_waited_for`: training
        has stopped, perhaps with little time left, so other processes must not slow this one down.
        """
        self.wait()
        if step == self.saved_step:
            return
        arguments = (step, self._staged(pieces), {"step": step, **facts}, is_waited_for)
        self._began = time.monotonic()
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
        self._verify_newest()
        self.verifier.close()
        self.store.close()

    def _staged(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Copy this rank's share to the buffers. If several ranks hold a piece, they divide it."""
        if self._share is None:
            self._share = share_out(pieces, self.mesh)
            self._size = sum(self._of_disk(self.mesh.gather(bytes_of(pieces, self._share))))
        mine = {name: pieces[name].rows(rows.begin, rows.end) for name, rows in self._share.items()}
        for name, piece in mine.items():
            if name not in self._buffers:
                self._buffers[name] = host_copy(piece.tensor)
            self._buffers[name].copy_(piece.tensor, non_blocking=True)
        wait_for_copies(self.mesh.device)
        return {name: piece._replace(tensor=self._buffers[name]) for name, piece in mine.items()}

    def _write(
        self, step: int, pieces: dict[str, Piece], facts: Facts, is_waited_for: bool
    ) -> None:
        """Write a checkpoint, in the background thread. It has the same id on all disks.

        Ranks agree on the result of every step, so that all of them succeed or fail together.
        """
        use_in_thread(self.mesh.device)
        if not is_waited_for:
            lower_thread_priority()
        part, name = self.store.part(step), file_name(self.mesh.rank_on_disk)
        written: list[Written] = []
        are_busy = [True]
        try:
            # 1. Check the free space for the whole checkpoint, and create the temporary folder.
            mine = (self.verifier.is_busy, secrets.token_hex(8))
            failure, starts = self._agree(lambda: self._prepare(part), mine)
            are_busy = [is_busy for is_busy, _ in self._of_disk(starts)]
            facts["save_id"] = starts[0][1]
            if not failure:  # 2. Every rank writes its own file.
                failure, files = self._agree(
                    lambda: written.append(write_pieces(part / name, pieces)), written
                )
            # 3. Only when all files are on disk, write the manifest and rename the folder: its
            # final name means that it is complete.
            if not failure:
                everything = [Written(*file) for (file,) in self._of_disk(files)]
                failure, _ = self._agree(lambda: self._commit(part, facts, everything))
        except RuntimeError as error:  # a rank exited; the training loop will notice it too
            failure = reason_of(error)
        self.failure = failure
        with contextlib.suppress(BrokenPipeError):  # the training loop will notice it too
            self._report(step, part, failure)
        if not failure:
            # Last, and no rank waits for it: read back what was written. If the disk is too slow
            # for that, all ranks skip it: if each skipped others, no checkpoint would be verified.
            self._unverified = Job(part.with_suffix("") / name, written[0].facts)
        # Also after a failure: on a full disk, verifying an earlier one makes space for the next.
        if not any(are_busy):
            self._verify_newest()

    def _verify_newest(self) -> None:
        if self._unverified:
            self.verifier.start(self._unverified)
            self._unverified = None

    def _report(self, step: int, part: Path, failure: str) -> None:
        if not failure:
            self.saved_step = step
            self.on_commit(step=step, seconds=round(time.monotonic() - self._began, 3))
            self.info(f"Save model to {part.with_suffix('')}")
            return
        if self.mesh.rank_on_disk == 0:
            with contextlib.suppress(OSError):
                self.store.discard(part)
        if self.mesh.is_first:
            self.warn(f"cannot save checkpoint of step {step}: {failure}; earlier ones are kept")

    def _of_disk(self, values: list[Any]) -> list[Any]:
        """Of the values of all ranks, those of the ranks that write to the same disk."""
        first = self.mesh.rank - self.mesh.rank_on_disk
        return values[first : first + self.mesh.per_disk]

    def _agree(self, part: Callable[[], None], mine: Any = None) -> tuple[str, list[Any]]:
        """Run one step on all ranks, which wait for each other once.

        `mine` is the value of this rank; it is read after the step, which may fill it. Returns the
        first failure of any rank, or an empty string, and the values of all ranks.
        """
        failure = ""
        try:
            part()
        except Exception as error:
            failure = reason_of(error)
        failures, values = zip(*self.mesh.gather((failure, mine)))
        return next(filter(None, failures), ""), list(values)

    def _prepare(self, part: Path) -> None:
        if self.mesh.rank_on_disk == 0:
            self.store.discard(part)
            self.store.require_space(int(OVERHEAD * self._size))
            part.mkdir()

    def _commit(self, part: Path, facts: Facts, written: list[Written]) -> None:
        if self.mesh.rank_on_disk:  # one rank per disk is enough
            return
        named = {file_name(rank): file for rank, file in enumerate(written)}
        tensors = tensor_index({name: file.tensors for name, file in named.items()})
        files = {name: file.facts for name, file in named.items()}
        write_manifest(part, {**facts, "tensors": tensors}, files)
        self.store.commit(part)

    def _prune(self) -> None:
        """Called when a checkpoint is verified: it may replace an older one."""
        if self.keep_last:
            self.store.prune(self.keep_last)


def load_tensors(
    folder: Path, manifest: Facts, pieces: dict[str, Piece], shapes: dict[str, Shape]
) -> str:
    """Load the pieces from a checkpoint of any version. Returns what is damaged in it, if anything.

    Raises UserError if it is a checkpoint of another model, or crafted.
    """
    if not has_optimizer(manifest):
        pieces, shapes = only_weights(pieces), only_weights(shapes)
    try:
        if manifest["version"] == TORCH_FORMAT:
            # Imported here: torch's part takes a second to import.
            from trainer.checkpoint.shards import load_shards

            load_shards(folder, pieces, shapes, manifest["files"])
        else:
            load_pieces(folder, manifest, pieces, shapes)
    except Damaged as damage:
        return str(damage)
    except Untrusted as error:
        raise UserError(
            f"cannot load {folder}: {error}", "use only checkpoints that you or your team wrote"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{folder} is a checkpoint of another model: {error}", "use the config of that run"
        ) from None
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(
            f"cannot load {folder}: {reason_of(error)}", "use another checkpoint"
        ) from None
    return ""


def has_optimizer(manifest: Facts) -> bool:
    """Whether a checkpoint contains the state of an optimizer. One of imported weights does not."""
    return manifest.get("has_optimizer") is not False


def only_weights(named: dict[str, Named]) -> dict[str, Named]:
    """The entries for the model, without those for the optimizer."""
    return {name: each for name, each in named.items() if name.startswith("model.")}


def reason_of(error: BaseException) -> str:
    """The cause in one line. torch wraps the errors of all ranks into one exception."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    strerror = getattr(error, "strerror", None)
    text = strerror or str(error) or type(error).__name__
    return text.strip().splitlines()[-1][:300]
