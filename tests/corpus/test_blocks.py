"""How inputs are cut into blocks. Oracles: the definition of a document, over the whole text, and Python's decoder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.corpus.test_prepare import many, run, texts
from trainer.corpus import blocks
from trainer.corpus.encoding import Rules, texts_in
from trainer.corpus.sources import find_sources
from trainer.errors import UserError

BLANK = ("\n\n", "\n \n", "\n\t\n", "\r\n\r\n", "\r\n \t\r\n", "\n\n\n", "\n  \n\n \n")


def paragraphs(text: str) -> list[str]:
    """Text between lines of white space, as the documentation words it."""
    lines = re.split(r"(?<=\n)", text)
    blank = [not line.strip(" \t\r\n") and line.endswith("\n") for line in lines]
    found, current = [], ""
    for line, is_blank in zip(lines, blank):
        if is_blank:
            found.append(current)
            current = ""
        else:
            current += line
    return [each.rstrip("\r\n") for each in [*found, current] if each.rstrip("\r\n")]


@pytest.mark.parametrize("size", [10, 4000, 12000], ids=["small", "blocks", "pieces"])
@pytest.mark.parametrize("blank", BLANK, ids=repr)
def test_blank_lines_separate_paragraphs_in_files_of_any_size(
    tmp_path: Path, blank: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller than a block, some to a block, and each larger than the largest text that is not cut."""
    monkeypatch.setattr(blocks, "BLOCK", 5000)
    monkeypatch.setattr(blocks, "LONGEST_TEXT", 10000)
    source = [f"{number}: " + " ".join(many(size // 200 + 1, number)) for number in range(4)]
    (tmp_path / "in.txt").write_bytes(f"{blank}{blank.join(source)}{blank}".encode())
    done = run(tmp_path / "in.txt", tmp_path / "x", documents="paragraph")
    assert texts(tmp_path / "x") == source
    assert done.counts.empty == 0


def test_a_large_file_has_the_paragraphs_of_a_small_one(tmp_path: Path) -> None:
    """With the sizes of every day: 1.3 MB of which no two line breaks follow one another."""
    source = [" ".join(many(1000, number)) for number in range(6)]
    (tmp_path / "in.txt").write_text("\n \n".join(source))
    assert (tmp_path / "in.txt").stat().st_size > 2 * blocks.BLOCK
    run(tmp_path / "in.txt", tmp_path / "x", documents="paragraph")
    assert texts(tmp_path / "x") == source


def cut(file: Path) -> list[str]:
    """The paragraphs of a file, with those that were cut put together again."""
    (source,) = find_sources([str(file)])
    found: list[str] = []
    for block in blocks.blocks_of([source], blocks.Cutting("paragraph"), blocks.Position()):
        for text in texts_in(block, Rules(), source):
            found.append(text if block.starts else found.pop() + text)
    return found


def test_any_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"

    @settings(deadline=None, max_examples=200)
    @given(st.lists(st.sampled_from(["a", "bb c", "数", "d" * 70, " ", "\t", "\r", "\n", *BLANK]), max_size=40))
    def check(parts: list[str]) -> None:
        text = "x" + "".join(parts)
        file.write_bytes(text.encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "BLOCK", 64)
            patch.setattr(blocks, "LONGEST_TEXT", 64)
            assert cut(file) == paragraphs(text)

    check()


def test_the_line_of_a_mistake_after_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\n\n\ntwo\n\xff\n")
    with pytest.raises(UserError, match="line 5: invalid UTF-8"):
        run(tmp_path / "in.txt", tmp_path / "x", documents="paragraph", invalid_utf8="refuse")


def test_only_continuation_bytes(tmp_path: Path) -> None:
    """Oracle: Python's decoder. No character begins anywhere in 1.5 MB, so there is no good place to cut."""
    data = b"\x80" * 1_500_000
    (tmp_path / "in.txt").write_bytes(data)
    done = run(tmp_path / "in.txt", tmp_path / "x")
    assert texts(tmp_path / "x") == [data.decode(errors="replace")]
    assert done.counts.replaced == len(data)
    with pytest.raises(UserError, match=r"in\.txt, line 1: invalid UTF-8: byte 0x80"):
        run(tmp_path / "in.txt", tmp_path / "y", invalid_utf8="refuse")


@pytest.mark.parametrize("size", range(1, 5))
def test_a_character_is_never_cut(size: int) -> None:
    """By hand: characters of one to four bytes, at all places of the end."""
    character = "aé数😀"[size - 1].encode()
    for more in range(size + 4):
        data = b"x" * more + character * 8
        assert data[: blocks.safe_end(data)].decode()
        assert data[: blocks.safe_end(data[:-1])].decode()


READ_ALL = """
import sys
from pathlib import Path
from trainer.corpus.sources import OpenSource, find_sources
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
opened, size = OpenSource(find_sources([sys.argv[1]])[0]), 0
before = peak()
while data := opened.read(1 << 19):
    size += len(data)
print(size, peak() - before)
"""


def test_a_compressed_file_needs_little_memory(tmp_path: Path) -> None:
    """200 MB in 6 KB of compressed data, which the library would return at once."""
    compressor = zstandard.ZstdCompressor().compressobj()
    block = b"a" * 1_000_000
    compressed = b"".join(compressor.compress(block) for _ in range(200)) + compressor.flush()
    (tmp_path / "in.txt.zst").write_bytes(compressed)
    assert len(compressed) < 10_000
    command = [sys.executable, "-c", READ_ALL, str(tmp_path / "in.txt.zst")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    size, kilobytes = map(int, done.stdout.split())
    print(f"memory: {kilobytes / 1e3:.0f} MB for {size / 1e6:.0f} MB in {len(compressed)} bytes")
    assert size == 200_000_000
    assert kilobytes < 60_000
