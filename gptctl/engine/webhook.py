"""Send a message to a webhook or a chat, and find out whether it arrived.

Chats answer errors with status 200 and a code in the body: only their code for success counts. A
server may be slow, endless or anything else: a try ends after a fixed time, whatever it does.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote_plus, unquote, urlsplit

from gptctl.engine.address_reading import Address
from gptctl.engine.addresses import APPRISE, DINGTALK, FEISHU, SLACK, WECOM
from gptctl.engine.error_text import one_line
from gptctl.engine.file_reading import parse_json
from gptctl.engine.notifications import Message

# Where the body of an answer has the code of success, which is 0.
_CODES = {FEISHU: ("code", "StatusCode"), DINGTALK: ("errcode",), WECOM: ("errcode",)}
LIMIT = 10.0  # seconds of one try
APPRISE_LIMIT = 30.0  # seconds: starting Python and importing apprise takes some of them
LARGEST_ANSWER = 16 << 10  # bytes that are read of it
LONGEST_ANSWER = 120  # characters that are shown of it
# Status codes below 500 after which another try may succeed.
_TEMPORARY = (408, 425, 429)
_NOT_INSTALLED, _NO_SERVICE = 3, 4  # exit codes of the program below
# In a process of its own, since the engine runs without site-packages. The URL comes over stdin:
# other users could read it in the arguments.
_APPRISE_PROGRAM = f"""
import json, sys
try:
    import apprise
except ImportError:
    sys.exit({_NOT_INSTALLED})
order = json.load(sys.stdin)
service = apprise.Apprise()
if not service.add(order["url"]):
    sys.exit({_NO_SERVICE})
