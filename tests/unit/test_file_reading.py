"""The one reader. Oracles: what each damaged file may give at most (nothing), and an alarm."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from gptctl.engine import file_reading
from gptctl.engine.atomic_files import replacing
from gptctl.engine.file_reading import (
    DamagedFile,
    json_lines,
    load_json,
    load_value,
    parse_json,
    read_bytes,
    read_json,
    read_tail,
    read_text,
    records_of,
)
from gptctl.engine.typed_fields import typed
from gptctl.logs.metric_rows import rows_in
from gptctl.spec.check import check_config
from gptctl.spec.cluster import load_profile
from tests.damage import HARMLESS, JSON_CASES, NO_FILES, TEXTS
from trainer.durable import replacing as trainer_replacing
from trainer.errors import UserError, errors_in


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Nothing blocks: an alarm would end the test run. Work is measured in processor time, since machines are busy."""
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture(autouse=True)
def nothing_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reading, "noticed", {})


@pytest.mark.parametrize("name", JSON_CASES)
def test_damaged_files_give_nothing(tmp_path: Path, name: str) -> None:
    """Oracle: None and no exception but the declared two; what exists is named once, in words."""
    file = tmp_path / "result.json"
    JSON_CASES[name](file)
    assert read_json(file) is None
    assert read_json(file) is None
    with pytest.raises((DamagedFile, OSError)):
        load_json(file)
    if name == "dangling link":
        assert not file_reading.noticed
    else:
        assert list(file_reading.noticed) == [str(file)]
        assert all(reason and "\n" not in reason for reason in file_reading.noticed.values())


