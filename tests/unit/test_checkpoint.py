"""Checkpoints: whole or not there. Oracles: the tensors that were saved, and files damaged on purpose."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch_checkpoints import sign, write_torch_checkpoint
from trainer.checkpoint import Checkpoints
from trainer.checkpoint.loading import Untrusted, load_pieces
from trainer.checkpoint.manifest import TORCH_FORMAT, read_manifest, write_manifest
from trainer.checkpoint.shards import read_metadata
from trainer.checkpoint.snapshot import load_snapshot, save_snapshot
from trainer.checkpoint.store import Store, damage_of
from trainer.errors import UserError
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.resume import _invalid_facts
from trainer.slices import shapes, whole

MESH = Mesh(Layout(), 0, 0, torch.device("cpu"))


class Keeper:
    """Checkpoints in a folder, and what they said."""

    def __init__(self, folder: Path, keep_last: int | None = None) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.checkpoints = Checkpoints(folder, keep_last, MESH, self.said.append, self.warned.append)
        self.checkpoints.open()

    def save(self, step: int, tensors: dict[str, Tensor] | None = None) -> str:
        """Save, and wait until it is verified, too."""
        self.checkpoints.save(step, whole(tensors or state(step)), {"step": step})
        failure = self.checkpoints.wait()
        assert self.checkpoints.verifier.wait(30)
        return failure

    def load(self, where: str = "auto") -> tuple[Path, dict[str, Tensor]]:
        folder = self.checkpoints.find(where)
        assert folder is not None
        tensors = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        folder, _ = self.checkpoints.load(folder, whole(tensors), shapes(tensors), lambda facts, folder: None)
        return folder, tensors


def state(step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    return {f"model.{n}": torch.randn(8, n + 1, generator=source) for n in range(4)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(tmp_path / "output")


def test_what_is_saved_is_loaded(keeper: Keeper) -> None:
    assert keeper.save(5) == keeper.save(10) == ""
    folder, tensors = keeper.load()
    assert folder.name == "step_10"
    assert same(tensors, state(10))
    assert (folder.parent / "latest").read_text() == "step_10\n"
    assert keeper.said == [f"Save model to {folder.parent}/step_5", f"Save model to {folder}", f"Try to load checkpoint from {folder}", "successfully load checkpoints"]  # fmt: skip
    assert not list(folder.parent.glob("*.tmp"))


def test_saving_goes_on_while_tensors_change(keeper: Keeper) -> None:
    """The copy is taken when `save` is called, whatever the training does afterwards."""
    tensors = state(1)
    keeper.checkpoints.save(1, whole(tensors), {"step": 1})
    for tensor in tensors.values():
        tensor.zero_()
    keeper.checkpoints.wait()
    assert same(keeper.load()[1], state(1))


def test_a_step_is_saved_once(keeper: Keeper) -> None:
    keeper.save(1)
    keeper.save(1)
    assert len(keeper.said) == 1


def test_one_named_checkpoint(keeper: Keeper) -> None:
    keeper.save(5)
    keeper.save(10)
    named = keeper.checkpoints.store.folder / "step_5"
    assert same(keeper.load(str(named))[1], state(5))
    assert keeper.load(str(named.parent))[0].name == "step_10"


def test_auto_without_a_checkpoint_starts_anew_and_a_path_does_not(keeper: Keeper, tmp_path: Path) -> None:
    assert keeper.checkpoints.find("auto") is None
    with pytest.raises(UserError, match="contains no usable checkpoint"):
        keeper.checkpoints.find(str(tmp_path / "nowhere"))


SHARD = "rank_0.safetensors"


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "cut manifest": lambda folder: (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-20]),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "other manifest": lambda folder: (folder / "manifest.json").write_text(
        '{"version": 1, "files": {}, "checksum": "0"}'
    ),
    "missing shard": lambda folder: (folder / SHARD).unlink(),
    "cut shard": lambda folder: os.truncate(folder / SHARD, 100),
    "longer shard": lambda folder: os.truncate(folder / SHARD, 100_000),
    "flipped bit": lambda folder: flip(folder / SHARD, -500),
    "marked as damaged": lambda folder: (folder / f"{SHARD}.damaged").touch(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_taken(keeper: Keeper, damage: str) -> None:
    keeper.save(5)
    keeper.save(10)
    newest = keeper.checkpoints.store.folder / "step_10"
    DAMAGE[damage](newest)
    folder, tensors = keeper.load()
    assert folder.name == "step_5"
    assert same(tensors, state(5))
    assert keeper.warned[0].startswith(f"cannot use {newest}: ")
    assert len(keeper.warned) == 1


def test_when_all_are_damaged_it_says_so(keeper: Keeper) -> None:
    keeper.save(5)
    DAMAGE["cut shard"](keeper.checkpoints.store.folder / "step_5")
    with pytest.raises(UserError, match="contains no usable checkpoint"):
        keeper.load()


def test_no_bit_flip_loads_silently(keeper: Keeper) -> None:
    """1,000 flips of one bit, each somewhere in any of the files: every one is noticed."""
    keeper.save(5)
    folder = keeper.checkpoints.store.folder / "step_5"
    files = [folder / SHARD, folder / "manifest.json"]
    assert {file.name for file in folder.iterdir()} == {SHARD, f"{SHARD}.verified", "manifest.json"}
    source = random.Random(0)
    for _ in range(1000):
        file = source.choice(files)
        good = file.read_bytes()
        flipped, place = bytearray(good), source.randrange(len(good))
        flipped[place] ^= 1 << source.randrange(8)
        file.write_bytes(flipped)
        assert damage_of(folder), f"byte {place} of {file.name}"
        file.write_bytes(good)
    assert not damage_of(folder)


def old_checkpoint(keeper: Keeper) -> Path:
    """A checkpoint that an earlier version of the trainer wrote."""
    folder = keeper.checkpoints.store.folder / "step_5"
    write_torch_checkpoint(folder, state(5), {"step": 5})
    return folder


def test_an_old_checkpoint_is_loaded(keeper: Keeper) -> None:
    """Version 1, written by torch. Damage in it is noticed, too."""
    folder = old_checkpoint(keeper)
    assert same(keeper.load()[1], state(5))
    flip(folder / "__0_0.distcp", 2000)
    with pytest.raises(UserError, match="contains no usable checkpoint"):
        keeper.load()
    assert "__0_0.distcp is damaged: wrong checksum" in keeper.warned[0]


class Malicious:
    def __init__(self, call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.system, ("touch executed",)),
        (eval, ("__import__('os').system('touch executed')",)),
        (subprocess.check_output, (["touch", "executed"],)),
        (__import__, ("antigravity",)),
    ],
)
def test_malicious_metadata_does_not_execute(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    """A crafted checkpoint whose checksums are all right: torch itself would run the command."""
    monkeypatch.chdir(tmp_path)
    folder = old_checkpoint(keeper)
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(call)))
    sign(folder, {"version": TORCH_FORMAT, "step": 5})
    assert not damage_of(folder)
    with pytest.raises(UserError, match=r"cannot load .*: its metadata uses"):
        keeper.load()
    assert not (tmp_path / "executed").exists()


def test_metadata_cannot_point_outside(keeper: Keeper) -> None:
    folder = old_checkpoint(keeper)
    files = read_manifest(folder)["files"]
    metadata = read_metadata(folder, files)
    place = next(iter(metadata.storage_data.values()))
    for change in (
        {"relative_path": "../../etc/passwd"},
        {"offset": 10**9},
        {"length": 10**12},
        {"offset": -1},
        {"transform_descriptors": ["zstd"]},
    ):
        before = {key: getattr(place, key) for key in change}
        for key, value in change.items():
            object.__setattr__(place, key, value)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(Untrusted, match="outside its own files"):
            read_metadata(folder, files)
        for key, value in before.items():
            object.__setattr__(place, key, value)


def test_metadata_without_its_chunks_is_refused(keeper: Keeper) -> None:
    """It would load nothing, and say that all went well."""
    folder = old_checkpoint(keeper)
    metadata = read_metadata(folder, read_manifest(folder)["files"])
    for facts in metadata.state_dict_metadata.values():
        facts.chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(folder, {"version": TORCH_FORMAT, "step": 5})
    with pytest.raises(UserError, match="is stored only in part"):
        keeper.load()


@pytest.mark.parametrize(
    "change", [{"storage_data": {1: "x"}}, {"storage_data": None}, {"state_dict_metadata": None}, {"storage_data": {}}]
)
def test_strange_metadata_is_one_clear_message(keeper: Keeper, change: dict[str, Any]) -> None:
    folder = old_checkpoint(keeper)
    metadata = read_metadata(folder, read_manifest(folder)["files"])
    for key, value in change.items():
        setattr(metadata, key, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(folder, {"version": TORCH_FORMAT, "step": 5})
    with pytest.raises(UserError, match=r"cannot load .*step_5: "):
        keeper.load()


def test_everything_is_on_the_disk_before_it_gets_its_name(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: every fsync with the size the file has then, and every rename, in their order."""
    events: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", file.name, file.stat().st_size))
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> Path:
        events.append(("rename", source.name, 0))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    keeper.save(5)
    folder = keeper.checkpoints.store.folder / "step_5"
    named = events.index(("rename", "step_5.tmp", 0))
    before, after = events[:named], events[named + 1 :]
    for file in (folder / SHARD, folder / "manifest.json"):
        # The manifest has a temporary name then, with a number.
        synced = [(kind, re.sub(r"\.part\d+$", "", name), size) for kind, name, size in before]
        assert ("sync", file.name, file.stat().st_size) in synced, file.name
    assert "step_5.tmp" in [name for _, name, _ in before]
    assert "output" in [name for _, name, _ in after]