sys.exit(0 if service.notify(title=order["title"], body=order["text"]) else 1)
"""


class SendOutcome(NamedTuple):
    """What became of a try."""

    is_delivered: bool
    text: str  # what the server said, or why it said nothing
    is_final: bool = False  # another try would end in the same way


# What is sent


class Request(NamedTuple):
    url: str
    body: bytes
    headers: Mapping[str, str]


def request_for(address: Address, message: Message, now: float) -> Request:
    """Write a message in the form that the receiver expects."""
    url, text = address.url, message.text
    body: dict[str, Any]
    if address.kind == FEISHU:
        # `<at …>` would call everybody in the group: reasons come from foreign programs.
        body = {"msg_type": "text", "content": {"text": text.replace("<", "‹")}}
        body |= _feishu_signature(address.secret, now) if address.secret else {}
    elif address.kind in (DINGTALK, WECOM):
        body = {"msgtype": "text", "text": {"content": text.replace("<", "‹")}}
        url += _dingtalk_signature(address, now) if address.secret else ""
    elif address.kind == SLACK:
        # The three characters that have a meaning in its texts.
        body = {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    else:
        body = message.as_json()
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "User-Agent": "gptctl",
        "Idempotency-Key": message.id,
    }
    return Request(url, json.dumps(body, ensure_ascii=False).encode(), headers)


def _feishu_signature(secret: str, now: float) -> dict[str, str]:
    moment = str(int(now))
    return {"timestamp": moment, "sign": _hmac(f"{moment}\n{secret}", "")}


def _dingtalk_signature(address: Address, now: float) -> str:
    moment = str(int(1000 * now))
    sign = quote_plus(_hmac(address.secret, f"{moment}\n{address.secret}"))
    return f"{'&' if '?' in address.url else '?'}timestamp={moment}&sign={sign}"


def _hmac(key: str, text: str) -> str:
    digest = hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()


# What comes back


def outcome_of(address: Address, status: int, body: bytes) -> SendOutcome:
    """Judge an answer: an error with status 200 is not an acknowledgement."""
    kind = address.kind
    # Before it is cut: a part of a secret would not be recognised.
    said = without_secrets(body.decode("utf-8", "replace"), address)
    said = one_line(said, LONGEST_ANSWER)
    text = f"HTTP {status}{f': {said}' if said else ''}"
    if not 200 <= status < 300:
        return SendOutcome(False, text, 300 <= status < 500 and status not in _TEMPORARY)
    if kind == SLACK:
        return SendOutcome(body.strip() == b"ok", text)
    found = parse_json(body)
    if kind in _CODES:
        codes = [found[name] for name in _CODES[kind] if name in found] if found else []
        return SendOutcome(bool(codes) and all(is_zero(code) for code in codes), text)
    # The page of a proxy or a portal that stands between a cluster and the world.
    if body.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return SendOutcome(False, f"{text}: a web page, not a webhook", True)
    return SendOutcome(not _reports_error(found or {}), text)


def is_zero(code: object) -> bool:
    return code == 0 and not isinstance(code, bool)


def _reports_error(answer: Mapping[str, Any]) -> bool:
    """Whether an answer of an unknown server says that it did not take the message."""
    codes = [answer.get(name) for name in ("code", "status", "statusCode", "StatusCode")]
    return (
        any(answer.get(name) is False for name in ("ok", "success"))
        or bool(answer.get("error"))
        or not is_zero(answer.get("errcode") or 0)
        or any(isinstance(code, int) and code >= 400 for code in codes)
        or str(answer.get("status")).lower() in ("error", "fail", "failed")
    )


# Sending


def send(address: Address, message: Message, limit: float = LIMIT) -> SendOutcome:
    """Send a message once; return within the limit, whatever the server does."""
    if address.kind == APPRISE:
        return _by_apprise(address, message)
    done: list[SendOutcome] = []
    exchange = _Exchange(address, message, limit)
    # In a thread: nothing else ends a slow resolver, or an answer that comes byte by byte.
    worker = threading.Thread(target=lambda: done.append(exchange.run()), daemon=True)
    worker.start()
    worker.join(limit)
    exchange.cut()
    return done[0] if done else SendOutcome(False, f"no answer within {limit:g} s")


class _Exchange:
    """One request and its answer. It can be cut while it waits for the server."""

    def __init__(self, address: Address, message: Message, limit: float) -> None:
        self._address, self._message = address, message
        self._limit, self._deadline = limit, time.monotonic() + limit
        self._socket: socket.socket | None = None

    def cut(self) -> None:
        with suppress(OSError):
            if self._socket:
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> SendOutcome:
        try:
            return outcome_of(self._address, *self._exchange())
        except Exception as error:
            return SendOutcome(False, error_text(error))

    def _exchange(self) -> tuple[int, bytes]:
        from urllib import request as urls
        from urllib.error import HTTPError

        wanted = request_for(self._address, self._message, time.time())
        made = self._made

        class Http(urls.HTTPHandler):
            def http_open(self, req: urls.Request) -> http.client.HTTPResponse:
                return self.do_open(made(http.client.HTTPConnection), req)

        class Https(urls.HTTPSHandler):
            def https_open(self, req: urls.Request) -> http.client.HTTPResponse:
                return self.do_open(made(http.client.HTTPSConnection), req)

        class NoRedirect(urls.HTTPRedirectHandler):
            def redirect_request(self, *args: Any) -> None:
                return None  # it would turn the POST into a GET, perhaps to another host

        # Proxies of the environment are used: on many clusters they are the only way out.
        opener = urls.build_opener(Http, Https, NoRedirect)
        asked = urls.Request(wanted.url, wanted.body, dict(wanted.headers), method="POST")
        try:
            response = opener.open(asked, timeout=self._limit)
        except HTTPError as error:
            response = error
        with response:
            return response.status, self._read(response)

    def _made(self, cls: Callable[..., http.client.HTTPConnection]) -> Any:
        """Make connections of this class that send nothing once the time is over."""

        def connection(host: str, **options: Any) -> http.client.HTTPConnection:
            made = cls(host, **options)
            connect = made.connect

            def connect_in_time() -> None:
                connect()
                self._socket = made.sock
                # Somebody else may be sending the message by now.
                if time.monotonic() > self._deadline:
                    raise TimeoutError

            made.connect = connect_in_time  # type: ignore[method-assign]
            return made

        return connection

    def _read(self, response: Any) -> bytes:
        """Read an answer that may be endless, or stop before its end."""
        data, patience = b"", self._limit / 4
        if self._socket:
            self._socket.settimeout(patience)
        # Early enough for a judgement: the status is known, and to some servers it is all.
        with suppress(TimeoutError):
            while len(data) < LARGEST_ANSWER and time.monotonic() < self._deadline - patience:
                part = response.read1(LARGEST_ANSWER - len(data))
                if not part:
                    break
                data += part
        return data


def _by_apprise(address: Address, message: Message) -> SendOutcome:
    order = {"url": address.url, "title": message.title, "text": message.text}
    try:
        code = subprocess.run(
            [sys.executable, "-c", _APPRISE_PROGRAM],
            input=json.dumps(order).encode(),
            # What it prints may contain the URL.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=APPRISE_LIMIT,
        ).returncode
    except subprocess.TimeoutExpired:
        return SendOutcome(False, f"no answer within {APPRISE_LIMIT:g} s")
    except OSError as error:
        return SendOutcome(False, error_text(error))
    if code == _NOT_INSTALLED:
        # As in `trainer.errors.install_line`, which the engine does not have on hosts.
        hint = "pip install 'gptctl[notify]'"
        return SendOutcome(False, f"apprise is not installed for {sys.executable}: {hint}", True)
    if code == _NO_SERVICE:
        return SendOutcome(False, "apprise does not know this kind of URL", True)
    text = "the service did not take it" if code else "sent"
    return SendOutcome(not code, f"apprise: {text}")


def error_text(error: BaseException) -> str:
    """Describe a failed request. Other texts of exceptions may contain the URL."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return error_text(reason)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "cannot resolve the host name"
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror)
    return type(error).__name__


def without_secrets(text: str, address: Address) -> str:
    """Remove from an answer what it repeats of the URL: it is shown and written to files."""
    for secret in sorted(_secrets_in(address), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _secrets_in(address: Address) -> Iterable[str]:
    parts = SplitResult("", "", "", "", "")
    with suppress(ValueError):
        parts = urlsplit(address.url)
    words = [parts.path, *parts.path.split("/"), parts.query, parts.netloc.rpartition("@")[0]]
    words += [value for _, value in parse_qsl(parts.query)]
    words += [address.url, address.secret, *map(unquote, words)]
    return {word for word in words if len(word) >= 6}
