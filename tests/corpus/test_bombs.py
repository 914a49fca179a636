"""Small files that contain gigabytes. Oracle: the memory of a process with a limit, as the kernel enforces it."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import ROOT
from tests.corpus.conftest import ENGLISH
from trainer.corpus import blocks
from trainer.corpus.inspection import open_data
from trainer.corpus.prepare import Request, prepare
from trainer.corpus.token_files import open_corpus
from trainer.errors import UserError

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from gptctl.__main__ import main
sys.argv = ["gptctl", *sys.argv[2:]]
sys.exit(main())
"""


def limited(memory: float, *words: str) -> subprocess.CompletedProcess[str]:
    """The real command, which cannot get more memory than this."""
    command = [sys.executable, "-c", LIMITED, str(int(memory)), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_rows_of_a_small_parquet_file_with_large_texts(tmp_path: Path) -> None:
    """60 rows of 1 MB, which the file has once: 60 MB of text, one row after the other."""
    texts = pyarrow.DictionaryArray.from_arrays([0] * 60, ["x " * 500_000])
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts.cast("string")}), tmp_path / "in.parquet", compression="zstd"
    )
    assert (tmp_path / "in.parquet").stat().st_size < 10_000
    sources = [blocks.Source(str(tmp_path / "in.parquet"), "parquet", 1, 0)]
    found = [*blocks.blocks_of(sources, blocks.Cutting(), blocks.Position())]
    assert [block.end.offset for block in found] == [*range(1, 61)]
    assert max(len(block.data) for block in found) < 1_100_000
    rest = [*blocks.blocks_of(sources, blocks.Cutting(), blocks.Position(0, 58))]
    assert [block.end.offset for block in rest] == [59, 60]


def test_a_row_that_is_too_long_is_refused_or_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONGEST_LINE", 1 << 10)
    rows = ["a", "b" * 1000, "c" * 1025, None, "d"]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "in.parquet")
    request = Request((str(tmp_path / "in.parquet"),), str(tmp_path / "x"))
    with pytest.raises(UserError, match=r"in\.parquet, row 3: the text is longer than 64 MiB"):
        prepare(request)
    done = prepare(request._replace(invalid_lines="skip", overwrite=True))
    assert (done.counts.documents, done.counts.skipped, done.counts.empty) == (3, 1, 1)


@pytest.mark.parametrize(
    "options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False, "compression": "zstd"}]
)
def test_the_size_of_a_page_is_known_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Oracle: of one page, the size of its texts; with a limit above it, the file is read."""
    monkeypatch.setattr(blocks, "LARGEST_PAGE", 3_000_000)
    for size, message in ((2_999_000, ""), (3_000_001, r"a page of column text has 3,000,0\d\d bytes")):
        file = tmp_path / f"{size}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": [1], "text": ["x" * size]}), file, **options)
        found = blocks.blocks_of([blocks.Source(str(file), "parquet", 1, 0)], blocks.Cutting(), blocks.Position())
        if message:
            with pytest.raises(UserError, match=message):
                list(found)
        else:
            assert [block.kind for block in found] == ["parquet"]


def test_damaged_pages_are_one_clear_message(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [ENGLISH] * 50}), tmp_path / "in.parquet")
    data = (tmp_path / "in.parquet").read_bytes()
    for value in (0, 0x1F, 0x55, 0x8C, 0xFF):
        (tmp_path / "in.parquet").write_bytes(data[:4] + bytes([value] * 20) + data[24:])
        with pytest.raises(UserError, match=r"cannot read|a page of column"):
            prepare(Request((str(tmp_path / "in.parquet"),), str(tmp_path / "x")))


def write_bomb(file: Path, name: str, count: int, dtype: str, **others: Any) -> None:
    """An npz with a compressed array of zeros, written in parts."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(stream, header)
            for _ in range(count * np.dtype(dtype).itemsize >> 24):
                stream.write(bytes(1 << 24))
        for other, value in others.items():
            data = io.BytesIO()
            np.save(data, value)
            archive.writestr(f"{other}.npy", data.getvalue())


@pytest.mark.parametrize(
    ("verb", "name", "others"), [("verify", "ids", {"lens": [1]}), ("inspect", "lens", {"ids": [1]})]
)
def test_a_compressed_array_has_a_limit(tmp_path: Path, verb: str, name: str, others: dict[str, Any]) -> None:
    """144 MiB in 700 KB; as 64-bit integers it would have 1.1 GiB. The process may have 1 GB."""
    write_bomb(tmp_path / "x_ids.npz", name, 9 << 24, "uint8", **others)
    done = limited(1e9, "data", verb, str(tmp_path / "x"))
    assert done.returncode == 1, done.stderr
    assert f"x_ids.npz: the compressed array {name} has 150,994,944 elements" in done.stderr


def test_a_header_does_not_decide_how_much_is_read(tmp_path: Path) -> None:
    """The header says more than there is, less, or that it is itself of gigabytes."""
    np.savez_compressed(tmp_path / "good_ids.npz", ids=np.arange(9), lens=np.array([9]))
    assert open_corpus(str(tmp_path / "good")).read(0, 0, 9).tolist() == list(range(9))
    with zipfile.ZipFile(tmp_path / "good_ids.npz") as archive:
        array = archive.read("ids.npy")
    large = array.replace(b"(9,), ", b"(9999999999999,), ").replace(b"            ", b"", 1)
    wide = array[:6] + b"\x02\x00\xff\xff\xff\xff" + array[10:]
    for number, data in enumerate((large, array.replace(b"(9,)", b"(8,)"), array.replace(b"(9,)", b"(-9,)"), wide)):
        with zipfile.ZipFile(tmp_path / f"{number}_ids.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ids.npy", data)
        with pytest.raises(UserError, match="cannot read token files"):
            open_data(str(tmp_path / str(number)))
