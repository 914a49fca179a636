"""shell, stacks and forward without a cluster: what is parsed, refused and carried."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptctl.backends import Backend, JobState
from gptctl.engine import relay
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.node_shell import shell_environment
from gptctl.engine.stacks import parse_dump, parse_py_spy
from gptctl.jobs.on_node import collect_stacks, forwarded_ports, require_module, require_node, require_running
from gptctl.jobs.stack_groups import number_ranges, shown
from gptctl.jobs.store import JobRecord
from gptctl.jobs.tunnel import listening_socket
from gptctl.remote.route import Route
from gptctl.remote.ssh_program import ssh_words
from tests.conftest import ROOT
from trainer.errors import UserError


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    facts = {"id": "gpt-1", "name": "gpt", "created": 0.0, "cluster": "x", "kind": "local", "log_dir": ""}
    return JobRecord(**facts, local_dir=str(tmp_path), nodes=2, per_node=4, world=8)


# What may be asked for


@pytest.mark.parametrize(
    "text", ["0", "65536", "-1", "a", "", ":", "80:", ":80", "80:0", "1:2:3", "8 0", "٣٣", "9" * 400]
)
def test_a_port_that_nobody_can_listen_on_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not PORT or PORT:LOCAL") as refused:
        forwarded_ports(text)
    assert refused.value.exit_code == 2


def test_ports() -> None:
    assert forwarded_ports("6006") == (6006, None)
    assert forwarded_ports("6006:16006") == (6006, 16006)


@pytest.mark.parametrize("node", [-1, 2, 10**9])
def test_a_node_that_the_job_does_not_have(record: JobRecord, node: int) -> None:
    with pytest.raises(UserError, match="gpt-1 has nodes 0 to 1"):
        require_node(record, node)


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [("COMPLETED", 1, "not running any more"), ("PENDING", 1, "not started yet"), ("UNKNOWN", 3, "UNKNOWN")],
)
def test_only_for_a_job_that_runs(record: JobRecord, state: str, code: int, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        require_running(record, JobState(state))
    assert refused.value.exit_code == code
    require_running(record, JobState("RUNNING"))


def test_a_removed_job_has_no_logs_to_show(record: JobRecord) -> None:
    record.run_folder.rmdir()
    with pytest.raises(UserError) as refused:
        require_running(record, JobState("COMPLETED", "run folder removed"))
    assert refused.value.hint == "`gptctl list` shows the jobs that run"


def test_the_engine_of_an_older_job_is_not_asked(record: JobRecord) -> None:
    with zipfile.ZipFile(record.run_folder / "engine.pyz", "w") as engine:
        engine.writestr("gptctl/engine/agent.py", "")
    with pytest.raises(UserError, match="submitted by an older gptctl"):
        require_module(record, "stacks")
    require_module(record, "agent")


def test_a_port_in_use_is_named_with_another() -> None:
    with listening_socket(0, 6006) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this machine: address already in use") as refused:
            listening_socket(port, 6006)
        assert refused.value.hint.startswith("choose another one: 6006:LOCAL, such as 6006:")


def test_an_unknown_command_for_a_host_does_nothing(tmp_path: Path) -> None:
    """Older engines took it for `abandon`, which can remove a job."""
    command = [sys.executable, "-m", "gptctl.engine.host_commands", str(tmp_path), "stacks"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])


# Stacks

PROGRAM = """
import sys, threading, time
def inner(): started.wait(); print(*seen, flush=True); time.sleep(60)
def other(): started.set(); time.sleep(60)
started = threading.Event()
seen = __import__("os").environ.get("PYTHONPATH"), getattr(sys, "own", None), sys.path.count(sys.argv[1])
threading.Thread(target=other, daemon=True).start()
inner()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program under rank_log.py, with a sitecustomize of its user."""
    for folder in ("python", "own", "attempt"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "trainer/startup.py", tmp_path / "python/sitecustomize.py")
    (tmp_path / "own/sitecustomize.py").write_text("import sys\nsys.own = 'own'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"GPTCTL_RUN_DIR": str(tmp_path), "GPTCTL_ATTEMPT_DIR": str(tmp_path / "attempt"), "RANK": "3"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "trainer/rank_log.py"), "program.py", str(tmp_path / "python")],
        env={**os.environ, **env, "PYTHONPATH": str(tmp_path / "own")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def test_a_rank_writes_its_stacks_on_request(rank: subprocess.Popen[str], tmp_path: Path) -> None:
    """And sees its own search path, variables and sitecustomize as without us."""
    assert rank.stdout
    assert rank.stdout.readline().split() == [str(tmp_path / "own"), "own", "0"]
    (child,) = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    file = tmp_path / "attempt" / "stacks.3"
    for times in (1, 2):
        os.kill(int(child), signal.SIGURG)
        deadline = time.monotonic() + 10
        while file.read_text().count("in inner") < times or not file.read_text().endswith("in <module>\n"):
            assert time.monotonic() < deadline, file.read_text()
            time.sleep(0.02)
    threads = parse_dump(file.read_text())
    assert [frame[2] for frame in threads[0]["frames"]] == ["inner", "<module>"]
    assert threads[0]["is_main"]
    assert threads[0]["frames"][0][:2] == [str(tmp_path / "program.py"), 3]
    assert "other" in [frame[2] for frame in threads[1]["frames"]]
    os.kill(rank.pid, signal.SIGURG)
    assert rank.poll() is None


def test_py_spy_is_parsed() -> None:
    """A dump in the form that py-spy 0.4 prints with --json."""
    frame = {"name": "f", "filename": "/a.py", "line": 7, "short_filename": None, "module": None, "locals": None}
    dump = [
        {"pid": 5, "thread_id": 9, "thread_name": None, "os_thread_id": 6, "active": True, "frames": []},
        {"pid": 5, "thread_id": 8, "thread_name": "MainThread", "os_thread_id": 5, "active": True, "frames": [frame]},
    ]
    threads = parse_py_spy(json.dumps(dump), 5)
    assert threads[0] == {"name": "MainThread", "is_main": True, "frames": [["/a.py", 7, "f"]]}
    assert threads[1]["name"] == "0x9"


def answer(rank: int, line: int, problem: str = "") -> dict:
    frames = [["/v/lib/python3.11/site-packages/torch/c.py", line, "wait"], ["/runs/x/code/train.py", 120, "step"]]
    threads = [{"name": "MainThread", "is_main": True, "frames": frames}]
    return {"rank": rank, "problem": problem, "threads": [] if problem else threads}


def test_ranks_with_the_same_stack_are_one_group() -> None:
    ranks = [answer(rank, 9) for rank in range(7)] + [answer(7, 8), answer(8, 0, "no answer in 5 s")]
    found = {"ranks": ranks, "missing": [9, 10, 12], "nodes": [{"node": 3, "ranks": [13, 14], "problem": "lost"}]}
    assert shown(found, all_threads=False).splitlines() == [
        "ranks 0-6:",
        "  torch/c.py:9 in wait",
        "  train.py:120 in step",
        "rank 7:",
        "  torch/c.py:8 in wait",
        "  train.py:120 in step",
        "rank 8: no answer in 5 s",
        "node 3 (ranks 13-14): lost",
        "ranks 9-10, 12: not running",
    ]


@given(st.sets(st.integers(0, 200)))
def test_number_ranges_name_every_number(numbers: set[int]) -> None:
    words = [word.split("-") for word in number_ranges(numbers).split(", ") if word]
    assert {number for low, *high in words for number in range(int(low), int((high or [low])[0]) + 1)} == numbers


# The shell


def test_a_shell_has_the_environment_of_the_job_but_is_not_a_rank() -> None:
    plan = _plan()
    ranks = {"PATH": "/conda", "RANK": "0", "TORCHELASTIC_RUN_ID": "x", "GPTCTL_RUN_DIR": "/run", "TERM": "dumb"}
    ranks["PYTHONPATH"] = "/run/python:/mine"
    own = {"PATH": "/bin", "TERM": "xterm", "RANK": "9"}
    assert shell_environment(plan, own, ranks) == {"PATH": "/conda", "PYTHONPATH": "/mine", "TERM": "xterm"}
    assert shell_environment(plan, own, {}) == {"PATH": "/bin", "TERM": "xterm", "A": "1"}
    inside = plan._replace(container=("apptainer", "exec", "x.sif"))
    assert shell_environment(inside, own, ranks)["PATH"] == "/bin"


def _plan() -> LaunchPlan:
    empty = dict.fromkeys(LaunchPlan._fields, "")
    return LaunchPlan(**{**empty, "remote_dir": "/run", "env": {"A": "1"}, "container": ()})  # type: ignore[arg-type]


# The relay


@given(noise=st.binary(max_size=40), sizes=st.lists(st.integers(1, 7)), contents=st.lists(st.binary(max_size=9)))
def test_frames_survive_any_cut(noise: bytes, sizes: list[int], contents: list[bytes]) -> None:
    """Whatever a login shell prints first, and however the bytes arrive."""
    sent = [(number, number % 4, content) for number, content in enumerate(contents)]
    stream = noise.replace(b"\0", b"") + relay.BEGIN + b"".join(relay.frame(*each) for each in sent)
    reader, came, place = relay.FrameReader(), [], 0
    for size in [*sizes, len(stream)]:
        came += reader.feed(stream[place : place + size])
        place += size
    assert came == sent


class Ends:
    """Both ends of a relay, connected by pipes, and a server behind it that sends back what it gets."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        down, up = os.pipe(), os.pipe()
        self.port = self.server.getsockname()[1]
        self.refusals: list[str] = []
        self.here = relay.Relay(up[0], down[1], listener=self.listener, on_refused=self.refusals.append)
        self.there = relay.Relay(down[0], up[1], lambda: relay.connect_here(self.port))
        for end in (self.here, self.there):
            end.begin()
            threading.Thread(target=self._run, args=[end], daemon=True).start()

    def _run(self, end: relay.Relay) -> None:
        while not end.is_over:
            end.step(0.1)

    def serve(self) -> None:
        connection, _ = self.server.accept()
        while data := connection.recv(1 << 16):
            connection.sendall(data)
        connection.close()

    def serve_endlessly(self) -> None:
        connection, _ = self.server.accept()
        with connection, suppress(OSError):
            while True:
                connection.sendall(bytes(1 << 16))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), 10)

    def close(self) -> None:
        self.here.is_over = self.there.is_over = True


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


