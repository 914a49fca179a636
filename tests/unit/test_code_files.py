"""What `Launch.files` may list. Oracles: the findings, written by hand, and the folders that were not created."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gptctl.jobs.code_files import MAX_CODE, MOST_NAMED, CodeCopy, CodeFiles
from gptctl.jobs.freeze import _checked, _copy
from trainer.errors import UserError

CONFIG = "Launch: {entrypoint: train.py, files: [/dev/zero, endless, pipe, to_pipe, sock, code, big.bin, fine.py, missing]}\n"


def fill(folder: Path) -> None:
    """Everything that a user may list by mistake, or that a cloned repository may contain."""
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "fine.py").write_text("x = 1\n")
    (folder / "endless").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "to_pipe").symlink_to("pipe")
    code = folder / "code"
    (code / ".git").mkdir(parents=True)
    os.mkfifo(code / ".git" / "ignored")
    os.mkfifo(code / "inner")
    (code / "link").symlink_to("/dev/zero")  # is copied as a link
    (code / "module.py").write_text("y = 1\n")
    with open(folder / "big.bin", "wb") as stream:
        stream.truncate(MAX_CODE + 1)
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(folder, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)


def messages(path: Path) -> list[str]:
    return [problem.message for problem in CodeFiles().problems(str(path))]


def test_only_files_and_folders_of_files_are_copied(tmp_path: Path) -> None:
    fill(tmp_path)
    assert messages(tmp_path / "fine.py") == messages(tmp_path / "missing") == []
    assert messages(tmp_path / "endless") == [f"{tmp_path}/endless is a device, not a file"]
    assert messages(tmp_path / "to_pipe") == [f"{tmp_path}/to_pipe is a named pipe, not a file"]
    assert messages(tmp_path / "sock") == [f"{tmp_path}/sock is a socket, not a file"]
    assert messages(tmp_path / "code") == [f"{tmp_path}/code/inner is a named pipe, not a file"]
    assert messages(tmp_path / "big.bin") == [f"with {tmp_path}/big.bin, the code to copy has more than 200 MiB"]


def test_many_problems_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without an end is counted to the limit, and the first problems are named."""
    for number in range(MOST_NAMED + 5):
        os.mkfifo(tmp_path / f"pipe{number}")
    assert len(messages(tmp_path)) == MOST_NAMED
    monkeypatch.setattr("gptctl.jobs.code_files.MOST_FILES", 8)
    assert messages(tmp_path)[-1] == f"with {tmp_path}, the code to copy has more than 8 files"


@pytest.mark.parametrize("path", ["/proc/kmsg", "/proc/self", "/sys/kernel", "link"])
def test_files_of_the_system_are_refused_at_once(tmp_path: Path, path: str) -> None:
    """They have no size; /proc/kmsg blocks whoever reads it, and /proc/self/task contains itself."""
    (tmp_path / "link").symlink_to("/proc/self")
    file = str(tmp_path / path)
    assert messages(Path(file)) == [f"{file} is made up by the system, not a file"]


def test_a_copy_counts_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all files of a job: a file may grow after the check, or tell no size as in /proc."""
    monkeypatch.setattr("gptctl.jobs.code_files.MAX_CODE", 3 << 20)
    copier = CodeCopy()
    (tmp_path / "small.py").write_bytes(b"x" * (2 << 20))
    (tmp_path / "small.py").chmod(0o700)
    copier.copy(str(tmp_path / "small.py"), str(tmp_path / "copy.py"))
    assert (tmp_path / "copy.py").read_bytes() == (tmp_path / "small.py").read_bytes()
    assert (tmp_path / "copy.py").stat().st_mode & 0o777 == 0o700
    with pytest.raises(shutil.SpecialFileError, match=r"with .*small\.py, the code has more than 3 MiB"):
        copier.copy(str(tmp_path / "small.py"), str(tmp_path / "copy.py"))
    assert (tmp_path / "copy.py").stat().st_size <= 1 << 20


def test_a_copy_does_not_wait_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/kmsg: a regular file whose read would block. Here it is a pipe that nobody writes to."""
    reading, _ = ends = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr("gptctl.jobs.code_files.open_at_once", lambda path, flags: os.dup(reading))
    with pytest.raises(shutil.SpecialFileError, match="cannot be read"):
        CodeCopy().copy("kmsg", str(tmp_path / "copy"))
    for end in ends:
        os.close(end)


def test_a_file_that_changes_after_the_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rule that a person looks up."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("")
    list(_checked([tmp_path / "code"], tmp_path / "runs"))
    (tmp_path / "code/a.py").unlink()
    os.mkfifo(tmp_path / "code/a.py")
    with pytest.raises(UserError) as raised:
        _copy(tmp_path / "code", tmp_path / "runs/job/code", CodeCopy())
    assert [found.code for found in raised.value.findings] == ["S001"]
    assert "a.py is not a regular file" in raised.value.findings[0].message


def test_a_copy_refuses_what_became_a_device(tmp_path: Path) -> None:
    """The folder may change between the check and the copy."""
    copy_file = CodeCopy().copy
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        make(tmp_path / name)
        with pytest.raises(shutil.SpecialFileError, match="not a regular file"):
            copy_file(str(tmp_path / name), str(tmp_path / "copy"))
    with pytest.raises(shutil.SpecialFileError):
        copy_file("/dev/zero", str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_submit_and_validate_refuse_them_all_at_once(
    tmp_path: Path, gptctl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Place, value, rule and fix of each; nothing is copied or recorded."""
    fill(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    for verb, missing in (("submit", 1), ("validate", 0)):
        done = gptctl(verb, "run.yaml", "--json")
        found = json.loads(done.stdout)["findings"]
        named = [each for each in found if each["code"] == "S001"]
        assert done.returncode == 1
        assert len(named) == 7 + missing, done.stdout
        assert all(each["key"] == "Launch.files" and each["hint"] and each["value"] for each in named)
        assert not (tmp_path / "runs").exists()
        assert not list((tmp_path / "home").rglob("*.json"))
