"""Which host a file is copied from. Oracle: how ranks and nodes are numbered, and what was offered first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gptctl.engine.file_reading import append_line
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.remote import file_owners
from gptctl.remote.file_owners import JOURNAL, MAX_REFUSED, FileOwners, newly_refused, owner_by_name, parse_journal

FIELDS: dict[str, Any] = dict.fromkeys(LaunchPlan._fields)
STATIC = LaunchPlan(**{**FIELDS, "form": "static", "nodes": 3, "per_node": 2})
C10D = STATIC._replace(form="c10d")


@pytest.mark.parametrize(
    ("path", "static", "c10d"),
    [
        ("attempt-0/ranks.2.jsonl", 2, 2),
        ("attempt-0/node.1.exit", 1, 1),
        ("logs/attempt-0/node.1.log", 1, 1),
        ("logs/attempt-0/workerlog.0", 0, None),
        ("logs/attempt-0/workerlog.3", 1, None),
        ("logs/attempt-0/workerlog.77", 38, None),
        ("logs/attempt-0/stacks.5", 2, None),
        ("logs/attempt-0/nccl_trace_rank_5", 2, None),
        ("logs/attempt-0/notes.txt", None, None),
        ("logs/batch.log", 0, 0),
        ("attempt-0/endpoint.json", 0, 0),
        ("attempt-0/outcome.json", 0, 0),
        ("attempt-0/hosts", 0, 0),
        ("attempt-0/environment.json", 0, None),
        ("output/status.json", 0, None),
        ("work/workerlog.5", None, None),
    ],
)
def test_the_name_tells_the_owner(path: str, static: int | None, c10d: int | None) -> None:
    assert (owner_by_name(path, STATIC), owner_by_name(path, C10D)) == (static, c10d)


def test_the_first_that_offers_a_file_owns_it_for_ever(tmp_path: Path) -> None:
    """Also for the next process, whatever the name; and with an incomplete line in the journal."""
    odd = "work/a b\n\x1b" + os.fsdecode(b"\xff")
    owners = FileOwners(tmp_path, C10D)
    for path in ("output/status.json", odd):
        assert owners.may_take(2, "c", path, False)
        assert not owners.may_take(0, "a", path, False)
    with open(tmp_path / "file-owners", "a") as journal:
        journal.write("owned 1 0123abcd")
    later = FileOwners(tmp_path, C10D)
    assert later.may_take(0, "a", "work/new", False)
    for path, owner in (("output/status.json", 2), (odd, 2), ("work/new", 0)):
        for again in (later, FileOwners(tmp_path, C10D)):
            assert [again.may_take(node, "x", path, False) for node in range(3)] == [node == owner for node in range(3)]
    assert (tmp_path / "file-owners").stat().st_mode & 0o777 == 0o600


def test_with_c10d_a_host_gets_no_more_logs_than_it_has_ranks(tmp_path: Path) -> None:
    owners = FileOwners(tmp_path, C10D)
    taken = [owners.may_take(1, "b", f"logs/attempt-0/workerlog.{rank}", True) for rank in range(6)]
    assert taken == [True, True, False, False, False, False]
    assert all(owners.may_take(0, "a", f"logs/attempt-0/workerlog.{rank}", True) for rank in (2, 5))
    assert owners.may_take(1, "b", "logs/attempt-1/workerlog.4", True)


def test_forged_files_are_told_once(tmp_path: Path) -> None:
    owners = FileOwners(tmp_path, STATIC)
    for number in range(2 * MAX_REFUSED):
        assert not owners.may_take(1, "b\x1b[2J", f"attempt-{number}/ranks.0.jsonl", True)
    assert not owners.may_take(2, "c", "attempt-0/ranks.0.jsonl", False)
    (words,) = newly_refused(tmp_path)
    assert words.startswith("warning: b has files that belong to other hosts: attempt-0/ranks.0.jsonl, ")
    assert f"and {MAX_REFUSED - 5} others; they are not copied" in words
    assert newly_refused(tmp_path) == []
    assert not FileOwners(tmp_path, STATIC).may_take(1, "b\x1b[2J", "attempt-0/ranks.0.jsonl", True)
    assert newly_refused(tmp_path) == []


def test_a_host_cannot_make_the_journal_grow_without_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long names cost no more than short ones; beyond the limit a host owns nothing new, and takes nothing from others."""
    monkeypatch.setattr(file_owners, "MAX_OWNED", 1000)
    owners = FileOwners(tmp_path, STATIC)
    assert owners.may_take(2, "c", "work/model.bin", False)
    long = "work/" + "\xff" * 3000
    taken = [owners.may_take(1, "b", f"{long}{number}", False) for number in range(1200)]
    assert taken == [True] * 1000 + [False] * 200
    for number in range(2 * MAX_REFUSED):
        owners.may_take(1, "b", f"attempt-{number}/{'x' * 3000}/ranks.0.jsonl", True)
    assert (tmp_path / JOURNAL).stat().st_size < 1000 * 60 + MAX_REFUSED * 700
    later = FileOwners(tmp_path, STATIC)
    assert not later.may_take(1, "b", "work/model.bin", False)
    assert later.may_take(1, "b", f"{long}7", False)
    assert not later.may_take(0, "a", f"{long}7", False)
    # A file of nobody belongs to no other host: there is nothing to warn of.
    newly_refused(tmp_path)
    assert not later.may_take(1, "b", "logs/attempt-0/notes.txt", True)
    assert newly_refused(tmp_path) == []
    assert later.may_take(0, "a", "logs/attempt-0/notes.txt", True)


def test_many_hosts_share_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_owners, "MAX_LINES", 30)
    owners = FileOwners(tmp_path, STATIC)
    for node in range(3):
        assert sum(owners.may_take(node, "x", f"work/{node}-{number}", False) for number in range(20)) == 10


def test_a_damaged_journal_is_read_as_far_as_possible() -> None:
    text = (
        "owned x y -\nowned 99999999999999999999 a -\nowned 1\n\0\nrefused\nowned 1 good -\nowned 2 good -\ntold now\n"
    )
    assert parse_journal(text).owners == {"good": 1}


def test_a_journal_that_is_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    """Nor is a link followed: what it leads to stays as it is."""
    os.mkfifo(tmp_path / JOURNAL)
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        append_line(tmp_path / JOURNAL, "x")
    assert newly_refused(tmp_path) == []
    (tmp_path / JOURNAL).unlink()
    (tmp_path / "other").write_text("other")
    (tmp_path / JOURNAL).symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        append_line(tmp_path / JOURNAL, "x")
    assert (tmp_path / "other").read_text() == "other"
