"""Damaged, swapped and forged checkpoints. Each case is repeated by its number: `judge(NUMBER, …)`.

Oracles: what is loaded is exactly what was saved at that step, or the run refuses in words; an alarm; no other exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.damage import NO_FILES
from tests.unit.test_checkpoint import MESH, same, state
from trainer import resume
from trainer.checkpoint import Checkpoints
from trainer.checkpoint.manifest import NAME, _checksum, read_manifest
from trainer.checkpoint.signing import VARIABLE
from trainer.config.sections import Model
from trainer.errors import UserError
from trainer.slices import shapes, whole

KEY = "0123456789abcdef" * 4
FACTS: dict[str, Any] = {
    "updates": 3,
    "samples": 12,
    "scaler": {"scale": 1.0, "good_updates": 0},
    "order": [1024, 32, True, 100, 7],
    "steps_per_epoch": 10,
    "position": [0, 3, 12],
    "layout": {"dp": 1},
    "vocabulary": None,
    "torch": "2",
    "config": {"Model": asdict(Model()), "Engine": {"run_mode": "step"}, "Global": {}},
}
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    (1 << 63) - 1,
    1 << 70,
    "",
    "x",
    "\ud800",
    "../../x",
    "\0",
    [],
    {},
    [[]],
]
STRANGE += [float("nan"), "y" * 5000, [0] * 1000, {"a": {"b": [None]}}, 10**15, "rank_0.safetensors", "step_10"]  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


STRANGE += [deep(90), deep(200), deep(500)]


class Checkpointed:
    """A run with checkpoints of steps 5 and 10, of which every case gets a copy."""

    def __init__(self, folder: Path, is_signed: bool) -> None:
        self.base, self.copy, self.is_signed = folder / "base", folder / "copy", is_signed
        checkpoints = Checkpoints(self.base, None, MESH, lambda text: None, pytest.fail)
        checkpoints.open()
        for step in (5, 10):
            checkpoints.save(step, whole(state(step)), FACTS)
            assert checkpoints.wait() == ""
        checkpoints.close()

    def fresh(self) -> Path:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.base, self.copy)
        return self.copy


def is_plain(file: Path) -> bool:
    """Whether it can be read and copied: an earlier change may have put something else in its place."""
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 20


def files_of(output: Path) -> list[Path]:
    return sorted(filter(is_plain, output.glob("step_*/*")))


def truncated(output: Path, r: random.Random) -> None:
    file = r.choice(files_of(output))
    os.truncate(file, r.randrange(max(1, file.stat().st_size)))


def flipped(output: Path, r: random.Random) -> None:
    file = r.choice([file for file in files_of(output) if file.stat().st_size])
    data = bytearray(file.read_bytes())
    for _ in range(r.randint(1, 8)):
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)
    file.write_bytes(data)


def lengthened(output: Path, r: random.Random) -> None:
    file = r.choice(files_of(output))
    data = file.read_bytes()
    place = r.choice([0, r.randrange(len(data) + 1), len(data)])
    file.write_bytes(data[:place] + r.randbytes(r.choice([1, 40, 5000])) + data[place:])


def zeroed(output: Path, r: random.Random) -> None:
    file = r.choice([file for file in files_of(output) if file.stat().st_size])
    data = bytearray(file.read_bytes())
    begin = r.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    file.write_bytes(data)


def removed(output: Path, r: random.Random) -> None:
    r.choice(files_of(output)).unlink()


def not_a_file(output: Path, r: random.Random) -> None:
    NO_FILES[r.choice(sorted(NO_FILES))](r.choice(files_of(output)))


def not_a_folder(output: Path, r: random.Random) -> None:
    name = r.choice(["step_10", "step_5", "step_12", "step_10.tmp", "step_10.old", "step_x", "latest", ".lock.old"])
    place = output / name
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    NO_FILES[r.choice(sorted(NO_FILES))](place)


def swapped(output: Path, r: random.Random) -> None:
    name = r.choice([NAME, "rank_0.safetensors"])
    one, other = output / "step_5" / name, output / "step_10" / name
    if is_plain(one) and is_plain(other):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second if r.random() < 0.7 else first)
        other.write_bytes(first)


def copied(output: Path, r: random.Random) -> None:
    target = output / r.choice(
        ["step_20", "step_7", "step_007", "step_99999999999999999999", "step_10.aside1", "step_٣"]
    )
    source = output / r.choice(["step_5", "step_10"])
    if source.is_dir() and not os.path.lexists(target):
        can_copy = all(map(is_plain, source.iterdir()))
        shutil.copytree(source, target) if can_copy and r.random() < 0.7 else source.rename(target)


def marked(output: Path, r: random.Random) -> None:
    suffix = r.choice(["verified", "damaged"])
    for folder in (output / "step_5", output / "step_10"):
        if folder.is_dir() and r.random() < 0.7:
            (folder / f"rank_0.safetensors.{suffix}").touch()


def place_in(value: Any, r: random.Random) -> tuple[Any, Any]:
    """A random list or object inside a value, and one of its keys."""
    while True:
        key = r.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], (dict, list)) or not value[key] or r.random() < 0.3:
            return value, key
        value = value[key]


def rewritten(output: Path, r: random.Random, is_forged: bool) -> None:
    """Something else in a manifest. A forged one has the right checksum, which needs no key."""
    file = output / r.choice(["step_5", "step_10"]) / NAME
    try:
        content = json.loads(file.read_bytes() if is_plain(file) else b"")
    except (ValueError, RecursionError):
        return
    if not isinstance(content, dict) or not content:
        return
    for _ in range(r.randint(1, 3)):
        where, key = place_in(content, r)
        if isinstance(where, dict) and r.random() < 0.3:
            where.pop(key)
            if not content:
                return
        else:
            where[key] = json.loads(json.dumps(r.choice(STRANGE)))  # a copy: it may be changed next
    content.pop("checksum", None)
    with contextlib.suppress(RecursionError):  # one deep value inside another
        text = json.dumps({**content, "checksum": _checksum(content) if is_forged else "0" * 64})
        file.write_text(text)


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    truncated,
    flipped,
    lengthened,
    zeroed,
    removed,
    not_a_file,
    not_a_folder,
    swapped,
    copied,
    marked,
    partial(rewritten, is_forged=False),
]


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Checkpointed:
    monkeypatch.delenv(VARIABLE, raising=False)
    if request.param:
        monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(resume, "_facts_of", lambda t: {"step": 0, **FACTS})
    return Checkpointed(tmp_path, request.param)


@pytest.fixture
def rung() -> Iterator[list[int]]:
    """Filled if a case takes too long: the exception of an alarm could be taken for damage."""
    found: list[int] = []

    def ring(*_: object) -> None:
        found.append(1)
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def check(facts: dict[str, Any], folder: Path) -> None:
    """The checks of a real run."""
    t: Any = SimpleNamespace(
        run=SimpleNamespace(Model=Model()), splits=SimpleNamespace(characters=None, tokenizer=None)
    )
    resume._check_same_model(t, facts, folder)


def loaded(output: Path, where: str) -> tuple[int, dict[str, torch.Tensor]] | None:
    """The step and the tensors that a run would continue with; None if it refuses, or finds nothing."""
    said: list[str] = []
    checkpoints = Checkpoints(output, None, MESH, said.append, said.append)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    try:
        checkpoints.open()
        found = checkpoints.find(where)
        if found is None:
            return None
        _, facts = checkpoints.load(found, whole(tensors), shapes(tensors), check)
        return facts["step"], tensors
    except UserError as error:
        assert error.message
        assert error.hint
        assert "\n" not in error.message
        return None
    finally:
        assert all(text and "Traceback" not in text for text in said)
        checkpoints.close()


def judge(number: int, run: Checkpointed, rung: list[int]) -> str:
    """Damage a copy and load it. Returns what happened."""
    r = random.Random(number)
    output = run.fresh()
    is_forged = number % 4 == 0
    for _ in range(r.choice([1, 1, 2, 3])):
        change = partial(rewritten, is_forged=True) if is_forged else r.choice(DAMAGE)
        if any(file.stat().st_size for file in files_of(output)):
            change(output, r)
    signal.setitimer(signal.ITIMER_REAL, 20)
    result = loaded(output, r.choice(["auto", "auto", str(output), str(output / "step_10")]))
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert not rung, "it blocks"
    if result is None:
        return "refused"
    step, tensors = result
    # Whoever can write the files can write another manifest: only a signature tells them apart.
    if not is_forged or run.is_signed:
        assert step in (5, 10)
        assert same(tensors, state(step))
    return f"step {step}"


def judge_all(run: Checkpointed, rung: list[int], count: int) -> None:
    results: dict[str, int] = {}
    began = time.monotonic()
    for number in range(count):
        try:
            result = judge(number, run, rung)
        except BaseException as error:
            pytest.fail(f"case {number}: {type(error).__name__}: {error}")
        results[result] = results.get(result, 0) + 1
    # All three happen often, or the cases test nothing.
    assert min(results.get(kind, 0) for kind in ("refused", "step 5", "step 10")) > count // 20, results
    print(f"{count} damaged checkpoints in {time.monotonic() - began:.0f} s: {results}")


def test_damaged_checkpoints(run: Checkpointed, rung: list[int]) -> None:
    judge_all(run, rung, 200)


@pytest.mark.long
def test_many_damaged_checkpoints(run: Checkpointed, rung: list[int]) -> None:
    judge_all(run, rung, 10_000)


def judge_manifests(run: Checkpointed, count: int) -> None:
    """The text alone, so that many are cheap: read as it was written, or a ValueError in one line."""
    folder = run.fresh() / "step_10"
    text, expected = (folder / NAME).read_bytes(), read_manifest(folder)
    for number in range(count):
        r = random.Random(number)
        data = bytearray(text)
        for _ in range(r.randint(1, 4)):
            begin = r.randrange(len(data) + 1)
            end = begin + r.choice([0, 1, 1, 5, 500])
            token = r.choice(
                [b"", b'"', b"{", b"[" * 300, b"9" * 30, b"NaN", b"\xff", b"\\ud800", b"\0", b"e999", b",", b"}"]
            )
            data[begin:end] = token if r.random() < 0.7 else r.randbytes(r.randint(1, 9))
        (folder / NAME).write_bytes(data)
        try:
            assert read_manifest(folder) == expected, f"case {number}"
        except ValueError as error:
            assert str(error), f"case {number}"
            assert "\n" not in str(error), f"case {number}"


def test_damaged_manifests(run: Checkpointed) -> None:
    judge_manifests(run, 1000)


@pytest.mark.long
def test_many_damaged_manifests(run: Checkpointed) -> None:
    judge_manifests(run, 20_000)
