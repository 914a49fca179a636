"""Tags and notes beside the records of jobs. Oracles: the file, other processes, a full and a read-only file system."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gptctl.engine import file_reading
from gptctl.jobs.labels import (
    LONGEST_NOTE,
    MOST_TAGS,
    NO_LABELS,
    Labels,
    LabelStore,
    Tag,
    parse_note,
    parse_tag,
    parse_tags,
    tags_text,
)
from gptctl.jobs.store import JobRecord, Store
from tests.conftest import ROOT
from tests.damage import JSON_CASES
from tests.job_records import add_job
from trainer.errors import UserError


@pytest.fixture
def job(tmp_path: Path) -> JobRecord:
    return add_job(tmp_path, "gpt-00000a")


@pytest.fixture
def labels(tmp_path: Path) -> LabelStore:
    return LabelStore(tmp_path / "home")


def test_tags_are_key_value_or_words() -> None:
    for text in ("exp=lr", "lr=3e-4", "best", "a.b_c-d=x/y:z@1+2", "实验=学习率", "ｅ=1", "7b"):
        assert str(parse_tag(text)) == text
    # The same letter, composed and decomposed, is one key.
    assert parse_tag("e\u0301=1") == parse_tag("\u00e9=1")
    for text in (
        "",
        "=",
        "a=",
        "=b",
        "-a",
        ".a",
        "a b",
        "a=b c",
        "a=b=c",
        "a\n",
        "a=\x1b[2J",
        "a=\u202e",
        "*",
        "a" * 65,
    ):
        with pytest.raises(UserError) as raised:
            parse_tag(text)
        assert raised.value.exit_code == 2
        assert raised.value.message.isprintable(), text
    with pytest.raises(UserError, match="two values for the tag a: a=1 and a=2"):
        parse_tags(["a=1", "b", "a=2"])
    assert parse_tags(["a=1", "a=1"]) == [Tag("a", "1")]


def test_notes_are_plain_text() -> None:
    assert parse_note("  two lines\nof text: 学习率 ×2\t! ") == "two lines\nof text: 学习率 ×2\t!"
    for text in ("\x1b[2J", "\x1b]0;title\x07", "a\rb", "\x00", "\u202eevil", "\udcff", "x" * (LONGEST_NOTE + 1)):
        with pytest.raises(UserError):
            parse_note(text)


def test_a_tag_is_set_replaced_and_removed(labels: LabelStore, job: JobRecord) -> None:
    """The oracle is the file, which nobody else may read."""
    file = labels.folder / f"{job.id}.labels"
    assert labels.of(job) == NO_LABELS
    labels.change(job, parse_tags(["exp=lr", "best"]), note="first try")
    labels.change(job, parse_tags(["exp=wd", "lr=1"]), ["best", "unknown"])
    assert json.loads(file.read_text()) == {
        "token": job.token,
        "tags": {"exp": "wd", "lr": "1"},
        "note": "first try",
    }
    assert file.stat().st_mode & 0o777 == 0o600
    labels.change(job, note="")
    assert labels.of(job) == Labels({"exp": "wd", "lr": "1"})
    assert tags_text(labels.of(job).tags) == "exp=wd lr=1"
    with pytest.raises(UserError, match=f"more than {MOST_TAGS} tags"):
        labels.change(job, [Tag(f"t{number}") for number in range(MOST_TAGS)])
    assert labels.of(job).tags == {"exp": "wd", "lr": "1"}


def test_labels_belong_to_one_job(labels: LabelStore, job: JobRecord, tmp_path: Path) -> None:
    """An id whose job was never started is given again: the new job has no labels of the old one."""
    labels.change(job, [Tag("exp")])
    other = job._replace(token="another")
    assert labels.of(other) == NO_LABELS
    labels.change(other, [Tag("new")])
    assert (labels.of(other).tags, labels.of(job)) == ({"new": ""}, NO_LABELS)
    labels.keep(job, Labels({"exp": ""}))
    Store(tmp_path / "home").remove(job)
    assert not (labels.folder / f"{job.id}.labels").exists()


WRITER = """
import sys
from contextlib import suppress
from pathlib import Path
from gptctl.jobs.labels import LabelStore, Tag
from gptctl.jobs.store import Store
home = Path(sys.argv[1])
record = Store(home).find("gpt-00000a")
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    LabelStore(home).change(record, [Tag(f"{sys.argv[2]}{number}", "x")])
"""


def test_two_processes_lose_no_tag(labels: LabelStore, job: JobRecord, tmp_path: Path) -> None:
    """Three real processes that start together, 15 tags each: all 45 are there."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "home")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    writers = [subprocess.Popen([*command, name], **pipes) for name in "abc"]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert set(labels.of(job).tags) == {f"{name}{number}" for name in "abc" for number in range(15)}
    assert sorted(file.name for file in labels.folder.iterdir() if ".part" in file.name) == []


@pytest.mark.parametrize("name", JSON_CASES)
def test_a_damaged_file_is_ignored_and_moved_away(
    labels: LabelStore, job: JobRecord, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the file: what was there is in the folder of damaged ones, and new tags are kept."""
    noticed: dict[str, str] = {}
    monkeypatch.setattr(file_reading, "noticed", noticed)
    file = labels.folder / f"{job.id}.labels"
    JSON_CASES[name](file)
    assert labels.of(job) == NO_LABELS
    assert list(noticed) == [str(file)]
    assert labels.known_tags() == set()
    labels.change(job, [Tag("exp", "lr")])
    assert labels.of(job).tags == {"exp": "lr"}
    assert len(list((labels.folder.parent / "damaged").iterdir())) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"tags": ["a"]},
        {"tags": {"a": 1}},
        {"tags": {"a b": ""}},
        {"tags": {"a": "\u001b[2J"}},
        {"tags": {f"t{number}": "" for number in range(MOST_TAGS + 1)}},
        {"note": 5},
        {"note": "\u001b]0;x\u0007"},
        {"note": "x" * (LONGEST_NOTE + 1)},
    ],
)
def test_wrong_values_are_damage(labels: LabelStore, job: JobRecord, values: dict[str, object]) -> None:
    (labels.folder / f"{job.id}.labels").write_text(json.dumps({"token": job.token, **values}))
    assert labels.of(job) == NO_LABELS


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"\0" * 4096)


def test_a_full_and_a_read_only_disk(small_disk: Path) -> None:
    """A real file system: the tags are the old ones, and the message says where they should go."""
    job, labels = add_job(small_disk, "gpt-00000a"), LabelStore(small_disk / "home")
    labels.change(job, [Tag("old", "1")])
    fill(small_disk)
    with pytest.raises(UserError, match="cannot write the tags of gpt-00000a") as full:
        labels.change(job, [Tag("new", "x" * 100)])
    assert (full.value.exit_code, "No space left" in full.value.message) == (3, True)
    (small_disk / "filler").unlink()
    assert labels.of(job).tags == {"old": "1"}
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match="Read-only file system"):
        labels.change(job, [Tag("new")])
    assert labels.of(job).tags == {"old": "1"}
    assert sorted(labels.folder.glob("*.part*")) == []
