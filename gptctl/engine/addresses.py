"""Where messages about a job go: kinds of addresses, their URLs and events, and references to them.

Sends nothing (`webhook.py` does), and is small: every command that reads a config imports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import DamagedFile, load_bytes

WEBHOOK, FEISHU, DINGTALK, WECOM = "webhook", "feishu", "dingtalk", "wecom"
SLACK, APPRISE = "slack", "apprise"
KINDS = (WEBHOOK, FEISHU, DINGTALK, WECOM, SLACK, APPRISE)
START, FIRST_STEP, FAILURE, END = "start", "first_step", "failure", "end"
TOLD = (START, FIRST_STEP, FAILURE, END)  # the events that an address can choose from
SIGNED = (FEISHU, DINGTALK)  # their robots can demand a signature
_HOSTS = {
    "open.feishu.cn": FEISHU,
    "open.larksuite.com": FEISHU,
    "oapi.dingtalk.com": DINGTALK,
    "qyapi.weixin.qq.com": WECOM,
    "hooks.slack.com": SLACK,
}
LARGEST_REFERENCE = 4096  # bytes of a file that has a URL or a secret
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+", re.IGNORECASE)


class Address(NamedTuple):
    """Where a message goes. The URL and the secret must not be printed or written to a file."""

    kind: str
    url: str
    secret: str = ""


class UnusableAddress(Exception):
    """The address cannot be read, or is not one; the text does not contain it."""


def url_problem(url: str, kind: str) -> str:
    """Say what is wrong with a URL, without repeating it; empty if it can be used."""
    if not _URL.fullmatch(url):
        return "it is not a URL such as https://HOST/PATH, or has blanks or non-ASCII characters"
    if (kind or kind_of(url)) == APPRISE:
        return ""  # apprise has its own forms, which it checks itself
    if not url.lower().startswith(("http://", "https://")):
        return "it is not an http or https URL"
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    return "" if has_host else "its host or port is missing or invalid"


def kind_of(url: str) -> str:
    """The kind of an address whose kind is not set."""
    # Where a URL of apprise begins with https, it is that of a service that is known here, too.
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in ("http", "https"):
        return APPRISE
    host = re.split(r"[/?#]", rest)[0].rpartition("@")[2].partition(":")[0]
    return _HOSTS.get(host.lower(), WEBHOOK)


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
