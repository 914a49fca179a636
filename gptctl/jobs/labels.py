"""Tags and notes: what users write on a job to find it again. They can change at any time.

`<id>.labels` beside the record, whose file is written once. It stays when the run folder is
removed. Every change is made under one lock, so that two commands at once lose nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import DamagedFile, load_json, notice, notice_error, open_no_link
from gptctl.engine.typed_fields import check_fields
from gptctl.jobs.store import LABELS, NOTHING, JobRecord
from gptctl.spec.resources import home
from gptctl.text import clean, count
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError
from trainer.named_tuple import NamedTuple

MOST_TAGS = 50  # of a job
LONGEST_KEY, LONGEST_VALUE, LONGEST_NOTE = 64, 128, 2000  # characters
MAX_FILE = 1 << 16  # bytes: more than all of these take
MOST_COMPLETED = 1000  # files that are read after Tab is pressed
LOCK_TIMEOUT = 10.0  # seconds; writing takes milliseconds
_KEY = re.compile(rf"[^\W_][\w.-]{{0,{LONGEST_KEY - 1}}}")
_VALUE = re.compile(rf"[\w.:/@+-]{{1,{LONGEST_VALUE}}}")


class Tag(NamedTuple):
    """`key=value`, or a plain word, whose value is empty."""

    key: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}" if self.value else self.key


class Labels(NamedTuple):
    """The tags of a job by their keys, and its note; both may be empty."""

    tags: Mapping[str, str] = NOTHING
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"tags": dict(self.tags), "note": self.note or None}

    def has(self, tag: Tag) -> bool:
        """Whether a job with these labels is meant by a tag; a key alone means any value."""
        return tag.key in self.tags and tag.value in ("", self.tags[tag.key])

    def changed(
        self, tags: Iterable[Tag] = (), removed: Iterable[str] = (), note: str | None = None
    ) -> Labels:
        """These labels with other ones; raise UserError if they are too many."""
        gone = set(removed)
        kept = {key: value for key, value in self.tags.items() if key not in gone}
        kept |= {tag.key: tag.value for tag in tags}
        if len(kept) > MOST_TAGS:
            hint = "remove some first: gptctl tag JOB --remove KEY"
            raise UserError(f"more than {MOST_TAGS} tags on one job", hint, WRONG_USAGE)
        return Labels(kept, self.note if note is None else note)


NO_LABELS = Labels()


def tags_text(tags: Mapping[str, str]) -> str:
    return " ".join(str(Tag(*each)) for each in sorted(tags.items()))


def parse_tag(text: str) -> Tag:
    """Read `key=value` or a plain word; raise UserError if it is neither."""
    key, equals, value = unicodedata.normalize("NFC", text).partition("=")
    shown = one_line(text, 80)
    if not _KEY.fullmatch(key):
        rule = f"up to {LONGEST_KEY} letters, digits and . _ -, the first a letter or a digit"
        raise UserError(f"invalid tag {shown!r}: its name must be {rule}", "", WRONG_USAGE)
    if equals and not value:
        hint = f"write {key}=VALUE, or only {key}"
        raise UserError(f"the tag {shown!r} has no value", hint, WRONG_USAGE)
    if equals and not _VALUE.fullmatch(value):
        rule = f"up to {LONGEST_VALUE} letters, digits and . _ - : / @ +"
        hint = "put a sentence into a note: --note TEXT"
        raise UserError(f"invalid tag {shown!r}: its value must be {rule}", hint, WRONG_USAGE)
    return Tag(key, value)


def parse_tags(texts: Iterable[str]) -> list[Tag]:
    """Read all tags; raise UserError if a key is given two values."""
    found: dict[str, Tag] = {}
    for tag in map(parse_tag, texts):
        if found.setdefault(tag.key, tag) != tag:
            message = f"two values for the tag {tag.key}: {found[tag.key]} and {tag}"
            raise UserError(message, "give only one", WRONG_USAGE)
    return list(found.values())


def parse_labels(tags: Iterable[str], note: str | None) -> Labels:
    """Read the options --tag and --note of a new job."""
    return NO_LABELS.changed(parse_tags(tags), note=parse_note(note or ""))


def parse_note(text: str) -> str:
    """Return a note that can be stored and printed; an empty one removes the note."""
    text = text.strip()
    if len(text) > LONGEST_NOTE:
        message = f"the note has {count(len(text), 'character')}; at most {LONGEST_NOTE:,} fit"
        raise UserError(message, "write a file, and note its path", WRONG_USAGE)
    if not _is_printable(text):
        message = "the note contains control characters, or is not UTF-8"
        raise UserError(message, "write plain text; it may have several lines", WRONG_USAGE)
    return text


def _is_printable(text: str) -> bool:
    # A lone surrogate stands for a byte that is not UTF-8: it cannot be written.
    return clean(text) == text and not any("\ud800" <= each <= "\udfff" for each in text)


class LabelStore:
    """Reads and writes the labels of all jobs."""

    def __init__(self, folder: Path | None = None) -> None:
        self._home = folder or home()
        self.folder = self._home / "jobs"

    def of(self, record: JobRecord) -> Labels:
        """The labels of a job; a damaged file is ignored, and noticed."""
        file = self._file(record)
        try:
            return _read(file, record.token)
        except FileNotFoundError:  # most jobs have none
            return NO_LABELS
        except DamagedFile as error:
            notice(file, str(error))
        except OSError as error:
            notice_error(file, error)
        return NO_LABELS

    def keep(self, record: JobRecord, labels: Labels) -> None:
        """Keep the labels of a job that is being submitted."""
        if labels != NO_LABELS:
            with self._errors(record):
                self._write(record, labels)

    def change(
        self,
        record: JobRecord,
        tags: Sequence[Tag] = (),
        removed: Sequence[str] = (),
        note: str | None = None,
    ) -> Labels:
        """Change the labels of a job; raise UserError if they cannot be written."""
        with self._errors(record), self._locked():
            labels = self._current(record).changed(tags, removed, note)
            self._write(record, labels)
        return labels

    def ids(self) -> set[str]:
        """The jobs that may have labels: others need not be read to search for a tag."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return set()
        return {name.removesuffix(LABELS) for name in names if name.endswith(LABELS)}

    def known_tags(self) -> set[Tag]:
        """Tags that are in use, for the completion of shells: damaged files are left out."""
        found: set[Tag] = set()
        for job_id in sorted(self.ids())[:MOST_COMPLETED]:
            with suppress(OSError, DamagedFile):
                labels = checked_labels(load_json(self.folder / f"{job_id}{LABELS}", MAX_FILE))
                found.update(Tag(*each) for each in labels.tags.items())
        return found

    def _current(self, record: JobRecord) -> Labels:
        """What is written now. A damaged file is moved away: it must not block new labels."""
        file = self._file(record)
        try:
            return _read(file, record.token)
        except FileNotFoundError:
            return NO_LABELS
        except (DamagedFile, OSError) as error:
            aside = self._home / "damaged"
            reason = error.strerror if isinstance(error, OSError) else str(error)
            notice(file, f"{reason}; moved to {aside}")
            with private_files():
                aside.mkdir(exist_ok=True)
            os.rename(file, aside / f"{file.name}.{time.time_ns()}")
            return NO_LABELS

    def _write(self, record: JobRecord, labels: Labels) -> None:
        text = json.dumps({"token": record.token, **labels.as_json()}, ensure_ascii=False)
        with private_files(), replacing(self._file(record)) as stream:
            stream.write(text.encode() + b"\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_TIMEOUT
        # The kernel releases the lock of a process that is killed.
        lock = open_no_link(str(self.folder / "labels.lock"), os.O_RDWR | os.O_CREAT)
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    message = "another gptctl is changing tags, and does not finish"
                    raise UserError(message, "try again later", OUT_OF_REACH)
                time.sleep(0.01)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _errors(self, record: JobRecord) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"cannot write the tags of {record.id} to {self.folder}: {error.strerror}"
            hint = "check its permissions and the free space there"
            raise UserError(message, hint, OUT_OF_REACH) from None

    def _file(self, record: JobRecord) -> Path:
        return self.folder / f"{record.id}{LABELS}"


def _read(file: Path, token: str) -> Labels:
    """Read the labels of one job; raise OSError or DamagedFile."""
    found = load_json(file, MAX_FILE, open_no_link)
    labels = checked_labels(found)
    # The id may have belonged to a job that was never started.
    return labels if found.get("token") == token else NO_LABELS


def checked_labels(found: Mapping[str, Any]) -> Labels:
    """Return the labels in a file; raise DamagedFile if gptctl would not have written them."""
    check_fields(found, {"tags": Mapping[str, str], "note": str | None})
    tags, note = found.get("tags", {}), found.get("note") or ""
    is_valid = len(tags) <= MOST_TAGS and all(
        _KEY.fullmatch(key) and (not value or _VALUE.fullmatch(value))
        for key, value in tags.items()
    )
    if not is_valid:
        raise DamagedFile("tags is invalid")
    if len(note) > LONGEST_NOTE or not _is_printable(note):
        raise DamagedFile("note is invalid")
    return Labels(tags, note)