@pytest.mark.parametrize("name", NO_FILES)
def test_text_of_no_file_is_empty(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hosts"
    NO_FILES[name](file)
    assert not read_text(file, 1000).strip("\0")
    assert len(read_bytes(file, 1000)) <= 1000
    assert len(read_tail(file, 1000)) <= 1000
    before = len(os.listdir("/proc/self/fd"))
    read_text(file, 10)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("text", HARMLESS)
def test_what_can_be_used_is_used(text: bytes) -> None:
    """Lone surrogates become U+FFFD, so that every value can be printed."""
    value = parse_json(text)
    assert value is not None
    assert not HARMLESS[text] or value == HARMLESS[text]
    str(value).encode()


def test_a_missing_file_is_not_damaged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read_json(tmp_path / "missing") is None
    assert read_text(tmp_path / "file" / "inside") == ""
    assert not file_reading.noticed


def test_parts_of_files(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"0123456789")
    assert read_bytes(file, 4) == b"0123"
    assert read_tail(file, 4) == b"6789"
    assert read_tail(file, 8, start=5) == b"56789"
    assert read_tail(file, 4, start=99) == read_tail(file, 4, start=-1) == b"6789"


def test_json_lines_skip_what_is_torn_and_give_up_on_garbage() -> None:
    """Oracle: the valid lines, without what is not finite; 16 MB of garbage take less than 2 s."""
    text = b'{"a": 1}\n{"a"\n[1]\n17\n\n{"a": NaN, "b": [-Infinity,3], "c": "NaN"}\r\n{"b": 2}\r\n{"c"'
    assert list(json_lines(text)) == [{"a": 1}, {"a": None, "b": [None, 3], "c": "NaN"}, {"b": 2}]
    for garbage in (b"\n", b"x\n", b"{\n", b"[[\n", b'{"\n'):
        begun = time.process_time()
        assert list(json_lines(garbage * ((16 << 20) // len(garbage)))) == []
        assert time.process_time() - begun < 2, garbage


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":1}', b"1"])
def test_a_text_with_too_many_values_is_not_parsed(item: bytes) -> None:
    """A small text could need gigabytes as values; one below the limit is read."""
    assert len(load_value(b"[" + b",".join([item] * 300_000) + b"]")) == 300_000
    with (
        mock.patch.object(json, "loads", side_effect=AssertionError("it was parsed")),
        pytest.raises(DamagedFile, match="more than 1,000,000 values"),
    ):
        load_value(b"[" + b",".join([item] * 1_000_001) + b"]")


def test_the_largest_file_is_parsed_within_the_limit() -> None:
    """Whatever it contains: many numbers, lists, brackets in texts, surrogates."""
    for part in (b"0,", b"[],", b'"[",', rb'"\ud800",', b"1e100,", b"1234567890123456789,"):
        text = b'{"a": [' + part * min((4 << 20) // len(part), 450_000) + b"0]}"
        begun = time.process_time()
        assert parse_json(text) is not None
        assert time.process_time() - begun < 2, part


class Example(NamedTuple):
    name: str
    count: int
    share: float
    words: tuple[str, ...]
    table: Mapping[str, Mapping[str, str]]
    port: int | None
    extra: Mapping[str, Any] = {}
    is_on: bool = False


VALID = {"name": "a", "count": 1, "share": 2, "words": ["x"], "table": {"a": {"b": "c"}}, "port": None}


def test_fields_have_the_types_of_their_annotations() -> None:
    assert typed(Example, {**VALID, "unknown": 1}) == Example("a", 1, 2, ("x",), {"a": {"b": "c"}}, None)
    wrong = {
        "name": [1, None, ["a"]],
        "count": [True, 1.5, "1", None],
        "share": [True, "1"],
        "words": ["x", [1], {"x": 1}],
        "table": [[], {"a": 1}, {"a": {"b": 1}}],
        "port": ["1", False],
        "extra": [[], 1],
        "is_on": [1, "true"],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(DamagedFile, match=f"{name} is invalid"):
                typed(Example, {**VALID, name: value})
    with pytest.raises(DamagedFile, match="words is missing"):
        typed(Example, {name: value for name, value in VALID.items() if name != "words"})


def test_every_text_case_is_refused_as_text_too() -> None:
    assert [name for name, text in TEXTS.items() if parse_json(text) is not None] == []


def yaml_bomb() -> str:
    names = "abcdefghijkl"
    lines = [f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]" for before, name in pairwise(names)]
    return "\n".join(["a: &a [x, x, x]", *lines])


@pytest.mark.parametrize("name", [*NO_FILES, "deep", "aliases"])
def test_a_config_or_profile_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    """Oracle: UserError or an error among the findings, for both; and the alarm."""
    file = tmp_path / "run.yaml"
    texts = {"deep": "a: " + "[" * 5000, "aliases": yaml_bomb()}
    if name in texts:
        file.write_text(texts[name])
    else:
        NO_FILES[name](file)
    is_empty = name == "link to /dev/null"  # an empty config is a valid one
    for load in (lambda: check_config(file, []).findings, lambda: load_profile(str(file)).findings):
        begun = time.process_time()
        try:
            findings = load()
        except UserError as error:
            assert error.message
        else:
            assert is_empty or errors_in(findings)
        assert time.process_time() - begun < 2


@pytest.mark.parametrize("replace", [replacing, trainer_replacing], ids=["gptctl", "trainer"])
def test_threads_replace_the_same_file(tmp_path: Path, replace: Any) -> None:
    """Each with its own temporary file, so that none takes away that of another, and nothing waits for a pipe."""
    file, problems = tmp_path / "file", []

    def write(number: int) -> None:
        try:
            for _ in range(50):
                with replace(file) as stream:
                    stream.write(str(number).encode() * 1000)
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(file.read_bytes()) == 1000
    os.mkfifo(tmp_path / f"file.part{threading.get_native_id()}")
    with replace(file) as stream:
        stream.write(b"new")
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"new"]


@pytest.mark.parametrize("garbage", [b"\n", b"{}\n", b"{\n", b"x\n", b'{"a":1}\n'])
def test_garbage_in_a_large_file_costs_little(tmp_path: Path, garbage: bytes) -> None:
    """8 MB take less than 3 CPU seconds; with all lines parsed as records, 10 and more."""
    (tmp_path / "file").write_bytes(garbage * ((8 << 20) // len(garbage)) + b'{"step": 1, "loss": 2.0}\n')
    begun = time.process_time()
    rows = list(rows_in(records_of(tmp_path / "file", 1 << 30)))
    assert time.process_time() - begun < 3
    assert len(rows) == (garbage in (b"\n", b"x\n"))


def test_lines_of_other_jobs_are_not_parsed(tmp_path: Path) -> None:
    """Oracle: all lines, filtered by their job."""
    lines = [{"step": n, "job": f"gpt-{n % 30}"} for n in range(3000)] + [{"step": 1}, {"step": 2, "job": None}]
    (tmp_path / "file").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(records_of(tmp_path / "file", 1 << 30, job="gpt-7"))
    assert [each for each in found if each.get("job") == "gpt-7"] == [
        each for each in lines if each.get("job") == "gpt-7"
    ]
    assert {"step": 1} in found
    assert len(found) < 110
