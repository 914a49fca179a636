"""Finding lines. Oracles: Python's `re` applied line by line, and lists of lines that do or do not look like errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.logs import match
from gptctl.logs.files import FileFilter
from gptctl.logs.lines import parse_since
from gptctl.logs.local_files import LocalFile
from gptctl.logs.match import Errors, Grep
from gptctl.logs.needles import Needles
from gptctl.logs.stream import LineFilter, LogReader, merged
from tests.unit.test_logline import PUBLISHED
from tests.unit.test_logs import BYTES
from trainer.errors import WRONG_USAGE, UserError

PATTERNS = [
    *(
        "a",
        "xyz",
        "",
        "^",
        "$",
        "^$",
        "^a",
        "a$",
        "a.*x",
        r"\s",
        r"a\s*",
        "[^a]",
        "[^a]x",
        "(?s)a.x",
        r"a\n",
        r"\na",
        "(?i)XY",
    ),
    *(
        r"a(?!\s)",
        r"(?<!\n)a",
        r"\Aa",
        r"a\Z",
        r"\ba",
        r"x\B",
        "a|z",
        "(a|x)yz",
        "(?:xyz)+",
        "(?:a)?x",
        "x{2,}",
        "ä",
        "€",
    ),
    *("a(?=x)", r"(?<=a)x", "(?m:^a)", r"z\b|^\r", "(x)(?(1)y|z)", ".", "..", r"[\s\S]x", "(?x) a # b"),
]


def found_in(grep: Grep, block: bytes) -> list[bytes]:
    return [block[start:end] for start, end in grep(block)]


def oracle(pattern: str, block: bytes) -> list[bytes]:
    regex = re.compile(pattern.encode(), re.MULTILINE)
    return [line for line in block.removesuffix(b"\n").split(b"\n") if regex.search(line)]


@pytest.mark.parametrize("sparse", [0, match.SPARSE, 1 << 40])
@settings(max_examples=200, deadline=None)
@given(pattern=st.sampled_from(PATTERNS), parts=BYTES, has_newline=st.booleans())
def test_grep_is_grep_line_by_line(sparse: int, pattern: str, parts: list[bytes], has_newline: bool) -> None:
    """On every way through the search: by needles, over the whole block, and line by line."""
    block = b"".join(parts)
    if has_newline or not block or block.endswith(b"\n"):
        block = block.removesuffix(b"\n") + b"\n"
    before, match.SPARSE = match.SPARSE, sparse
    try:
        assert found_in(Grep(pattern), block) == oracle(pattern, block)
    finally:
        match.SPARSE = before


LETTERS = st.text("ab.*+?|()[]^$\\sZ{}1,!=<:", max_size=10)


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@settings(max_examples=500, deadline=None)
@given(pattern=LETTERS, lines=st.lists(st.text("ab \t1.", max_size=6), min_size=1, max_size=8))
def test_any_expression_finds_what_it_finds_in_each_line(pattern: str, lines: list[str]) -> None:
    """The needles that are taken from an expression may never hide a line; a bad expression is a mistake of the user's."""
    block = "".join(f"{line}\n" for line in lines).encode() * 3
    try:
        grep = Grep(pattern)
    except UserError as error:
        assert error.exit_code == WRONG_USAGE
        with pytest.raises((re.error, OverflowError)):
            re.compile(pattern.encode())
        return
    assert found_in(grep, block) == oracle(pattern, block)


@pytest.mark.parametrize(
    ("pattern", "needles"),
    [
        ("loss: nan", (b"loss: nan",)),
        (r"step \d+.*loss: (nan|inf)", (b"loss: ",)),
        ("needle|Killed", (b"needle", b"Killed")),
        ("(?i)needle", ()),
        ("(?i:needle) x", (b" x",)),
        ("a*", ()),
        ("(abc)+d", (b"abc",)),
        (r"\d+", ()),
    ],
)
def test_the_bytes_that_a_match_must_hold(pattern: str, needles: tuple[bytes, ...]) -> None:
    """Oracle: by eye. Without needles a search is right but slow."""
    assert Grep(pattern)._needles == needles


