"""A job that waits until a file `go` is in its run folder, with a web server in every rank."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = 1_000_000  # bytes of a page: more than any pipe holds
PROGRAM = f"""
import http.server, os, threading, time

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ["RANK"].encode() * {SIZE}
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

def wait():
    while not os.path.exists(os.path.join(os.environ["GPTCTL_RUN_DIR"], "go")):
        time.sleep(0.05)

def even():
    wait()

def odd():
    wait()

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("port", server.server_port, flush=True)
(odd if int(os.environ["RANK"]) % 2 else even)()
print("done", flush=True)
"""
FETCH = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=30).read().decode())"

Run = Callable[..., Any]  # gptctl on the machine of the user


def ports(run: Run, job: str, world: int) -> dict[int, int]:
    """The port of every rank, when all have printed it."""
    deadline = time.monotonic() + 90
    while True:
        done = run("logs", job)
        found = re.findall(r"^\[rank (\d+)\] port (\d+)$", done.stdout, re.MULTILINE)
        if len(found) == world:
            return {int(rank): int(port) for rank, port in found}
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.2)


def check_stacks(run: Run, job: str) -> None:
    """Of two ranks, one waits in `even` and the other in `odd`; the file and the functions are the oracle."""
    done = run("stacks", job)
    assert done.returncode == 0, done.stdout + done.stderr
    frames = re.sub(r":\d+ ", ":N ", done.stdout)
    assert frames == (
        "rank 0:\n  held.py:N in wait\n  held.py:N in even\n  held.py:N in <module>\n"
        "rank 1:\n  held.py:N in wait\n  held.py:N in odd\n  held.py:N in <module>\n"
    )
    (only,) = json.loads(run("stacks", job, "--rank", "1", "--json").stdout)["ranks"]
    assert only["rank"] == 1
    assert [thread["is_main"] for thread in only["threads"]] == [True, False]


def check_forward(start: Run, interrupt: Run, fetch: Callable[[str], str], job: str, port: int) -> None:
    """From the server of rank 1, on node 1, come its own bytes; Ctrl-C ends it."""
    forward = start("forward", job, f"{port}:18321", "--node", "1", stdout=subprocess.PIPE, text=True)
    try:
        assert forward.stdout.readline() == "http://127.0.0.1:18321\n"
        for _ in range(2):
            assert fetch("http://127.0.0.1:18321/") == "1" * SIZE
    finally:
        interrupt(forward, signal.SIGINT)
    assert forward.wait(20) == 130


def release(run: Run, job: str, nodes: int, folders: int = 1) -> list[str]:
    """Ask a shell on every node for the name of its host, then let the job end in each of its folders."""
    asked = [run("shell", job, "--node", str(node), "--", "sh", "-c", "uname -n; exit 5") for node in range(nodes)]
    assert [each.returncode for each in asked] == [5] * nodes, [each.stderr for each in asked]
    for node in range(folders):
        done = run("shell", job, "--node", str(node), "--", "touch", "go")
        assert done.returncode == 0, done.stderr
    return [each.stdout.strip() for each in asked]


def check_terminal(run: Callable[[str], Any], command: str) -> None:
    """A shell on a terminal: `script` is one, and what is typed comes from a pipe."""
    done = run(f"printf 'tty; echo $((40 + 2)); exit 4\\n' | script -qec {shlex.quote(command)} /dev/null")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "/dev/pts/" in done.stdout
    assert "42" in done.stdout.split()


def check_kill(start: Run, kill: Run, count: Callable[[str], int], job: str, port: int) -> None:
    """Whoever kills gptctl leaves nothing on node 1; `count` finds processes there by their words."""
    for words, mark in (
        (["shell", job, "--node", "1", "--", "sleep", "98765"], "sleep 98765"),
        (["forward", job, f"{port}:18322", "--node", "1"], f"engine.pyz relay .* {port}"),
    ):
        process = start(*words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        await_count(count, mark, lambda found: found > 0)
        kill(process, signal.SIGKILL)
        process.wait(20)
        await_count(count, mark, lambda found: found == 0)


def await_count(count: Callable[[str], int], mark: str, holds: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + 40
    while not holds(count(mark)):
        assert time.monotonic() < deadline, f"{count(mark)} processes: {mark}"
        time.sleep(0.2)


def fetch_command(url: str) -> list[str]:
    return [sys.executable, "-c", FETCH, url]
