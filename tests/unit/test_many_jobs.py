"""`gptctl list` and `tag` on many jobs. Oracles: what was written for each job, and damage that nobody may notice."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gptctl import cli
from gptctl.cli import listing
from gptctl.jobs.labels import Labels, LabelStore, parse_tags
from gptctl.moments import moment_of
from gptctl.text import size_text
from tests.job_records import DAY, add_job
from tests.unit.conftest import Answer

JOBS: dict[str, dict[str, Any]] = {
    "a-000001": {"state": "COMPLETED", "days": 40, "loss": 3.0, "tags": ["exp=lr", "lr=1"]},
    "a-000002": {"state": "FAILED", "days": 35, "tags": ["exp=lr", "lr=3"]},
    "b-000003": {"state": "FAILED", "days": 20, "loss": 1.0, "cluster": "a800"},
    "a-000004": {"state": "TIMEOUT", "days": 10, "loss": 2.0, "tags": ["exp=wd", "best"]},
    "c-000005": {"state": "COMPLETED", "days": 2, "loss": 5.0, "cluster": "a800", "tags": ["best"]},
    "a-000006": {"state": "RUNNING", "days": 0.1, "loss": 4.0, "tags": ["exp=lr"]},
}


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    for name, facts in JOBS.items():
        facts = dict(facts)
        tags = facts.pop("tags", [])
        record = add_job(tmp_path, name, **facts)
        LabelStore(tmp_path / "home").keep(record, Labels({tag.key: tag.value for tag in parse_tags(tags)}))
    return tmp_path


def hashes(answer: Answer) -> str:
    """The last digit of each job: short enough for a table."""
    return "".join(job[-1] for job in answer.ids)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "123456"),
        ("--state failed", "23"),
        ("--state Failed,timeout --state COMPLETED", "12345"),
        ("--state running", "6"),
        ("--tag exp=lr", "126"),
        ("--tag exp", "1246"),
        ("--tag exp=lr --tag lr", "12"),
        ("--tag best --tag exp=wd", "4"),
        ("--cluster a800", "35"),
        ("--cluster a800 --cluster local", "123456"),
        ("--since 30d", "3456"),
        ("--since 12h --tag exp", "6"),
        ("--state FAILED --cluster a800 --since 4w", "3"),
        ("--limit 2", "56"),
        ("--tag exp --limit 1", "6"),
        ("--sort created --limit 2", "12"),
        ("--sort -created --limit 2", "65"),
    ],
)
def test_filters_and_limits(verb, jobs: Path, words: str, expected: str) -> None:
    """Written by hand, from the table of jobs above."""
    answer = verb(f"list --json {words}")
    assert (answer.code, hashes(answer)) == (0, expected)


@pytest.mark.parametrize(
    ("key", "ascending", "descending"),
    [
        ("loss", "341652", "561432"),
        ("name", "124635", "536421"),
        ("state", "615234", "423156"),
        ("tokens/s", "123456", "123456"),
    ],
)
def test_unknown_values_come_last(verb, jobs: Path, key: str, ascending: str, descending: str) -> None:
    """Job 2 has no loss, and no job has logged its speed; equal ones stay in the order of their submission."""
    assert hashes(verb(f"list --json --sort {key}")) == ascending
    assert hashes(verb(f"list --json --sort -{key}")) == descending
    assert hashes(verb(f"list --json --sort {key} --limit 2")) == ascending[:2]


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("--tag epx=lr", "no job matches --tag epx=lr: the nearest of their tags is exp=lr (3 jobs)"),
        ("--tag zzz", "their tags are exp=lr, best"),
        ("--cluster a80", "the nearest of their clusters is a800 (2 jobs)"),
        ("--cluster a800 --state timeout", "their states are 1 FAILED, 1 COMPLETED"),
        ("--tag exp=wd --cluster a800", "no job matches --tag exp=wd --cluster a800: their clusters are local"),
        ("--since 1m", "the newest is a-000006, submitted "),
    ],
)
def test_filters_that_hide_everything_name_the_nearest(verb, jobs: Path, words: str, nearest: str) -> None:
    answer = verb(f"list --json {words}")
    assert (answer.code, json.loads(answer.out)) == (0, [])
    assert nearest in answer.said


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--state", "faild"], "unknown state: faild", "did you mean FAILED?"),
        (["--state", ""], "unknown state: (empty)", "use RUNNING, PENDING"),
        (["--sort", "los"], "cannot sort by los", "did you mean loss?"),
        (["--tag", "a b"], "invalid tag 'a b'", ""),
        (["--since", "30"], "'30' is not a time; use an age such as 30d", ""),
        (["--since", "2999-01-01"], "'2999-01-01' is in the future", ""),
        (["--since", "2026-02-30"], "is not a time", ""),
        (["--limit", "0"], "0 is not in the range", ""),
    ],
)
def test_wrong_options_are_refused(verb, jobs: Path, words: list[str], message: str, hint: str) -> None:
    answer = verb("list", *words)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.said
    assert hint in answer.said


def test_what_a_filter_excludes_is_not_read(verb, jobs: Path) -> None:
    """The record of an excluded job is garbage: whoever reads one would move it away, and say so."""
    home = jobs / "home" / "jobs"
    (home / "b-000003.json").write_text("garbage")
    old = time.time() - 20 * DAY
    for name in ("a-000001", "a-000002", "b-000003"):
        os.utime(home / f"{name}.json", (old, old))
    for words, expected in (("--tag exp=lr --tag lr", "12"), ("--since 10d --tag exp=lr", "6"), ("--limit 2", "56")):
        answer = verb(f"list --json {words}")
        assert (hashes(answer), answer.said) == (expected, ""), words
    assert "b-000003.json is damaged" in verb("list --json --state FAILED").said


def test_schedulers_are_asked_only_about_what_is_left(verb, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Slurm's commands notes each call: whether they are called at all is what is tested."""
    tools = jobs / "tools"
    tools.mkdir()
    for name in ("squeue", "scontrol", "sacct"):
        (tools / name).write_text(f"#!/bin/sh\necho {name} >> {jobs}/calls\nexit 1\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    add_job(jobs, "s-000007", "UNKNOWN", kind="slurm", cluster="farm", handle={"scheduler_id": "17"})
    for words in ("--cluster local", "--tag exp", "--since 1d --cluster a800", "--sort name --limit 2"):
        verb(f"list --json {words}")
        assert not (jobs / "calls").exists(), words
    (row,) = json.loads(verb("list --json --cluster farm").out)
    assert (row["state"], (jobs / "calls").exists()) == ("UNKNOWN", True)


def test_the_table_shows_labels_and_their_text_cannot_control_it(verb, jobs: Path) -> None:
    """Columns that nobody uses are left out; a note of two lines is one cell."""
    assert "note" not in verb("list").out.splitlines()[1]
    verb("tag a-000004", "--note", "first line\nb-666666  COMPLETED")
    lines = verb("list").out.splitlines()
    assert "note" in lines[1]
    (row,) = [line for line in lines if line.startswith("a-000004")]
    assert "best exp=wd" in row
    assert "first line b-666666  COMPLETED".replace("  ", " ") in row
    assert len(lines) == 2 + len(JOBS)
    status = verb("status a-000004").out
    assert "best exp=wd" in status
    assert json.loads(verb("status a-000004 --json").out)["note"].startswith("first line\n")


def test_tag_changes_all_named_jobs_or_none(verb, jobs: Path) -> None:
    answer = verb("tag a-000001 000002 lr=7 --add draft --remove exp --json")
    rows = [{"job": job, "tags": {"lr": "7", "draft": ""}, "note": None} for job in ("a-000001", "a-000002")]
    assert json.loads(answer.out) == rows
    refused = verb("tag a-000001 unknown lr=8")
    assert refused.code == 2
    assert "--add unknown" in refused.said
    assert json.loads(verb("tag a-000001 --json").out) == rows[:1]
    for words in ("tag lr=1", "tag a-000001 lr=1 --remove lr", "tag a-000001 lr=", "tag"):
        assert verb(words).code == 2, words
    verb("tag a-000001", "--note", "hello")
    assert json.loads(verb("tag a-000001", "--note", "", "--json").out)[0]["note"] is None
    # A removed job keeps its tags, and is found by them.
    assert verb("rm a-000001 --yes").code == 0
    assert hashes(verb("list --tag draft --json")) == "2"
    assert hashes(verb("list --tag draft --json --all")) == "12"
    verb("tag 000001 exp=again")
    assert json.loads(verb("status a-000001 --json").out)["tags"] == {"lr": "7", "draft": "", "exp": "again"}


def test_sizes_are_those_of_find(verb, jobs: Path) -> None:
    """Links count as links, wherever they lead; a removed folder has no size."""
    run = jobs / "runs" / "a-000004"
    (run / "big").write_bytes(b"x" * 123_456)
    (run / "to-root").symlink_to("/")
    rows = {row["job"]: row for row in json.loads(verb("list --json --size").out)}
    for job in JOBS:
        found = subprocess.run(
            ["find", str(jobs / "runs" / job), "-not", "-type", "d", "-printf", "%s\n"], capture_output=True, check=True
        )
        assert (rows[job]["size"], rows[job]["size_is_complete"]) == (sum(map(int, found.stdout.split())), True)
    assert hashes(verb("list --json --sort -size --limit 1")) == "4"
    table = verb("list --size --tag best").out
    assert table.startswith(f"2 jobs, {size_text(sum(rows[job]['size'] for job in ('a-000004', 'c-000005')))}")
    assert size_text(rows["a-000004"]["size"]) in table
    verb("rm a-000004 --yes")
    assert [row["size"] for row in json.loads(verb("list --json --size --all --tag exp=wd").out)] == [None]


def test_sizes_that_take_too_long_say_so(verb, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of 2,000 files and no time: what was counted is less than what is there."""
    run = jobs / "runs" / "a-000004"
    for number in range(2000):
        (run / f"file{number}").write_text("x" * 10)
    monkeypatch.setattr(listing, "SIZE_TIMEOUT", 0.0)
    answer = verb("list --json --size --tag exp=wd")
    (row,) = json.loads(answer.out)
    assert (row["size_is_complete"], row["size"] < 20_000) == (False, True)
    assert "sizes that begin with > are incomplete" in answer.said
    assert verb("list --size --tag exp=wd").out.startswith("1 job, > ")


def test_ages_and_dates() -> None:
    """The oracle is `date` of the system, in the time zone of this machine."""
    now = 1_790_000_000.0
    for text, seconds in {"90s": 90, "90m": 5400, "5min": 300, "12h": 43_200, "30d": 30 * DAY, "2w": 14 * DAY}.items():
        assert moment_of(text, now) == now - seconds
    for text in ("2026-11-01", "2026-07-01 12:30", "2026-03-29T01:30:15"):
        expected = subprocess.run(["date", "-d", text, "+%s"], capture_output=True, text=True, check=True)
        assert moment_of(text, now) == float(expected.stdout)
    for text in ("", "30", "d", "-1d", "1.5d", "1M", "2026-13-01", "0000-01-01", "2026-11", "9999999d", "٣d"):
        assert moment_of(text, now) is None, text


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        (["list", "--state"], "f", ["FAILED"]),
        (["list", "--tag"], "e", ["exp="]),
        (["rm", "--tag"], "exp=", ["exp=lr", "exp=wd"]),
        (["submit", "--tag"], "b", ["best"]),
        (["tag", "a-000001"], "lr=", ["lr=1", "lr=3"]),
        (["tag"], "c-", ["c-000005"]),
    ],
)
def test_the_shell_completes(verb, jobs: Path, words: list[str], incomplete: str, expected: list[str]) -> None:
    from click.shell_completion import ShellComplete

    found = ShellComplete(cli.cli, {}, "gptctl", "_GPTCTL_COMPLETE").get_completions(words, incomplete)
    assert [item.value for item in found] == expected
