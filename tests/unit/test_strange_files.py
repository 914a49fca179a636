"""FIFOs, devices, links and sockets where the trainer expects files. Oracles: an alarm, and clear messages."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.damage import NO_FILES
from tests.unit.test_checkpoint import Keeper, same, state
from trainer.checkpoint.snapshot import load_snapshot
from trainer.config.sections import Dataset
from trainer.corpus.token_files import open_corpus
from trainer.data.chars import Characters
from trainer.data.index import Cache, IndexMaps
from trainer.errors import UserError
from trainer.metrics import Log, Metrics
from trainer.rank_log import append, redirect
from trainer.records import Records
from trainer.slices import whole
from trainer.status import report_failure
from trainer.watchdog import Watchdog
from trainer.watchdog.channel import Channel

SPECIAL = [name for name in NO_FILES if name not in ("huge sparse file", "dangling link", "link loop")]


class Blocked(BaseException):
    """The code under test waits for something that never comes."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Blocked

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def write_corpus(folder: Path) -> None:
    np.save(folder / "c_ids.npy", np.arange(20, dtype=np.uint16))
    np.savez(folder / "c_idx.npz", lens=np.array([20]), docs=np.array([0, 1]))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["c_ids.npy", "c_idx.npz", "d_ids.npz"])
def test_data_must_be_regular_files(tmp_path: Path, name: str, kind: str) -> None:
    write_corpus(tmp_path)
    NO_FILES[kind](tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is not a regular file|{name}.*No such device"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize("name", ["c_ids.npy", "c_idx.npz", "d_ids.npz"])
def test_pickled_objects_in_data_are_refused(tmp_path: Path, name: str) -> None:
    """numpy would unpickle them, which can run any command."""
    write_corpus(tmp_path)
    objects = np.array([os.getpid, {}], dtype=object)
    with open(tmp_path / name, "wb") as stream:
        if name.endswith("npy"):
            np.save(stream, objects, allow_pickle=True)
        else:
            np.savez(stream, ids=objects, lens=objects, docs=objects)
    with pytest.raises(UserError, match="Python objects"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize("kind", [*SPECIAL, "dangling link", "link loop"])
def test_a_text_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / "text")
    with pytest.raises(UserError, match=r"text is not a regular file|cannot read .*text: "):
        Characters(Dataset(path=str(tmp_path / "text")))


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("part", ["key.json", "doc_idx.npy", "shuffle_idx.npy"])
def test_index_maps_that_are_no_files_are_built_again(tmp_path: Path, kind: str, part: str) -> None:
    facts = {"num_samples": 1, "seq_len": 1, "split": "train"}
    cache, ones = Cache(tmp_path / "c", facts), np.ones(3, np.int32)
    cache.store(IndexMaps(ones, ones, ones))
    assert cache.load(check=True) is not None
    NO_FILES[kind](next(tmp_path.glob(f"*{part}")))
    assert cache.load(check=True) is None
    if kind != "huge sparse file":  # numpy maps it, and reads its header
        assert cache.load(check=False) is None


@pytest.mark.parametrize("data", [b"PK\x03\x04 and more", b"PK\x05\x06" + bytes(18), b"", None])
def test_damaged_index_maps_are_built_again(tmp_path: Path, data: bytes | None) -> None:
    """The start of an archive, an empty one, nothing, and an array with more rows than any number can count."""
    cache, ones = Cache(tmp_path / "c", {"num_samples": 1, "seq_len": 1, "split": "train"}), np.ones(3, np.int32)
    cache.store(IndexMaps(ones, ones, ones))
    file = next(tmp_path.glob("*doc_idx.npy"))
    file.write_bytes(
        file.read_bytes().replace(b"(3,), }" + b" " * 31, b"(3" + b"0" * 31 + b",), }") if data is None else data
    )
    assert cache.load(check=True) is None
    assert cache.load(check=False) is None


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_snapshot_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / "snapshot.pt")
    with pytest.raises(UserError, match=r"snapshot.pt is not a regular file|cannot (read|use) .*snapshot.pt: "):
        load_snapshot(tmp_path / "snapshot.pt", whole(state(1)), lambda facts: None)


def test_a_snapshot_with_tensors_larger_than_its_file(tmp_path: Path) -> None:
    """A few bytes describe 4 TB: all rows are the same one. Oracle: the memory of this process."""
    large = torch.zeros(1).expand(1 << 40)
    content = {"model_state": {"w": large}, "optimizer_state": {"exp_avg": {}, "exp_avg_sq": {}}}
    torch.save({**content, "finished_epoch": 1, "facts": "{}", "checksum": ""}, tmp_path / "snapshot.pt")
    with pytest.raises(UserError, match="is not a snapshot of this program"):
        load_snapshot(tmp_path / "snapshot.pt", whole(state(1)), lambda facts: None)


@pytest.fixture
def metrics(tmp_path: Path) -> Callable[[], tuple[Metrics, io.StringIO]]:
    def opened() -> tuple[Metrics, io.StringIO]:
        stream, metrics = io.StringIO(), object.__new__(Metrics)
        metrics.log, metrics.job = Log("fleetx", 0, stream), None
        metrics.records = Records(tmp_path / "metrics.jsonl", "metrics are", metrics.log.warn)
        return metrics, stream

    return opened


