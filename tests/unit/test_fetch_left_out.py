"""What one host keeps `fetch` from copying. Oracle: everything else is here, and the rest is named.

Below the connection nothing is real.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from gptctl.remote import link as remote_link
from gptctl.remote import sftp
from gptctl.remote.not_copied import MAX_NAMED, MAX_REASONS, NotCopied
from gptctl.reporting import Fetched, FetchOptions
from tests.property.pretend_hosts import PretendSftp, _status
from tests.property.test_host_answers import RUN
from tests.unit.test_host_files import Job, OfAnotherJob, SlowFiles

LOGS = f"{RUN}/logs"
LIMIT = 10**9


class PickySftp(PretendSftp):
    """Denies files, announces large ones, or hangs up, by their names."""

    def _named(self, kind: int, number: bytes, path: str) -> bytes:
        if kind == sftp.STAT:
            return super()._named(kind, number, path)
        if "denied" in path:
            return _status(number, sftp.NO_PERMISSION)
        if "broken" in path:
            return _status(number, 4)
        return b"" if "hangs-up" in path else super()._named(kind, number, path)

    def _attributes(self, path: str) -> bytes:
        found = super()._attributes(path)
        return found[:4] + (2**62).to_bytes(8, "big") + found[12:] if "huge" in path else found


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tests.property.pretend_hosts.PretendSftp", PickySftp)
    monkeypatch.setattr(remote_link, "RETRY_DELAYS", (0.0, 0.0))
    job = Job(tmp_path, SlowFiles, 0)
    for node, host in enumerate(job.hosts):
        host.tree[f"{LOGS}/notes-{node}.txt"] = b"x"
    return job


def fetch(job: Job, target: Path, max_files: int = 1000) -> tuple[Fetched, str]:
    said: list[str] = []
    job.backend._say = said.append
    options = FetchOptions(str(target), True, LIMIT, max_files)
    found = job.backend.fetch(job.record, options, lambda title, total: nullcontext(lambda size: None))
    return found, "\n".join(said)


DEEP = "/".join(["d" * 200] * 30)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("denied.txt", "no permission to read: "),
        ("denied/file", "no permission to list: "),
        ("broken", "its SFTP server failed: SFTP status 4: "),
        ("huge", "would be copied, and the limit is 1.0 GB: "),
        (f"{DEEP}/file", "its path would be too long here: "),
        ("/".join("d" * 60), "folders are nested more than 50 levels deep: "),
    ],
)
def test_one_file_does_not_keep_others_away(name: str, words: str, node: int, job: Job, tmp_path: Path) -> None:
    job.hosts[node].tree[f"{LOGS}/{name}"] = b"y"
    found, said = fetch(job, tmp_path / "target")
    assert found.not_copied == 1
    assert f"not copied: h{node}: " in said
    assert words in said
    assert "hint: " in said
    for other in range(3):
        assert (tmp_path / "target" / "logs" / f"notes-{other}.txt").read_text() == "x"
    assert not [file for file in (tmp_path / "target").rglob("*") if file.name in ("denied.txt", "huge", "file")]


def test_one_host_does_not_keep_others_away(job: Job, tmp_path: Path) -> None:
    """Too many files on one, and a connection that is lost again and again on another."""
    job.hosts[1].tree |= {f"{LOGS}/f{number}": b"" for number in range(60)}
    job.hosts[2].tree[f"{LOGS}/a-hangs-up"] = b"y"
    found, said = fetch(job, tmp_path / "target", max_files=50)
    assert found.not_copied == 2
    assert "not copied: h1: more than 50 files and folders; nothing was copied from there" in said
    assert "hint: try --max-files 500" in said
    assert "not copied: h2: lost the connection" in said
    assert (tmp_path / "target" / "logs" / "notes-0.txt").exists()
    assert not (tmp_path / "target" / "logs" / "notes-1.txt").exists()


def test_a_checkpoint_is_left_out_as_a_whole(job: Job, tmp_path: Path) -> None:
    """Without one of its files it could not be loaded."""
    step = f"{RUN}/output/step_7"
    job.hosts[0].tree |= {f"{step}/manifest.json": json.dumps({"files": {}}).encode(), f"{step}/huge": b"y"}
    found, said = fetch(job, tmp_path / "target")
    assert "step_7/huge" in said
    assert not (tmp_path / "target" / "output" / "step_7").exists()
    assert (tmp_path / "target" / "output" / "step_5" / "manifest.json").exists()
    assert found.not_copied == 2


def test_files_of_another_job_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    job = Job(tmp_path, OfAnotherJob, 1)
    _, said = fetch(job, tmp_path / "target")
    assert "h1: nothing of the job is there" in said
    copies = [file.read_bytes() for file in (tmp_path / "target").rglob("*") if file.is_file()]
    assert b"FORGED-0\n" in copies
    assert b"FORGED-1\n" not in copies


def test_a_host_cannot_flood_the_terminal() -> None:
    left_out = NotCopied()
    for number in range(1000):
        left_out.add("h1", f"/file{number}\nhint: forged", "no permission to read")
        left_out.add("h2", "/file", f"reason {number}")
    said: list[str] = []
    left_out.report(said.append)
    assert left_out.count == 2000
    assert len(said) <= MAX_REASONS + 2
    assert f"/file{MAX_NAMED - 1}" in said[0]
    assert f"/file{MAX_NAMED} " not in said[0]
    assert said[0].endswith(" and 990 others")
    assert not [line for words in said for line in words.splitlines() if line.startswith("hint: ")]
