"""Clients of the server that disconnect. Oracle: the kernel's sockets; nothing stands in for the server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from trainer.config.sections import Generation
from trainer.corpus.tokenizer import ByteTokenizer
from trainer.tasks.completions import Served
from trainer.tasks.http_server import Job, Server
from trainer.tasks.serving import _next_job


@pytest.fixture
def server() -> Iterator[Server]:
    """Without a model: requests wait until a test takes them."""
    running = Server("127.0.0.1", 0, None, 60.0)
    running.served = Served("gpt", ByteTokenizer(), 257, 64, Generation(), lambda: 1)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()


def ask(server: Server, is_streamed: bool) -> socket.socket:
    client = socket.create_connection(server.server_address[:2], timeout=30)  # type: ignore[arg-type]
    body = json.dumps({"prompt": "one", "stream": is_streamed}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def wait_for_requests(server: Server, count: int) -> list[Job]:
    deadline = time.monotonic() + 20
    while server.jobs.qsize() < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return list(server.jobs.queue)


def test_who_disconnects_is_not_answered(server: Server) -> None:
    """Of four that wait, the model gets only the request of the one that is still there."""
    clients = [ask(server, is_streamed) for is_streamed in (False, True, False, True)]
    jobs = wait_for_requests(server, 4)
    for client in clients[1:]:
        client.close()
    deadline = time.monotonic() + 20
    while sum(job.is_cancelled.is_set() for job in jobs) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (left,) = [job for job in jobs if not job.is_cancelled.is_set()]
    assert _next_job(server, wait=0.01) is left
    assert _next_job(server, wait=0.01) is None
    left.events.put([])
    assert clients[0].recv(12) == b"HTTP/1.1 200"
    clients[0].close()


def test_a_client_that_waits_is_not_taken_for_gone(server: Server) -> None:
    client = ask(server, is_streamed=True)
    (job,) = wait_for_requests(server, 1)
    time.sleep(0.5)
    assert not job.is_cancelled.is_set()
    client.close()
    assert job.is_cancelled.wait(10)