def test_a_manifest_cannot_name_files_outside(keeper: Keeper) -> None:
    keeper.save(5)
    folder = keeper.checkpoints.store.folder / "step_5"
    write_manifest(folder, {"step": 5}, {"../secret": {"bytes": 0, "sha256": ""}})
    assert "outside the folder" in damage_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.0"), "it contains model.0, which this model does not have"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is missing in the checkpoint"),
        (lambda t: t.update({"model.1": torch.zeros(3)}), r"model.1 has shape \(8, 2\) there and \(3,\) here"),
    ],
)
def test_a_checkpoint_of_another_model(
    keeper: Keeper, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    keeper.save(5)
    tensors = state(5)
    change(tensors)
    folder = keeper.checkpoints.store.folder / "step_5"
    with pytest.raises(ValueError, match=message):
        load_pieces(folder, read_manifest(folder), whole(tensors), shapes(tensors))


GOOD_FACTS: dict[str, Any] = {
    "step": 1,
    "updates": 1,
    "samples": 8,
    "steps_per_epoch": 4,
    "position": [0, 1, 8],
    "scaler": {"scale": 1.0, "good_updates": 0},
    "config": {"Model": {}, "Engine": {}, "Global": {}},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", True),
        ("updates", 10**30),
        ("samples", 2**63),
        ("steps_per_epoch", "4"),
        ("position", [0, 1]),
        ("position", [0, 1, 2**63]),
        ("scaler", {"scale": "1", "good_updates": 0}),
        ("scaler", {"scale": float("nan"), "good_updates": 0}),
        ("scaler", {"scale": 1.0, "good_updates": -1}),
        ("config", {"Model": None, "Engine": {}, "Global": {}}),
        ("config", {"Model": {}, "Engine": "fast", "Global": {}}),
    ],
)
def test_facts_that_this_program_never_writes(monkeypatch: pytest.MonkeyPatch, key: str, value: object) -> None:
    """With a valid checksum. Each of them would be a traceback later, or an endless run."""
    monkeypatch.setattr("trainer.resume._facts_of", lambda t: GOOD_FACTS)
    training: Any = None
    assert _invalid_facts(training, GOOD_FACTS) == ""
    assert _invalid_facts(training, {**GOOD_FACTS, key: value}) == f"{key} is invalid in its manifest"


