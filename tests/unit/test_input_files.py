"""The trainer's reader. Oracles: what gptctl's reader makes of the same files, and an alarm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptctl.engine.file_reading import load_json, parse_json
from tests.damage import HARMLESS, JSON_CASES, NO_FILES, TEXTS
from trainer.durable import replacing
from trainer.input_files import open_own, parse_exactly, parse_object, read_bytes, read_object


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, 60)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("name", JSON_CASES)
def test_both_readers_refuse_the_same_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / "status.json"
    JSON_CASES[name](file)
    for read in (read_object, load_json):
        with pytest.raises((OSError, ValueError)) as error:
            read(file)
        assert not isinstance(error.value, RecursionError)


@pytest.mark.parametrize("text", HARMLESS, ids=range(len(HARMLESS)))
def test_both_readers_make_the_same_of_harmless_text(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "status.json"
    file.write_bytes(text)
    assert parse_object(text) == parse_object(text.decode(errors="replace")) == read_object(file) == parse_json(text)
    assert HARMLESS[text] in ({}, parse_object(text))


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_refused_with_words(name: str) -> None:
    """One line, which continues a sentence of a log."""
    with pytest.raises(ValueError, match=r"^[^\n]{3,200}$"):
        parse_exactly(TEXTS[name])


def test_a_text_is_parsed_as_it_was_written() -> None:
    """Its checksum is computed over that: a path in a config may have bytes that are not UTF-8."""
    text = rb'{"output_dir": "/data/caf\udce9"}'
    assert parse_exactly(text) == {"output_dir": "/data/caf\udce9"}
    assert parse_object(text) == {"output_dir": "/data/caf\ufffd"}


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 11)
    assert read_bytes(file, 11) == b"x" * 11
    with pytest.raises(OSError, match="has 11 bytes, at most 10 expected"):
        read_bytes(file, 10)


@pytest.mark.parametrize("name", [name for name in NO_FILES if name != "huge sparse file"])
def test_nothing_but_our_own_file_is_written(tmp_path: Path, name: str) -> None:
    """Oracle: an OSError at once, and a file that a link leads to keeps its content."""
    file = tmp_path / "metrics.jsonl"
    NO_FILES[name](file)
    with pytest.raises(OSError, match=r".") as error:
        os.close(open_own(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    assert error.value.strerror
    assert not (tmp_path / "nothing-is-here").exists()


def test_what_is_left_of_a_temporary_file_neither_blocks_nor_leads_elsewhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    part = tmp_path / f"status.json.part{os.getpid()}"
    for make in (os.mkfifo, lambda path: os.symlink(precious, path), lambda path: Path(path).touch()):
        make(part)
        with replacing(tmp_path / "status.json") as stream:
            stream.write(b"new")
        assert (tmp_path / "status.json").read_text() == "new"
        assert not part.exists()
    assert precious.read_text() == "keep me"
