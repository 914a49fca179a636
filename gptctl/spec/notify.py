"""`notify` of a run config or a profile, and GPTCTL_NOTIFY: who is told what about a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gptctl.engine.addresses import KINDS, SIGNED, TOLD, WEBHOOK, kind_of, url_problem
from gptctl.engine.contract import NOTIFY_VARIABLE
from gptctl.spec.secret_source import SecretSource
from trainer.config.kinds import NOT_A_NAME, WRONG_TYPE, BadValue, Choice, Words, list_items
from trainer.config.tree import Map, Node, Scalar, is_null, parse_value
from trainer.errors import Finding, Rule, closest

PLAIN_URL = Rule(
    "A016",
    "an address that contains a token should be named in notify, not written there",
    "warning",
    uses=("Launch.notify",),
)

Target = Mapping[str, Any]  # kind (empty: by the URL), url, on, and perhaps secret
_KEYS = ("url", "kind", "on", "secret")
_OFF = ("off", "none", "no", "false")
_SYNONYMS = {"first step": "first_step", "first-step": "first_step", "restart": "failure"}
_REFERENCE = "name the address instead: notify: {env: NAME} or {file: path}"


class NotifyTarget:
    """One address: a URL, a reference to one, or a mapping with `url`, `kind`, `on`, `secret`."""

    def read(self, node: Node) -> Target:
        items: dict[str, Node] = dict(node.items) if isinstance(node, Map) else {"url": node}
        # `notify: {env: NAME, on: [end]}` is short for `{url: {env: NAME}, on: [end]}`.
        source: dict[str, Node] = {
            name: items.pop(name) for name in ("env", "file") if name in items
        }
        if source and "url" not in items:
            items["url"] = Map(source, node.place)
            source = {}
        items |= source
        if unknown := [name for name in items if name not in _KEYS]:
            near = closest(unknown[0], _KEYS)
            hint = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(_KEYS)}"
            raise BadValue(WRONG_TYPE, f"notify has no key {unknown[0][:60]}", hint)
        given = {name: item for name, item in items.items() if not is_null(item)}
        if "url" not in given:
            raise BadValue(WRONG_TYPE, "the key url is missing", "use {url: {env: NAME}}")
        kind = Choice(KINDS).read(given["kind"]) if "kind" in given else ""
        url = _url(given["url"], kind)
        kind = kind or (kind_of(url) if isinstance(url, str) else "")
        secret = {"secret": SecretSource().read(given["secret"])} if "secret" in given else {}
        if secret and kind not in ("", *SIGNED):
            hint = f"delete it; only {' and '.join(SIGNED)} sign messages"
            raise BadValue(WRONG_TYPE, f"a notification of kind {kind} has no secret", hint)
        return {"kind": kind, "url": url, "on": _events(given), **secret}

    def schema(self) -> dict[str, Any]:
        source = {"type": ["string", "object"]}
        events = {"type": ["array", "string"], "items": {"enum": [*TOLD, *_SYNONYMS]}}
        properties = {
            "url": source,
            "kind": {"enum": [*KINDS, None]},
            "on": events,
            "secret": {"type": "object"},
            **{name: {"type": "string"} for name in ("env", "file")},
        }
        mapping = {"type": "object", "properties": properties, "additionalProperties": False}
        return {"anyOf": [{"type": "string"}, mapping]}


class NotifyTargets:
    """A list of addresses, a single one, or `off`."""

    is_secret = True  # messages must not show the value

    def read(self, node: Node) -> tuple[Target, ...]:
        if isinstance(node, Scalar) and node.text.lower() in _OFF:
            return ()
        return Words(NotifyTarget()).read(node)

    def schema(self) -> dict[str, Any]:
        one = NotifyTarget().schema()
        return {"anyOf": [*one["anyOf"], {"type": "array", "items": one}, {"enum": [False, None]}]}


def _url(node: Node, kind: str) -> str | Mapping[str, str]:
    if isinstance(node, Map):
        return SecretSource().read(node)
    if not isinstance(node, Scalar):
        raise BadValue(WRONG_TYPE, "expected a URL, found a list", "write a list of targets")
    if problem := url_problem(node.text, kind):
        raise BadValue(NOT_A_NAME, f"invalid URL: {problem}", _REFERENCE)
    return node.text


def _events(given: Mapping[str, Node]) -> tuple[str, ...]:
    if "on" not in given:
        return TOLD
    wanted = Choice(TOLD, _SYNONYMS)
    return tuple(dict.fromkeys(wanted.read(item) for item in list_items(given["on"])))


def notify_of_environment(
    environment: Mapping[str, str], found: list[Finding]
) -> tuple[Target, ...] | None:
    """Read GPTCTL_NOTIFY: a URL, or what `notify` of a config may be. None: it is not set."""
    text = environment.get(NOTIFY_VARIABLE, "").strip()
    if not text:
        return None
    # It is read again where the message is sent: a URL with a token is written nowhere.
    if not url_problem(text, ""):
        return ({"kind": kind_of(text), "url": {"env": NOTIFY_VARIABLE}, "on": TOLD},)
    node = parse_value(text, NOTIFY_VARIABLE, found, first_line=0)
    return NotifyTargets().read(node) if node else None


def check_notify(
    targets: Sequence[Target] | None, key: str, rule: Rule = PLAIN_URL
) -> Iterator[Finding]:
    """Warn about addresses that anybody could use who reads the config or the job's files."""
    for target in targets or ():
        url = target["url"]
        if isinstance(url, str) and (target["kind"] != WEBHOOK or _has_token(url)):
            message = "the URL contains a token, and it is stored with the job as plain text"
            yield rule.found(key, None, message, _REFERENCE)


def _has_token(url: str) -> bool:
    parts = urlsplit(url)
    # Random words are long, and rarely without digits.
    words = re.split(r"[/._~-]", parts.path)
    is_random = any(len(word) >= 16 and re.search(r"\d", word) for word in words)
    return bool(parts.query or "@" in parts.netloc or is_random)