@pytest.mark.parametrize("kind", [kind for kind in NO_FILES if kind != "huge sparse file"])
def test_metrics_go_to_a_regular_file_or_nowhere(tmp_path: Path, kind: str, metrics: Any) -> None:
    """Oracle: one warning per problem, and training continues; a link leads to nothing new."""
    NO_FILES[kind](tmp_path / "metrics.jsonl")
    opened, log = metrics()
    opened.resume(1)
    opened.record({"step": 1})
    opened.record({"step": 2})
    assert log.getvalue().count("metrics are no longer recorded") == 1
    assert not (tmp_path / "nothing-is-here").exists()


def test_metrics_do_not_follow_a_link(tmp_path: Path, metrics: Any) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me\n")
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    opened, log = metrics()
    opened.record({"step": 1})
    assert "metrics.jsonl (is a symbolic link): metrics are no longer recorded" in log.getvalue()
    assert precious.read_text() == "keep me\n"


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_status_that_is_no_file_is_not_changed(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / "status.json")
    report_failure(tmp_path, "reason", 0.0)


@pytest.mark.parametrize("kind", [kind for kind in NO_FILES if kind != "huge sparse file"])
def test_the_log_of_a_rank_must_be_a_regular_file(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the words on stderr, which goes to the log of the node."""
    monkeypatch.setenv("GPTCTL_ATTEMPT_DIR", str(tmp_path))
    for name in ("workerlog.0", "ranks.0.jsonl"):
        NO_FILES[kind](tmp_path / name)
    redirect(str(tmp_path))
    append("ranks.0.jsonl", "{}\n")
    told = capfd.readouterr().err
    assert "cannot open log file" in told
    assert "cannot write" in told
    assert not (tmp_path / "nothing-is-here").exists()


@pytest.mark.parametrize("kind", [*NO_FILES, "a file"])
@pytest.mark.parametrize("name", ["step_10.tmp", "step_10", "step_10.old"])
def test_a_foreign_thing_in_the_place_of_a_checkpoint_does_not_stop_saving(
    tmp_path: Path, name: str, kind: str
) -> None:
    """Oracle: the checkpoint loads, and what was there still exists under another name."""
    output = tmp_path / "output"
    output.mkdir()
    if kind == "a file":
        (output / name).write_text("mine")
    else:
        NO_FILES[kind](output / name)
    keeper = Keeper(output)
    if kind != "folder":  # of a run that was killed
        assert any(f"{name} is not a folder of a checkpoint: renamed to " in text for text in keeper.warned)
        assert os.path.lexists(next(output.glob("step_10*.foreign1")))
    assert keeper.save(10) == ""
    assert same(keeper.load()[1], state(10))


@pytest.mark.parametrize("name", ["step_10.tmp", "step_10", "step_10.old"])
def test_a_foreign_thing_that_appears_while_a_run_saves(tmp_path: Path, name: str) -> None:
    keeper = Keeper(tmp_path / "output")
    (tmp_path / "output" / name).symlink_to("nothing-is-here")
    assert keeper.save(10) == ""
    assert same(keeper.load()[1], state(10))


def test_only_our_own_temporary_folders_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "step_notes.tmp").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "step_3.tmp").symlink_to(elsewhere)
    Keeper(tmp_path).checkpoints.close()
    assert (tmp_path / "step_notes.tmp").exists()
    assert (elsewhere / "file").exists()


@pytest.mark.parametrize("kind", ["socket", "folder", "link to /dev/zero", "dangling link", "link loop"])
def test_a_lock_that_cannot_be_one_is_named(tmp_path: Path, kind: str) -> None:
    NO_FILES[kind](tmp_path / ".lock")
    with pytest.raises(UserError, match=r"cannot write to .*/\.lock: ") as error:
        Keeper(tmp_path)
    assert "delete or rename it" in error.value.hint


STRANGE = [
    b"",
    b"\xff\xff",
    b"[]",
    b"[" * 100_000,
    b'{"question": "1"}',
    b'{"question": NaN}',
    b'{"reason": 1}',
    b'{"reason": "r", "hint": "h", "culprits": [99], "is_silent": true, "code": 75}',
    b'{"reason": "r", "hint": "h", "culprits": [0], "is_silent": 1, "code": 75}',
    b'{"reason": "r", "hint": "h", "culprits": [0], "is_silent": true, "code": 1000}',
    b'{"reason": "r", "hint": "h", "culprits": {}, "is_silent": true, "code": 75, "more": 1}',
]


def test_strange_messages_are_ignored() -> None:
    """Oracle: the thread that receives continues, and answers the question that comes last."""
    pending, answered = [*STRANGE, b'{"question": 4, "is_late": false}'], []

    def pop(_: str) -> bytes:
        if pending:
            return pending.pop(0)
        raise RuntimeError("the store has exited")

    channel, watchdog = object.__new__(Channel), object.__new__(Watchdog)
    channel.name, channel.rank, channel._receiver = "n", 0, SimpleNamespace(queue_pop=pop)
    channel.answer = lambda number, answer: answered.append((number, answer["rank"]))  # type: ignore[method-assign]
    watchdog.channel, watchdog.must_stop, watchdog.trace = channel, False, ""
    watchdog.mesh = SimpleNamespace(world=2, rank=0, heartbeat=SimpleNamespace(since=0.0, ticks=3, where=""))  # type: ignore[assignment]
    watchdog.is_over = SimpleNamespace(is_set=lambda: False)  # type: ignore[assignment]
    watchdog._dump_stacks = lambda: None  # type: ignore[method-assign]
    watchdog._receive()
    assert answered == [(4, 0)]
