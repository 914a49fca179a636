"""`python -m trainer.tasks.serve` over a real socket. Oracles: OpenAI's API as documented, HTTP, and `generate` for the texts."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks, free_port
from tests.trained import json_of, layout_flags, start_task, task, trained

TOKEN = "correct-horse-battery-staple"


class Service:
    """A running server."""

    def __init__(self, folder: Path, *flags: object, world: int = 1, **environ: str) -> None:
        self.ranks: Ranks = start_task("serve", folder, "output", "--port", 0, *flags, world=world, **environ)
        self.port = int(self.wait_for(r"Serving \S+ at http://[^ ]*:(\d+)\.")[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, self.log())):
            assert self.ranks.poll(), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return found

    def log(self) -> str:
        return self.ranks.logs[0][1].read_text()

    def ask(self, body: Any, path: str = "/v1/completions", method: str = "POST", **headers: str) -> tuple[int, Any]:
        status, data = self.raw(body, path, method, **headers)
        return status, json.loads(data)

    def raw(self, body: Any, path: str, method: str, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        names = {"content_type": "Content-Type", "authorization": "Authorization", "origin": "Origin", "host": "Host"}
        kinds = {"Content-Type": "application/json", **{names[key]: value for key, value in headers.items()}}
        connection.request(method, path, data, kinds)
        reply = connection.getresponse()
        found = reply.status, reply.read()
        connection.close()
        return found

    def stop(self) -> int:
        self.ranks.kill(signal.SIGTERM)
        return self.ranks.wait(60).codes[0]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("serve")
    trained(folder)
    running = Service(folder, "--greedy")
    yield running
    assert running.stop() == 0


def test_a_completion(service: Service) -> None:
    status, found = service.ask({"prompt": "one two th", "max_tokens": 6})
    assert status == 200
    assert found["object"] == "text_completion"
    assert found["model"] == "output/step_240"
    assert found["choices"] == [{"index": 0, "text": "ree fo", "logprobs": None, "finish_reason": "length"}]
    assert found["usage"] == {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
    assert re.fullmatch("cmpl-[0-9a-f]{24}", found["id"])


def events(data: bytes) -> list[Any]:
    """The events of a stream, as the specification of server-sent events separates them."""
    blocks = data.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_a_stream(service: Service) -> None:
    body = {"prompt": "one two th", "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    status, data = service.raw(body, "/v1/completions", "POST")
    parts = events(data)
    texts = [part["choices"][0]["text"] for part in parts if part["choices"]]
    assert status == 200
    assert "".join(texts) == "ree fo"
    assert len(texts) == 7  # a character each, and the reason of the end
    reasons = [part["choices"][0]["finish_reason"] for part in parts if part["choices"]]
    assert reasons == [None] * 6 + ["length"]
    assert parts[-1]["usage"]["completion_tokens"] == 6
    assert len({part["id"] for part in parts}) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_prompts_and_copies(service: Service, is_streamed: bool) -> None:
    body = {"prompt": ["one two th", "six s"], "n": 2, "max_tokens": 3, "stream": is_streamed}
    status, data = service.raw(body, "/v1/completions", "POST")
    assert status == 200
    texts = ["", "", "", ""]
    for part in events(data) if is_streamed else [json.loads(data)]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ree", "ree", "eve", "eve"]


def test_tokens_as_a_prompt_stop_words_and_seeds(service: Service, tmp_path: Path) -> None:
    status, found = service.ask({"prompt": "one two th", "max_tokens": 6, "stop": [" ", "x"]})
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("ree", "stop")
    vocabulary = sorted(set("one two three four five six seven eight nine ten "))
    tokens = [vocabulary.index(character) for character in "one two th"]
    assert service.ask({"prompt": tokens, "max_tokens": 3})[1]["choices"][0]["text"] == "ree"
    drawn = {"prompt": "one", "max_tokens": 12, "temperature": 3.0, "top_p": 1.0, "top_k": 0}
    texts = [service.ask({**drawn, "seed": seed})[1]["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    trained(tmp_path)
    flags = ["--seed", 1, "--max-length", 12, "--temperature", 3, "--top-p", 1, "--top-k", 0, "--json"]
    (same,) = json_of(task("generate", tmp_path, "output", "one", *flags))
    assert same["text"] == texts[0]
    assert status == 200


def test_models_health_and_page(service: Service) -> None:
    status, models = service.ask(None, "/v1/models", "GET")
    (model,) = models["data"]
    assert (status, models["object"], model["id"], model["object"]) == (200, "list", "output/step_240", "model")
    assert service.ask(None, "/v1/models/output%2Fstep_240", "GET")[1] == model
    assert service.ask(None, "/health", "GET") == (200, {"status": "ok"})
    status, page = service.raw(None, "/", "GET")
    assert status == 200
    assert b"<!doctype html>" in page
    # Nothing is loaded from elsewhere: no address but those of this server.
    assert not re.search(rb"(?i)https?://|//[a-z]|src=|@import|url\(", page)


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "invalid JSON"),
    (b"[]", 400, "not a JSON object"),
    (b"\xff\xfe", 400, "invalid JSON"),
    (b"[" * 10_000, 400, "nested"),
    ({}, 400, "prompt is missing"),
    ({"prompt": []}, 400, "prompt must be"),
    ({"prompt": {"a": 1}}, 400, "prompt must be"),
    ({"prompt": [1, "a"]}, 400, "each prompt must be"),
    ({"prompt": [999]}, 400, "tokens must be in"),
    ({"prompt": [-1]}, 400, "tokens must be in"),
    ({"prompt": [True]}, 400, "each prompt must be"),
    ({"prompt": ["one"] * 17}, 400, "at most 16 prompts"),
    ({"prompt": ["one"] * 9, "n": 2}, 400, "prompts × n"),
    ({"prompt": "中"}, 400, "the vocabulary of this model has no '中'"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": "one two three four"}, 400, "the prompt has 18 tokens"),
    ({"prompt": "one", "max_tokens": 14}, 400, "max_tokens may be at most 13"),
    ({"prompt": "one", "max_tokens": 10**30}, 400, "64 bits"),
    ({"prompt": "one", "max_tokens": 1.5}, 400, "max_tokens must be an integer"),
    ({"prompt": "one", "max_tokens": True}, 400, "max_tokens must be an integer"),
    ({"prompt": "one", "temperature": -1}, 400, "temperature must be a number from 0 to 100"),
    ({"prompt": "one", "temperature": 1e-320}, 400, "temperature must be 0 (greedy), or from 1e-06 to 100"),
    ({"prompt": "one", "top_p": "high"}, 400, "top_p must be a number"),
    ({"prompt": "one", "n": 0}, 400, "n must be an integer from 1 to 16"),
    ({"prompt": "one", "seed": -1}, 400, "seed must be an integer"),
    ({"prompt": "one", "stop": [""]}, 400, "stop must be"),
    ({"prompt": "one", "stop": 5}, 400, "stop must be"),
    ({"prompt": "one", "stop": ["a"] * 17}, 400, "stop must be"),
    ({"prompt": "one", "stream": 1}, 400, "stream must be true or false"),
    ({"prompt": "one", "stream_options": 1}, 400, "stream_options must be an object"),
    ({"prompt": "one", "logprobs": 5}, 400, "logprobs is not supported"),
    ({"prompt": "one", "echo": True}, 400, "echo is not supported"),
    ({"prompt": "one", "messages": []}, 400, "unknown key: messages"),
    ({"prompt": "one", "model": "gpt-4"}, 404, "this server has only output/step_240"),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_refused_with_a_reason(service: Service, body: Any, status: int, message: str) -> None:
    found, reply = service.ask(body)
    assert (found, reply["error"]["type"]) == (status, "invalid_request_error")
    assert message in reply["error"]["message"]


def test_other_addresses_and_methods(service: Service) -> None:
    assert service.ask({"prompt": "a"}, "/v1/chat/completions")[0] == 404
    assert service.ask(None, "/v1/nothing", "GET")[0] == 404
    assert service.ask(None, "/v1/completions", "GET")[0] == 405
    assert service.ask(None, "/../../etc/passwd", "GET")[0] == 404
    assert service.ask(None, "/", "DELETE")[0] == 501
    assert service.ask({"prompt": "one"}, content_type="text/plain")[0] == 415
    # What a page of another site could make a browser send.
    assert service.ask({"prompt": "one"}, origin="https://evil.example")[0] == 403
    assert service.ask({"prompt": "one"}, origin="null")[0] == 403
    assert service.ask(None, "/v1/models", "GET", host="evil.example")[0] == 403
    assert service.ask(None, "/v1/models", "GET", host=f"localhost:{service.port}")[0] == 200
    assert service.ask(None, "/v1/models", "GET", host="[::1")[0] == 400


def exchange(service: Service, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as client:
        client.sendall(data)
        received = b""
        while more := client.recv(65536):
            received += more
        return received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n", b"411"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", b"411"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"\x00\xff garbage\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
    ],
)  # fmt: skip
def test_what_is_no_request(service: Service, head: bytes, status: bytes) -> None:
    reply = exchange(service, head)
    assert reply.split()[1:2] == [status], reply[:200]
    assert b"Traceback" not in reply


def test_a_client_that_is_gone_ends_its_text(service: Service) -> None:
    body = json.dumps({"prompt": "one", "max_tokens": 13, "n": 16, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as client:
            client.sendall(head.encode() + body)
    assert service.ask({"prompt": "one", "max_tokens": 1})[0] == 200
    assert "Traceback" not in service.log()


def test_a_body_that_is_cut_off(service: Service) -> None:
    """Complete JSON in fewer bytes than the header says: the client may have meant more."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as client:
        client.sendall(head + b'Content-Length: 200\r\n\r\n{"prompt": "one", "max_tokens": 1}')
        client.shutdown(socket.SHUT_WR)
        reply = client.makefile("rb").read()
    assert reply.split()[1] == b"400"
    assert b"ended after 34 of 200 bytes" in reply


