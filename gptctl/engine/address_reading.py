"""Read the addresses of messages where they are named, and name them without their secrets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gptctl.engine.addresses import APPRISE, kind_of, url_problem
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import DamagedFile, load_bytes

LARGEST_REFERENCE = 4096  # bytes of a file that has a URL or a secret


class Address(NamedTuple):
    """Where a message goes. The URL and the secret must not be printed or written to a file."""

    kind: str
    url: str
    secret: str = ""


class UnusableAddress(Exception):
    """The address cannot be read, or is not one; the text does not contain it."""


def read_address(target: Mapping[str, Any], environment: Mapping[str, str]) -> Address:
    """Read the URL and the secret of a target where the plan says; raise UnusableAddress."""
    url = _read(target.get("url"), environment)
    kind = str(target.get("kind") or kind_of(url))
    if problem := url_problem(url, kind):
        raise UnusableAddress(f"the URL of the notification cannot be used: {problem}")
    secret = target.get("secret")
    return Address(kind, url, _read(secret, environment) if secret else "")


def _read(source: object, environment: Mapping[str, str]) -> str:
    match source:
        case {"env": str(name)}:
            found, where = environment.get(name, ""), f"the variable {name}"
        case {"file": str(path)}:
            try:
                found = load_bytes(Path(path), LARGEST_REFERENCE).decode("utf-8", "replace")
            except (OSError, DamagedFile) as error:
                reason = getattr(error, "strerror", None) or error
                raise UnusableAddress(f"cannot read {path}: {reason}") from None
            where = path
        case _:
            found, where = str(source or ""), "the URL"
    if not found.strip():
        raise UnusableAddress(f"{where} is not set, or empty")
    return found.strip()


def shown_address(kind: str, url: str) -> str:
    """Name an address without its secret parts: `feishu`, `webhook at HOST`."""
    if kind == APPRISE:
        return f"apprise ({one_line(url.partition('://')[0], 20)})"
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        return f"{kind} at {one_line(host, 80)}" if host else kind
    return kind