def test_old_ones_are_deleted_only_when_newer_ones_are_whole(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "output", keep_last=2)
    store = keeper.checkpoints.store
    for step in (1, 2, 3):
        keeper.save(step)
    assert [folder.name for folder in store.checkpoints()] == ["step_3", "step_2"]
    (store.folder / "step_3" / f"{SHARD}.verified").unlink()
    keeper.save(4)
    assert [folder.name for folder in store.checkpoints()] == ["step_4", "step_3", "step_2"]
    keeper.save(5)
    assert [folder.name for folder in store.checkpoints()] == ["step_5", "step_4"]


def test_a_step_that_exists_is_replaced(keeper: Keeper) -> None:
    """A run that fell back to an older checkpoint comes by the same step again."""
    keeper.save(5)
    keeper.checkpoints.saved_step = None
    keeper.save(5, state(77))
    assert same(keeper.load()[1], state(77))
    assert not list(keeper.checkpoints.store.folder.glob("*.old"))


def test_newer_ones_step_aside(keeper: Keeper) -> None:
    for step in (5, 10, 15):
        keeper.save(step)
    keeper.checkpoints.resumed_from(5)
    names = {folder.name for folder in keeper.checkpoints.store.folder.glob("step*")}
    assert names == {"step_5", "step_10.aside1", "step_15.aside1"}
    assert [folder.name for folder in keeper.checkpoints.store.checkpoints()] == ["step_5"]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "output")
    keeper.save(5)
    keeper.checkpoints.close()
    folder = tmp_path / "output"
    (folder / "step_9.tmp").mkdir()
    (folder / "step_9.tmp" / SHARD).write_text("half")
    (folder / "step_5").rename(folder / "step_5.old")  # killed between the two renames of a replacement
    keeper = Keeper(folder)
    assert same(keeper.load()[1], state(5))
    assert not list(folder.glob("*.tmp"))


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    """A file system of 1 MiB: the second save does not fit."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    keeper = Keeper(folder)
    try:
        keeper.checkpoints.store.require_space = lambda wanted: None  # type: ignore[method-assign]
        large = {"large": torch.randn(150_000)}
        assert keeper.save(5, large) == ""
        assert keeper.save(10, large) == "No space left on device"
        assert keeper.warned[0].startswith("cannot save checkpoint of step 10: ")
        assert [entry.name for entry in keeper.checkpoints.store.checkpoints()] == ["step_5"]
        assert not list(folder.glob("*.tmp"))
        tensors = {"large": torch.zeros(150_000)}
        found = keeper.checkpoints.find("auto")
        assert found
        keeper.checkpoints.load(found, whole(tensors), shapes(tensors), lambda facts, folder: None)
        assert same(tensors, large)
    finally:
        keeper.checkpoints.close()
        subprocess.run(["umount", str(folder)], check=True)


def test_space_is_looked_at_first(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a nearly full disk: what the system call reports."""
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert "MiB needed, 0.0 MiB free" in keeper.save(5)
    assert not list(keeper.checkpoints.store.folder.glob("step*"))


