"""What torchrun's Python does first. Oracles: the kernel's table of listening sockets, and /proc."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

from tests.conftest import ROOT
from trainer.startup import _bind_store, _listening_socket


def listening(port: int) -> list[str]:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "0100007F"), ("localhost", "0" * 32)])
def test_the_store_listens_on_the_address_of_the_job(host: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is left to torch: that of a host is often a loopback address. The store works in both cases."""
    monkeypatch.setattr(static, "TCPStore", static.TCPStore)  # restored after the test
    _bind_store()
    port = free_port()
    parameters = RendezvousParameters("static", f"{host}:{port}", "run", 1, 1, rank=0)
    store = static.create_rdzv_handler(parameters).next_rendezvous().store
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening(port) == [expected]


@pytest.mark.parametrize("host", ["192.0.2.1", "node-1", "127.0.0.1"])
def test_torch_listens_where_we_cannot(host: str) -> None:
    """An address of another machine, a name, and a port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert _listening_socket(host, taken.getsockname()[1]) is None


@pytest.mark.parametrize(("error", "takes_apart"), [("ChildFailedError", False), ("ValueError", True)])
def test_torchrun_exits_at_once_after_its_report(tmp_path: Path, error: str, takes_apart: bool) -> None:
    """Without what Python does at its end, which takes long with torch; other programs end as they always do."""
    shutil.copyfile(ROOT / "trainer/startup.py", tmp_path / "sitecustomize.py")
    program = f"import atexit; atexit.register(print, 'apart'); print('said'); ChildFailedError = type('ChildFailedError', (Exception,), {{}}); raise {error}('boom')"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == ("said\napart\n" if takes_apart else "said\n")
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith(f"{error}: boom\n")


def test_torchrun_exits_with_the_script_that_started_it(tmp_path: Path) -> None:
    """The script is killed, so it can neither wait for torchrun nor end it."""
    shutil.copyfile(ROOT / "trainer/startup.py", tmp_path / "sitecustomize.py")
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    words = ["bash", "-c", '"$0" -c "$1" & wait', sys.executable, program]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as script:
        assert script.stdout
        process = Path("/proc", script.stdout.readline().decode().strip())
        assert process.exists()
        script.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists()
