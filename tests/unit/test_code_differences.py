"""How the frozen code of two jobs differs. Oracle: the files that the test wrote; whatever they are, the answer comes."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from gptctl.jobs.code_differences import MOST_LINES, MOST_SHOWN, code_diff, code_digests


@pytest.fixture
def code(tmp_path: Path) -> tuple[Path, Path]:
    for name in "ab":
        (tmp_path / name / "pkg").mkdir(parents=True)
    return tmp_path / "a", tmp_path / "b"


def test_files_are_known_by_their_content(code: tuple[Path, Path]) -> None:
    folder, _ = code
    (folder / "x.py").write_text("x = 1\n")
    (folder / "pkg" / "__pycache__").mkdir()
    (folder / "pkg" / "__pycache__" / "x.pyc").write_text("made by Python")
    os.mkfifo(folder / "pipe")
    (folder / "pkg" / "link").symlink_to("/etc")
    digest = hashlib.sha256(b"x = 1\n").hexdigest()[:12]
    assert code_digests(folder) == {
        "x.py": f"6 bytes, sha256 {digest}",
        "pipe": "cannot be read: not a regular file",
        "pkg/link": "link to /etc",
    }
    assert code_digests(folder / "missing") is None


def test_the_diff_is_that_of_the_program(code: tuple[Path, Path]) -> None:
    """Oracle: `diff -u`, but for the times in its titles."""
    a, b = code
    lines = [f"line {number}" for number in range(60)]
    (a / "x.py").write_text("\n".join(lines) + "\n")
    (b / "x.py").write_text("\n".join([*lines[:20], "new", *lines[22:50], *lines[51:]]) + "\n")
    said = subprocess.run(["diff", "-u", "a/x.py", "b/x.py"], cwd=a.parent, capture_output=True, text=True)
    expected = said.stdout.splitlines()
    found = code_diff(a, b, ["x.py"], ("a", "b"))
    assert found[2:] == expected[2:]
    assert found[:2] == ["--- a/x.py", "+++ b/x.py"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\0\1", "is not a text"),
        (b"x" * (2 << 20), "cannot be shown: larger than 1,048,576 bytes"),
        (b"\n" * (MOST_LINES + 1), f"has more than {MOST_LINES:,} lines"),
        (b"one\ntwo", "the lines are the same"),
    ],
)
def test_what_cannot_be_shown_is_named(code: tuple[Path, Path], content: bytes, said: str) -> None:
    (code[0] / "x.py").write_bytes(b"one\ntwo\n")
    (code[1] / "x.py").write_bytes(content)
    *titles, reason = code_diff(*code, ["x.py"], ("a", "b"))
    assert titles == ["--- a/x.py", "+++ b/x.py"]
    assert said in reason


def test_the_answer_is_bounded(code: tuple[Path, Path]) -> None:
    for number in range(3):
        (code[0] / f"{number}.py").write_text("".join(f"{line}\n" for line in range(MOST_LINES)))
    (code[0] / "wide.py").write_text("x" * 100_000 + "\n")
    lines = code_diff(*code, ["wide.py", "0.py", "1.py", "2.py"], ("a", "b"))
    assert len(lines) == MOST_SHOWN + 1
    assert max(map(len, lines)) < 1000