def test_a_relay_carries_more_than_its_buffers_in_both_directions(ends: Ends) -> None:
    """8 MiB come back unchanged, then the end of the stream: the half-closed connection stays usable."""
    threading.Thread(target=ends.serve, daemon=True).start()
    data, came = os.urandom(8 << 20), bytearray()
    with ends.connect() as client:

        def send() -> None:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        while part := client.recv(1 << 16):
            came += part
    assert bytes(came) == data


def test_a_program_that_does_not_read_stops_only_its_own_connection(ends: Ends) -> None:
    """Endless data for one client that waits: the next one is served. When the first one closes, the sender learns it."""
    threading.Thread(target=ends.serve, daemon=True).start()
    stalled = ends.connect()
    stalled.sendall(b"x")
    assert stalled.recv(1) == b"x"
    endless = threading.Thread(target=ends.serve_endlessly, daemon=True)
    endless.start()
    with ends.connect() as silent:
        deadline = time.monotonic() + 10
        while not any(each.pauses_other for each in list(ends.here._carried.values())):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stalled.sendall(b"y")
        assert stalled.recv(1) == b"y"
        stalled.close()
        assert endless.is_alive()
        silent.recv(1)
    endless.join(10)
    assert not endless.is_alive()


def test_too_many_connections_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    """select() raises an error from descriptor 1024 on."""
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 1)
    with ends.connect() as first:
        first.sendall(b"x")
        connection, _ = ends.server.accept()
        with ends.connect() as second:
            threading.Thread(target=ends.serve, daemon=True).start()
            second.sendall(b"y")
            assert connection.recv(1) == b"x"
            assert len(ends.here._carried) == 1
            first.close()
            connection.close()
            assert second.recv(1) == b"y"


