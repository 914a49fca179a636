"""A real HTTP server that answers as webhooks do, well or badly."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

OK = b'{"ok": true}'


class Webhook:
    """What arrived at a server, and how it answers the next requests."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []  # bodies, as soon as they are complete
        self.paths: list[str] = []
        self.answers: list[Callable[[Any], None]] = []  # of the next requests; then it acknowledges
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self.url = ""

    def handle(self, request: Any) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        with self._lock:
            self.received.append(json.loads(body))
            self.paths.append(request.path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            answer = self.answers.pop(0) if self.answers else reply(200, OK)
        try:
            answer(request)
        finally:
            with self._lock:
                self._at_once -= 1

    @property
    def ids(self) -> list[str]:
        return [body["id"] for body in self.received]

    def await_ids(self, *ids: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not {*ids} <= {*self.ids}:
            assert time.monotonic() < deadline, self.ids
            time.sleep(0.02)


@contextmanager
def webhook(address: str = "127.0.0.1") -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.handle(self)

        def log_message(self, *args: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, *args: object) -> None: ...

    with Server((address, 0), Handler) as server:
        hook.url = f"http://{address}:{server.server_address[1]}/hook"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield hook
        server.shutdown()


def reply(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def answer(request: Any) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def reset(request: Any) -> None:
    """Break the connection instead of an answer."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def silent(request: Any) -> None:
    """Take the request, and never answer."""
    time.sleep(60)


def endless_body(request: Any) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"x" * 65536)


def dripping_body(request: Any) -> None:
    """Each byte arrives in time, and the answer never ends."""
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b" ")
        time.sleep(0.05)


def dripping_headers(request: Any) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        request.wfile.write(b"x")
        time.sleep(0.05)


def endless_headers(request: Any) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        request.wfile.write(b"X-More: y\r\n")


def no_http(request: Any) -> None:
    request.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")


def closed_port() -> str:
    """The URL of a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/hook"


def main() -> None:
    """`python -m tests.webhooks ADDRESS FILE`: write the port, then the id of each message, one per line."""
    address, file = sys.argv[1:]
    with webhook(address) as hook, open(file, "a", buffering=1) as log:
        log.write(f"{urlsplit(hook.url).port}\n")
        while True:
            while hook.received:
                log.write(f"{hook.received.pop(0)['id']}\n")
            time.sleep(0.05)


if __name__ == "__main__":
    main()
