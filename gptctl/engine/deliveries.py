"""Who sends a message, and whether it arrived: one small file for each try, in the run folder.

The engine and everybody who watches the job may send. The name of a file has the number of the try,
and creating it is atomic: so at most one of them sends at a time. A try whose sender was killed
expires, and somebody else makes the next one. Nobody tries again after an acknowledgement.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.atomic_files import private, replacing
from gptctl.engine.contract import NOTIFICATIONS
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import read_json
from gptctl.engine.processes import is_alive, is_same_boot, this_process
from gptctl.engine.run_folder import entries_like

ENGINE, WATCHER = "engine", "watcher"  # the roles of senders
SENDING, DELIVERED, FAILED, GAVE_UP = "sending", "delivered", "failed", "gave up"
MOST_TRIES = 6  # of each role
# Seconds between a failed try and the next one, by the number of tries of the role.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
YIELD = 1.0  # seconds more for whoever failed: somebody else may have a way out
EXPIRES = 60.0  # seconds after which a try counts as failed; no sender needs that long
# Where the folder is a copy, watchers count from here: their files must not have names of the
# engine's.
FIRST_OF_COPY = 100
_NAME = re.compile(r"[a-z_]+\.\d{1,7}\.\d{1,3}\.\d{1,4}", re.ASCII)


class Try(NamedTuple):
    """One try to send a message."""

    number: int
    role: str
    state: str
    age: float  # seconds since it was seen first in this state: the clocks of machines differ
    is_own: bool = False  # made by this process
    is_orphaned: bool = False  # its sender was killed
    text: str = ""  # what the server said

    @property
    def is_running(self) -> bool:
        return self.state == SENDING and not self.is_orphaned and self.age < EXPIRES


def is_settled(tries: Sequence[Try], role: str, most: int = MOST_TRIES) -> bool:
    """Whether nothing is left to do for senders of this role."""
    own = [each for each in tries if each.role == role]
    is_delivered = any(each.state == DELIVERED for each in tries)
    return is_delivered or len(own) >= most or any(each.state == GAVE_UP for each in own)


def next_try(tries: Sequence[Try], role: str) -> int | None:
    """The number of the next try of a message that is not settled; None: not yet."""
    if not tries:
        return 0
    last = tries[-1]
    if last.is_running:
        return None
    num_own = sum(each.role == role for each in tries)
    # A sender that gave up has left the message to others.
    if last.state == FAILED:
        pause = PAUSES[min(num_own, len(PAUSES)) - 1] if num_own else 0.0
        if last.age < pause + (YIELD if last.is_own else 0.0):
            return None
    return last.number + 1


def has_given_up(tries: Sequence[Try], role: str) -> bool:
    return any(each.role == role and each.state == GAVE_UP for each in tries)


class Delivery:
    """The tries to send one message to one target."""

    def __init__(self, run_dir: Path, message: str, target: int, role: str) -> None:
        """`message`: the name of the news. `target`: its number in the plan."""
        self._folder, self._role = run_dir / NOTIFICATIONS, role
        self._seen: dict[tuple[int, str], float] = {}  # by number and state, on the steady clock
        self._prefix = f"{message}.{target}"
        assert is_delivery(f"{self._prefix}.0")

    def tries(self) -> list[Try]:
        files = {
            int(file.name.rpartition(".")[2]): file
            for file in entries_like(self._folder, f"{self._prefix}.*")
            if is_delivery(file.name)
        }
        return [self._read(number, file) for number, file in sorted(files.items())]

    def begin(self, number: int) -> bool:
        """Become the sender of this try; return False if somebody else is. Raises OSError."""
        self._folder.mkdir(0o700, exist_ok=True)
        part = self._folder / f".{self._prefix}.{os.getpid()}.{threading.get_native_id()}"
        try:
            with open(part, "w", encoding="utf-8", opener=private) as stream:
                stream.write(json.dumps(self._content(SENDING, "")))
            # Linking is atomic, also on NFS, and readers never see a part of the file.
            os.link(part, self._file(number))
        except FileExistsError:
            return False
        finally:
            part.unlink(missing_ok=True)
        return True

    def record(self, number: int, state: str, text: str) -> None:
        # A disk may be full: the caller remembers what it has sent.
        with suppress(OSError), replacing(self._file(number)) as stream:
            stream.write(json.dumps(self._content(state, text)).encode())

    def leave(self, tries: Sequence[Try], text: str) -> None:
        """Leave a message that is not settled to senders of other roles."""
        last = tries[-1] if tries else None
        number = last.number if last and last.is_own and last.is_running else None
        with suppress(OSError):
            if number is None:
                number = last.number + 1 if last else 0
                if not self.begin(number):
                    return
            self.record(number, GAVE_UP, text)

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._prefix}.{number}"

    def _content(self, state: str, text: str) -> dict[str, Any]:
        return {"role": self._role, "state": state, "text": text, "sender": this_process()}

    def _read(self, number: int, file: Path) -> Try:
        found = read_json(file, 1 << 16) or {}
        text, sender, state = found.get("text"), found.get("sender"), str(found.get("state"))
        who: Mapping[str, Any] = sender if isinstance(sender, dict) else {}
        now = time.monotonic()
        return Try(
            number,
            WATCHER if found.get("role") == WATCHER else ENGINE,
            state,
            now - self._seen.setdefault((number, state), now),
            is_own=who == this_process(),
            is_orphaned=is_same_boot(who) and not is_alive(who),
            text=one_line(text) if isinstance(text, str) else "",
        )


def is_delivery(name: str) -> bool:
    """Whether a file in the folder of notifications is a record of a try."""
    return _NAME.fullmatch(name) is not None


def is_of_engine(name: str) -> bool:
    """Whether the try of this name cannot be one of a watcher that sees a copy of the folder."""
    return is_delivery(name) and int(name.rpartition(".")[2]) < FIRST_OF_COPY