def test_many_requests_at_once(service: Service) -> None:
    """Each gets its text, or is told that too many wait; none hangs."""
    statuses: list[tuple[int, str]] = []

    def ask() -> None:
        status, found = service.ask({"prompt": "one two th", "max_tokens": 6})
        statuses.append((status, found["choices"][0]["text"] if status == 200 else ""))

    threads = [threading.Thread(target=ask) for _ in range(25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(statuses) == 25
    assert set(statuses) <= {(200, "ree fo"), (429, "")}
    assert (200, "ree fo") in statuses


def test_idle_connections_do_not_lock_others_out(service: Service) -> None:
    idle = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(40)]
    try:
        time.sleep(0.3)
        assert b" 503 " in exchange(service, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    finally:
        for client in idle:
            client.close()
    deadline = time.monotonic() + 30
    while b" 200 " not in exchange(service, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_control_characters_do_not_reach_the_terminal(service: Service) -> None:
    exchange(service, b"GET /\x1b[31mred HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "\x1b" not in service.log()


def test_a_token(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    service = Service(tmp_path, "--host", "0.0.0.0", "--token-file", "token")
    try:
        for wrong in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": TOKEN},
            {"authorization": f"Basic {TOKEN}"},
        ):
            status, reply = service.ask({"prompt": "one"}, **wrong)
            assert (status, "token" in reply["error"]["message"]) == (401, True)
            assert service.ask(None, "/v1/models", "GET", **wrong)[0] == 401
        right = f"Bearer {TOKEN}"
        assert service.ask({"prompt": "one", "max_tokens": 2}, authorization=right)[0] == 200
        assert service.ask(None, "/v1/models", "GET", authorization=right, host="gpu-box:80")[0] == 200
        assert service.raw(None, "/", "GET")[0] == 200  # the page asks for the token
        assert TOKEN not in service.log()
    finally:
        assert service.stop() == 0


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--host", "0.0.0.0"], {}, "--host 0.0.0.0 lets other machines use this model: a token is needed"),
        (["--host", "::"], {}, "a token is needed"),
        (["--host", "gpu-box"], {}, "a token is needed"),
        (["--host", "0.0.0.0"], {"GPTCTL_SERVE_TOKEN": "short"}, "the token in GPTCTL_SERVE_TOKEN must have at least 16"),
        (["--token-file", "nothing"], {}, "cannot read nothing"),
        (["--token-file", "open"], {}, "open: others can read this token"),
        (["--token-file", "empty"], {}, "the token in empty must have at least 16"),
        (["--port", "99999"], {}, "--port 99999"),
        (["--port", "http"], {}, "argument --port: invalid int value"),
        (["--timeout", "0"], {}, "--timeout 0"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(tmp_path: Path, flags: list[str], environ: dict[str, str], message: str) -> None:
    trained(tmp_path)
    for name, text, mode in (("open", TOKEN, 0o644), ("empty", "\n", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    ended = task("serve", tmp_path, "output", *flags, **environ)
    assert ended.codes == [2]
    assert message in ended.err[0]
    assert "Traceback" not in ended.err[0]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    trained(tmp_path)
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        ended = task("serve", tmp_path, "output", "--port", port)
    assert ended.codes == [3]
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in ended.err[0]


def test_long_answers_are_cut_off(tmp_path: Path) -> None:
    trained(tmp_path)
    service = Service(tmp_path, "--timeout", "0.000001", "--greedy")
    try:
        status, found = service.ask({"prompt": "one", "max_tokens": 12})
        assert (status, found["choices"][0]["finish_reason"]) == (200, "length")
        assert found["usage"]["completion_tokens"] == 0
    finally:
        assert service.stop() == 0


def test_two_ranks_serve_what_one_serves(tmp_path: Path) -> None:
    trained(tmp_path)
    service = Service(tmp_path, "--greedy", *layout_flags(mp=2), world=2)
    try:
        for _ in range(2):
            status, found = service.ask({"prompt": ["one two th", "six s"], "max_tokens": 6})
            assert [choice["text"] for choice in found["choices"]] == ["ree fo", "even e"]
            assert status == 200
    finally:
        assert service.stop() == 0
    assert service.ranks.wait().codes == [0, 0]
