"""Whether layers are compiled. The oracle is a table: what was asked for, the device, and the tools of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.compiling import is_on, missing_tools
from trainer.errors import UserError


@pytest.fixture(params=["with a compiler", "without"])
def has_compiler(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    for name in ("g++", "gcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755 if request.param == "with a compiler" else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("trainer.compiling.find_spec", lambda name: object())
    monkeypatch.setattr("trainer.compiling.sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").write_text("")
    return bool(request.param == "with a compiler")


def test_auto_compiles_on_gpus_if_it_can(has_compiler: bool) -> None:
    assert is_on("auto", "cuda") == has_compiler
    assert not is_on("auto", "cpu")
    assert not is_on("false", "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_true_compiles_or_says_what_is_missing(has_compiler: bool, device: str) -> None:
    if has_compiler:
        assert is_on("true", device)
        return
    with pytest.raises(
        UserError, match=r"Engine.compile is true, but this machine has no C(\+\+)? compiler \(g"
    ) as error:
        is_on("true", device)
    assert "Engine.compile: auto" in error.value.hint


def test_everything_that_is_missing_is_named(
    has_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr("trainer.compiling.find_spec", lambda name: None)
    monkeypatch.setenv("CC", "icx")
    assert missing_tools("cuda") == [
        "C compiler (icx)",
        f"Python headers ({tmp_path / 'Python.h'})",
        "triton package",
    ]