def test_an_error_while_committing_is_a_warning(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a file system that fails at the last moment."""

    def fail(part: Path) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(keeper.checkpoints.store, "commit", fail)
    assert keeper.save(5) == "Input/output error"
    assert not list(keeper.checkpoints.store.folder.glob("step*"))


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    with pytest.raises(UserError, match=f"another run is writing to {tmp_path} .process {os.getpid()} on "):
        Store(tmp_path).open_for_writing(print)
    keeper.checkpoints.close()
    Store(tmp_path).open_for_writing(print)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to "):
        Store(tmp_path / "file" / "output").open_for_writing(print)


SNAPSHOT = {
    f"{kind}.{n}": torch.randn(3, 2) for n in range(2) for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")
}


def test_a_snapshot_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "snapshot.pt"
    save_snapshot(file, whole(SNAPSHOT), {"step": 7}, 3)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in SNAPSHOT.items()}
    assert load_snapshot(file, whole(tensors), lambda facts: None) == ({"step": 7}, 3)
    assert same(tensors, SNAPSHOT)
    assert [entry.name for entry in file.parent.iterdir()] == ["snapshot.pt"]
    content = torch.load(file, weights_only=True)
    assert {"model_state", "optimizer_state", "finished_epoch"} <= set(content)


def test_bad_snapshots_are_one_clear_message(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pt"
    save_snapshot(file, whole(SNAPSHOT), {"step": 7}, 3)
    good = file.read_bytes()
    place = good.index(SNAPSHOT["model.0"].numpy().tobytes())
    flipped = bytearray(good)
    flipped[place] ^= 1
    torch.save({"model_state": {}}, tmp_path / "foreign.pt")
    with open(tmp_path / "malicious.pt", "wb") as stream:
        pickle.dump(Malicious((os.system, ("touch executed",))), stream)
    cases = {
        b"nonsense": "is not a snapshot of this program",
        good[: len(good) // 2]: "is not a snapshot of this program",
        bytes(flipped): "is damaged",
        (tmp_path / "foreign.pt").read_bytes(): "is not a snapshot of this program",
        (tmp_path / "malicious.pt").read_bytes(): "is not a snapshot of this program",
    }
    for content, message in cases.items():
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_snapshot(file, whole({name: t.clone() for name, t in SNAPSHOT.items()}), lambda facts: None)
    assert not (Path.cwd() / "executed").exists()
