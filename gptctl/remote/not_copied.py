"""What a fetch leaves out, and why: one file of one host must not keep those of others away."""

from __future__ import annotations

from gptctl.engine.error_text import one_line
from gptctl.remote.host_error import HostError
from gptctl.reporting import Say

MAX_NAMED = 10  # files that one message names
MAX_REASONS = 20  # of one fetch; hosts choose the words of some of them
OTHER = "for other reasons"


class NotReadable(Exception):
    """A file of a host cannot be copied; the text says why."""


class NotCopied:
    """Collects the files that are left out, by host and reason: a host may have many of them."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], list[str]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._hosts: dict[str, HostError] = {}
        self._hints: dict[str, None] = {}

    def add(self, host: str, path: str, why: str, hint: str = "") -> None:
        """Leave out one file, or one folder."""
        key = host, one_line(why, 200)
        if key not in self._counts and len(self._counts) >= MAX_REASONS:
            key = host, OTHER
        self._counts[key] = self._counts.get(key, 0) + 1
        named = self._named.setdefault(key, [])
        if len(named) < MAX_NAMED:
            named.append(one_line(path))
        if hint:
            self._hints[hint] = None

    def add_host(self, error: HostError) -> None:
        """Leave out all other files of a host."""
        self._hosts.setdefault(error.host, error)

    def has_host(self, host: str) -> bool:
        return host in self._hosts

    @property
    def count(self) -> int:
        """How many files, folders and hosts were left out."""
        return sum(self._counts.values()) + len(self._hosts)

    def report(self, say: Say) -> None:
        for (host, why), number in self._counts.items():
            named = self._named[host, why]
            more = f" and {number - len(named):,} others" if number > len(named) else ""
            say(f"not copied: {host}: {why}: {', '.join(named)}{more}")
        for error in self._hosts.values():
            say(f"not copied: {error.message}")
        hints = [*self._hints, *(error.hint for error in self._hosts.values() if error.hint)]
        for hint in dict.fromkeys(hints):
            say(f"hint: {hint}")