def test_a_refused_connection_is_closed_and_explained(ends: Ends) -> None:
    ends.server.close()
    with ends.connect() as client:
        assert client.recv(1) == b""
    assert ends.refusals == ["Connection refused"]


# ssh


def settings_of(words: list[str]) -> dict[str, str]:
    """What ssh itself makes of these words: `ssh -G` prints it."""
    place = words.index("--")
    options = [word for word in words[1:place] if word not in ("-t", "-T")]
    if "-W" in options:
        del options[options.index("-W") : options.index("-W") + 2]
    done = subprocess.run(
        ["ssh", "-G", "-F", "none", *options, words[place + 1]], capture_output=True, text=True, check=True
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.skipif(not shutil.which("ssh"), reason="ssh is not installed")
def test_ssh_reads_the_route_as_it_is_meant(tmp_path: Path) -> None:
    """Oracle: ssh's own parser, for hosts behind two bastions and files with blanks and %."""
    first = Route("b1", "10.0.0.1", 22, "me", (), (f"{tmp_path}/known hosts",))
    second = Route("b2", "10.0.0.2", 2222, "me", (f"{tmp_path}/k%y",), (f"{tmp_path}/known hosts",))
    route = Route("gpu", "10.0.0.3", 23, "you", (f"{tmp_path}/a key",), (f"{tmp_path}/k%h",), (first, second))
    words = ssh_words(route, ["echo", "a b", "$(x)"], has_terminal=False)
    assert words[-1] == "echo 'a b' '$(x)'"
    found = settings_of(words)
    assert [found[name] for name in ("hostname", "port", "user", "batchmode")] == ["10.0.0.3", "23", "you", "yes"]
    assert found["identityfile"].strip('"') == f"{tmp_path}/a key"
    assert found["userknownhostsfile"].strip('"') == f"{tmp_path}/k%h"
    through = shlex.split(found["proxycommand"].replace("%%", "%"))
    assert through[-4:] == ["-W", "10.0.0.3:23", "--", "b2"]
    assert settings_of(through)["hostname"] == "10.0.0.2"
    assert settings_of(through)["identityfile"].strip('"') == f"{tmp_path}/k%%y"
    last = shlex.split(settings_of(through)["proxycommand"].replace("%%", "%"))
    assert settings_of(last)["hostname"] == "10.0.0.1"
    assert "proxycommand" not in settings_of(last)


class DeadNode(Backend):
    """Node 0 answers for its two ranks, one of which has ended; node 1 does not."""

    def node_command(self, record: JobRecord, node: int, words: Sequence[str], has_terminal: bool) -> list[str]:
        assert list(words) == ["stacks", str(node)]
        ranks = {"ranks": [{"rank": 0, "node": 0, "pid": 7, "host": "a", "source": "", "problem": "", "threads": []}]}
        script = ["echo 'Welcome to a'; echo \"$0\"", json.dumps(ranks)]
        return ["bash", "-c", *(script if node == 0 else ["echo 'ssh: no route' >&2; echo '{\"ranks\": 1}'"])]


def test_what_is_not_known_of_a_rank_is_not_said(record: JobRecord) -> None:
    """Rank 1 does not run; whether ranks 2 and 3 do, only their node knows."""
    found = collect_stacks(DeadNode(print), record._replace(per_node=2, world=4), None)
    assert [each["rank"] for each in found["ranks"]] == [0]
    assert found["missing"] == [1]
    assert found["nodes"] == [{"node": 1, "ranks": [2, 3], "problem": "ssh: no route"}]