@pytest.mark.parametrize("has_memmem", [True, False])
@given(
    words=st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=4),
    blocks=st.lists(st.lists(st.sampled_from([b"a", b"b", b"\0", b"\n", b"\xff"])).map(b"".join), max_size=4),
)
def test_needles_in_block_after_block(has_memmem: bool, words: list[bytes], blocks: list[bytes]) -> None:
    """Oracle: `in`. What earlier blocks taught about rare bytes must not hide a needle, with or without the C library."""
    searched = Needles([*words, b"ab", b"\n\xff"])
    with pytest.MonkeyPatch.context() as patch:
        if not has_memmem:
            patch.setattr("gptctl.logs.needles._memmem", lambda: None)
        for block in blocks:
            assert sorted(searched.present(block)) == sorted(n for n in [*words, b"ab", b"\n\xff"] if n in block)


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{99999999999}", "(?P<x", "\\"])
def test_a_bad_expression_is_told_with_its_place(pattern: str) -> None:
    """Oracle: the exit code for wrong usage, and a message that repeats the expression."""
    with pytest.raises(UserError) as raised:
        Grep(pattern)
    assert raised.value.exit_code == WRONG_USAGE
    assert repr(pattern) in raised.value.message


def test_lines_across_chunks_are_found_once(tmp_path: Path) -> None:
    """Oracle: the numbers of the matching lines, in a file of several chunks, in 7-byte chunks and in whole."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d %s\n" % (number, b"x" * (number % 60)) for number in range(5000)))
    files = LocalFile(path)
    for chunk in (7, 1000, 1 << 20):
        source = LogReader(files, files.scan()[0], LineFilter(grep=Grep(r"line \d*77 ")))
        numbers = [int(line.text.split()[1]) for line in source.read(chunk=chunk)]
        assert numbers == [number for number in range(5000) if number % 100 == 77]


ERRORS = [
    "[2026-11-16 04:25:43,446] [   ERROR] - cannot read x",
    "FATAL: too bad",
    "[    CRITICAL] - x",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "node7:123:456 [0] NCCL WARN Call to connect returned Connection refused",
    "E1116 06:54:39.123000 1234 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1)",
    "[rank3]:[E1116 06:54:39.123 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout",
    "[E1116 06:54:39.123 socket.cpp:957] no socket",
    "F1116 06:54:39.123000 1 check failed",
    "bash: line 1: 123 Killed                  python train.py",
    "Segmentation fault (core dumped)",
    "Fatal Python error: Aborted",
    "slurmstepd: error: Detected 1 oom-kill event(s)",
    "Signal 9 (SIGKILL) received by PID 123",
    "Received 15 death signal, shutting down workers",
    "global step 5, epoch: 0, batch: 4, loss: nan, avg_reader_cost: 0.1 sec",
    "error: L002 Distributed.mp_degree (run.yaml:31): 12 attention heads",
    "Exception in thread Thread-1",
    "Out of memory: Killed process 123 (python)",
]
ORDINARY = [
    *PUBLISHED,
    "[2026-11-16 04:25:43,446] [    INFO] - global step 560, epoch: 0, batch: 559, loss: 1.82, ips: 12 tokens/s",
    "I1116 06:54:39.123000 1234 torch/distributed/run.py:1] starting",
    "W1116 06:54:39.123000 1234 torch/distributed/run.py:1] Setting OMP_NUM_THREADS",
    "Epoch 3 | Iter 100 | Train Loss 2.1",
    "Finished loading, information follows",
    "node7:123:456 [0] NCCL INFO Bootstrap : Using eth0",
    "error_if_nonfinite: False, signal_handlers: default, finance: 3",
    "memory: 12 GB of memory in use",
    "inference of the nanoGPT model",
]


@pytest.mark.parametrize("line", ERRORS)
@pytest.mark.parametrize("first", [True, False])
def test_lines_that_look_like_errors(line: str, first: bool) -> None:
    """Oracle: the list above; at the start of a block and within it."""
    block = (("" if first else "ordinary\n") + f"{line}\nordinary\n").encode()
    assert [block[start:end] for start, end in Errors()(block)] == [line.encode()]


def test_ordinary_lines_are_no_errors() -> None:
    """Oracle: the list above."""
    block = "".join(f"{line}\n" for line in ORDINARY).encode()
    assert [block[start:end].decode() for start, end in Errors()(block)] == []


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: three

During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 5
[rank0]:     raise
[rank0]: custom.Trouble
"""


@pytest.mark.parametrize("chunk", [9, 50, 1 << 20])
def test_tracebacks_come_as_a_whole(tmp_path: Path, chunk: int) -> None:
    """Oracle: the text of the tracebacks, whatever the chunks; `custom.Trouble` looks like no error by itself."""
    path = tmp_path / "log"
    path.write_text(f"fine\n{TRACEBACK}fine\n  indented, fine\n")
    files = LocalFile(path)
    source = LogReader(files, files.scan()[0], LineFilter(errors=True))
    text = [line.text.decode() for line in source.read(chunk=chunk)]
    assert text == [line for line in TRACEBACK.splitlines() if line and not line.startswith("During")]


def test_matches_are_merged_by_the_time_of_the_lines_before_them(tmp_path: Path) -> None:
    """Oracle: the order by hand; the lines that carry the times do not match themselves."""
    sources = []
    for name, first, second in (("a", 1, 4), ("b", 2, 3)):
        stamped = "".join(f"[2026-11-16 04:00:0{each},000] x\n" for each in (first, second))
        (tmp_path / name).write_text(f"{stamped}middle\nneedle {name}\n")
        files = LocalFile(tmp_path / name)
        [file] = FileFilter().now(files)
        sources.append(LogReader(files, file, LineFilter(grep=Grep("needle"))))
    assert [line.text for line in merged(sources, close=True)] == [b"needle b", b"needle a"]


def test_a_line_has_the_time_of_a_line_before_it_that_did_not_match(tmp_path: Path) -> None:
    """Oracle: the time by hand. The two lines are read one after the other, as of a file that grows."""
    (tmp_path / "log").write_text(first := "[2026-11-16 04:00:01,000] x\n")
    files = LocalFile(tmp_path / "log")
    [file] = FileFilter().now(files)
    reader = LogReader(files, file, LineFilter(grep=Grep("needle")))
    lines = [*reader.wanted(first.encode()), *reader.wanted(b"needle\n")]
    assert [line.key for line in lines] == [parse_since("2026-11-16T04:00:01")]
