"""The HTTP side of serving: who may ask what, how large and how long.

Every connection has a thread, and only a few exist at a time. The thread of the model takes jobs
from a queue, and answers with events (`Job`).
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

from trainer.input_files import parse_object
from trainer.tasks.completions import (
    BadRequest,
    Request,
    Served,
    answer,
    choice,
    read_request,
    usage,
)
from trainer.tasks.page import CONTENT_SECURITY_POLICY, PAGE
from trainer.tasks.writing import Written

LARGEST_BODY = 1 << 20  # bytes
MOST_CONNECTIONS = 32
MOST_WAITING = 8  # requests, besides the one that is being answered
READ_SECONDS = 20.0  # for a client to send its request
WRITE_SECONDS = 20.0  # for a client to take a part of an answer
LOOK_SECONDS = 0.2  # between two looks whether a client that waits is still there
SLACK = 30.0  # seconds for what is not counted: reading prompts, a busy machine
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MODELS, _COMPLETIONS = "/v1/models", "/v1/completions"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name could mean any address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Job:
    """A request on its way to the model, and the events on their way back."""

    def __init__(self, request: Request, patience: float) -> None:
        self.request, self.patience = request, patience  # seconds that an answer may take
        self.events: queue.SimpleQueue[tuple[int, str] | list[Written] | BadRequest]
        self.events = queue.SimpleQueue()  # new text, then all texts or an error
        self.is_cancelled = threading.Event()


class Server(ThreadingHTTPServer):
    """Accepts connections, and queues jobs."""

    daemon_threads = True  # a connection must not keep the program alive
    request_queue_size = 16

    def __init__(self, host: str, port: int, token: str | None, patience: float) -> None:
        self.token, self.patience = token, patience
        self.served: Served | None = None  # until the model is loaded
        self.created = int(time.time())
        self.jobs: queue.Queue[Job] = queue.Queue(MOST_WAITING)
        self.slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.is_local = is_loopback(host)
        super().__init__((host, port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            # Not by a thread: that is what there would be too many of.
            with suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has disconnected is not an error of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gptctl", ""
    timeout = READ_SECONDS
    path = command = "-"  # until a request is understood

    def setup(self) -> None:
        super().setup()
        # A byte now and then would keep the timeout of the socket from ever being reached.
        self.limit = threading.Timer(READ_SECONDS, self._hang_up)
        self.limit.daemon = True
        self.limit.start()

    def finish(self) -> None:
        self.limit.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, act: Any) -> None:
        self.close_connection = True  # one request per connection: easy to count and to end
        try:
            self._require_own_page()
            act()
        except BadRequest as error:
            self._send_json(error.as_json(), error.status)

    def _get(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/":
            self._send(PAGE.encode(), "text/html; charset=utf-8")
        elif path == "/health":
            self._send_json({"status": "ok" if self.server.served else "loading"})
        else:
            self._require_token()
            if path == _COMPLETIONS:
                raise BadRequest(f"{_COMPLETIONS} accepts only POST", None, 405)
            models = self._models()
            if path == _MODELS:
                self._send_json({"object": "list", "data": models})
            elif path == f"{_MODELS}/{models[0]['id']}":
                self._send_json(models[0])
            else:
                raise BadRequest(f"nothing at {path[:100]}", None, 404)

    def _models(self) -> list[dict[str, Any]]:
        served = self._served()
        facts = {"id": served.name, "object": "model", "created": self.server.created}
        return [{**facts, "owned_by": "gptctl", "max_model_len": served.context}]

    def _post(self) -> None:
        self._require_token()
        if self.path.partition("?")[0] != _COMPLETIONS:
            message = f"only {_COMPLETIONS} accepts POST; it completes text, and has no chat"
            raise BadRequest(message, None, 404)
        request = read_request(self._body(), self._served())
        self.limit.cancel()
        job = Job(request, self.server.patience)
        try:
            self.server.jobs.put_nowait(job)
        except queue.Full:
            raise BadRequest(f"{MOST_WAITING} requests are waiting: try later", None, 429) from None
        self.connection.settimeout(WRITE_SECONDS)
        try:
            if request.is_streamed:
                self._stream(job)
            else:
                self._send_json(self._complete(job))
        finally:
            job.is_cancelled.set()  # also if the client has disconnected: nobody reads the rest

    def _served(self) -> Served:
        if self.server.served is None:
            raise BadRequest("the model is being loaded: try later", None, 503)
        return self.server.served

    def _require_own_page(self) -> None:
        """Refuse requests that another web site makes in the browser of the user."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}")
            origin = urlsplit(self.headers.get("Origin", ""))
            name = host.hostname or ""
        except ValueError:
            raise BadRequest("invalid Host or Origin") from None
        own = self.server.server_address[0]
        # By a name of its own, a site can lead the browser to this address.
        if self.server.is_local and not self.server.token and name not in (*LOOPBACK, own):
            raise BadRequest("unknown Host: use localhost or 127.0.0.1", None, 403)
        if "Origin" in self.headers and origin.netloc != host.netloc:
            raise BadRequest("requests of other sites are refused", None, 403)

    def _require_token(self) -> None:
        expected = self.server.token
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        # Compared in constant time, so that it cannot be guessed byte by byte.
        is_same = hmac.compare_digest(given.strip().encode(), (expected or "").encode())
        if expected and not (kind.lower() == "bearer" and is_same):
            raise BadRequest("wrong or missing token: Authorization: Bearer TOKEN", None, 401)

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise BadRequest("Content-Length is missing", None, 411)
        if len(length) > 12 or int(length) > LARGEST_BODY:
            raise BadRequest(f"more than {LARGEST_BODY:,} bytes", None, 413)
        # A page of another site cannot send this type without being asked by the browser.
        if self.headers.get_content_type() != "application/json":
            raise BadRequest("Content-Type must be application/json", None, 415)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise BadRequest(f"the body ended after {len(body):,} of {int(length):,} bytes")
        try:
            return parse_object(body)
        except ValueError as error:
            raise BadRequest(f"invalid JSON: {error}") from None

    def _events(self, job: Job) -> Iterator[tuple[int, str] | list[Written]]:
        """What the model answers; the list of all texts is the last event."""
        # All that wait before this one may take their time.
        deadline = time.monotonic() + (MOST_WAITING + 1) * self.server.patience + SLACK
        while True:
            try:
                event = job.events.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._is_gone():
                    raise ConnectionAbortedError from None
                if time.monotonic() > deadline:
                    raise BadRequest("it took too long", None, 504) from None
                continue
            if isinstance(event, BadRequest):
                raise event
            yield event
            if isinstance(event, list):
                return

    def _is_gone(self) -> bool:
        """Whether the client has disconnected: then nobody reads what the model would write."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _complete(self, job: Job) -> dict[str, Any]:
        texts = next(event for event in self._events(job) if isinstance(event, list))
        choices = [choice(number, text.text, text.finish) for number, text in enumerate(texts)]
        return {**self._answer_with(choices), "usage": usage(job.request, texts)}

    def _answer_with(self, choices: list[dict[str, Any]], ident: str = "") -> dict[str, Any]:
        ident = ident or f"cmpl-{secrets.token_hex(12)}"
        return answer(ident, int(time.time()), self._served().name, choices)

    def _stream(self, job: Job) -> None:
        """Server-sent events, as OpenAI's clients expect them."""
        ident, is_begun = f"cmpl-{secrets.token_hex(12)}", False
        try:
            for event in self._events(job):
                if not is_begun:
                    self._send_headers("text/event-stream; charset=utf-8")
                    is_begun = True
                if isinstance(event, tuple):
                    self._send_event(self._answer_with([choice(*event, None)], ident))
                    continue
                last = [choice(number, "", text.finish) for number, text in enumerate(event)]
                self._send_event(self._answer_with(last, ident))
                if job.request.has_usage:
                    facts = {"usage": usage(job.request, event)}
                    self._send_event({**self._answer_with([], ident), **facts})
        except BadRequest as error:
            if not is_begun:
                raise
            self._send_event(error.as_json())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _send_json(self, value: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self._send_headers(kind, status, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(self, kind: str, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.send_header("Retry-After", "5")
        self.send_header("Connection", "close")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, in the form of our other errors."""
        self.close_connection = True
        self.request_version = self.protocol_version  # without it, no status would be sent
        error = BadRequest(message or HTTPStatus(code).phrase, None, code)
        self._send_json(error.as_json(), code)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        status = code.value if isinstance(code, HTTPStatus) else code
        path = self.path.partition("?")[0][:100]
        self.log_message("%s %s %s", self.command or "-", path, status)

    def log_message(self, format: str, *args: object) -> None:
        # Without control characters: a client must not write to the terminal.
        text = (format % args).encode("unicode_escape").decode()
        print(f"{self.client_address[0]} {text}", file=sys.stderr, flush=True)
