"""Trackers without a training: the processes are real, and so are the packages unless a test needs a bad one."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests import tracked
from trainer.config import Override, load
from trainer.errors import UserError
from trainer.trackers import PACKAGES, missing_packages, processes
from trainer.trackers.processes import Trackers
from trainer.trackers.tensorboard import TensorBoard
from trainer.trackers.tracked_run import TrackedRun

CONFIG = {"Global": {"seed": 1, "device": "cpu"}, "Data": {"split": [949, 50, 1]}}
# What a step measured: numbers that float32 cannot represent exactly, and an integer.
RECORDS = [
    {"step": step, "max_steps": 9, "loss": 3 / step, "lr": 1e-4 / step, "memory": 2**30 + step, "mfu": None}
    for step in range(1, 10)
]


class Lines:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(f"info {text}")

    def warn(self, text: str) -> None:
        self.lines.append(f"warning {text}")


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive_in(group: int) -> list[str]:
    """Processes of a group that have not ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, _, rest = file.read_text().partition(" ")
            state, _, number = rest.rpartition(") ")[2].split()[:3]
            found += [pid] * (int(number) == group and state != "Z")
    return found


def a_run(folder: Path, step: int = 0, resumed: str = "") -> TrackedRun:
    return TrackedRun("gpt-3f9a2c", step, folder, resumed, CONFIG)


def floats32(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, float(np.float32(value))) for step, value in values]


def losses(*steps: int) -> list[tuple[int, float]]:
    return [(step, 3 / step) for step in steps]


@pytest.fixture
def bad_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package of this text in the place of wandb."""

    def replace(text: str) -> None:
        folder = tmp_path / "packages"
        folder.mkdir()
        (folder / "wandb.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.syspath_prepend(str(folder))

    return replace


class Web:
    """A proxy for all of the web. At an address of its own: other tests connect to any port of 127.0.0.1, and a client that
    keeps trying to reach a server of the past would count as a call."""

    def __init__(self) -> None:
        host = f"127.{random.randint(16, 254)}.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self._server = socket.create_server((host, 0))
        self._server.setblocking(False)
        self.url = f"http://{host}:{self._server.getsockname()[1]}"

    def calls(self) -> list[str]:
        """The first line that each caller sent, who still waits for an answer or is gone."""
        lines = []
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._server.accept()
                with connection:
                    connection.settimeout(5)
                    lines.append(connection.recv(4096).decode(errors="replace").partition("\r\n")[0])
        return lines

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch):
    """A proxy that nobody may connect to. Settings of the user are not seen."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SWANLAB_", "MLFLOW_", "PYTEST_", "CI"))]:
        monkeypatch.delenv(name)
    proxy = Web()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for spelled in (name, name.upper()):
            monkeypatch.setenv(spelled, proxy.url)
    for spelled in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(spelled, raising=False)
    yield proxy
    proxy.close()


def test_offline_trackers_have_each_record(tmp_path: Path, monkeypatch, web) -> None:
    """Oracles: the records; readers of each format that are not the writers; and a proxy that is never called."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(processes, "FLUSH_SECONDS", processes.ORPHAN_SECONDS)  # for a busy machine
    log = Lines()
    trackers = Trackers(("wandb", "swanlab", "mlflow"), a_run(tmp_path), log)
    for record in RECORDS:
        trackers.record(record)
    trackers.record({"step": 9, "valid_loss": 2.5})
    trackers.record({"resumed_from": 9})  # not a record of a step
    trackers.close(0)
    assert [line.split()[:3] for line in sorted(log.lines)] == [
        ["info", "tracker", f"{name}:"] for name in ("mlflow", "swanlab", "wandb")
    ]
    (wandb_file,) = tmp_path.glob("wandb/offline-run-*-gpt-3f9a2c/run-gpt-3f9a2c.wandb")
    (swanlab_file,) = tmp_path.glob("swanlog/run-*/run-*.swanlab")
    run, wandb_curves = tracked.wandb_log(wandb_file)
    start, swanlab_curves = tracked.swanlab_log(swanlab_file)
    parameters, mlflow_curves = tracked.mlflow_files(tmp_path / "mlruns")
    expected = {name: [(r["step"], r[name]) for r in RECORDS] for name in ("loss", "lr", "memory")} | {
        "valid_loss": [(9, 2.5)]
    }
    assert wandb_curves == mlflow_curves == expected
    assert {name: floats32(curve) for name, curve in swanlab_curves.items()} == {
        n: floats32(c) for n, c in expected.items()
    }
    assert (run.run_id, run.project, start.id, start.project) == ("gpt-3f9a2c", "gptctl") * 2
    assert {item.key: item.value_json for item in run.config.update}["Data"] == '{"split":[949,50,1]}'
    assert "seed: 1" in (swanlab_file.parent / "files" / "config.yaml").read_text()
    assert parameters == {"Global.seed": "1", "Global.device": "cpu", "Data.split": "[949, 50, 1]"}
    assert web.calls() == []


IN_A_POD = """
import builtins, io, os
TOKEN, real_exists, real_open = "/var/run/secrets/kubernetes.io/serviceaccount/token", os.path.exists, builtins.open
os.path.exists = lambda path: path == TOKEN or real_exists(path)
builtins.open = lambda path, *rest, **more: io.StringIO("token") if path == TOKEN else real_open(path, *rest, **more)
import ssl
ssl.create_default_context = lambda **more: None
"""


def test_offline_wandb_asks_no_kubernetes(tmp_path: Path, monkeypatch, web) -> None:
    """In a pod, wandb sends the pod's own token to find out its image. Made-up: the token, which only root could place.
    Oracles: the proxy, which sees the request of wandb's own function."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "sitecustomize.py").write_text(IN_A_POD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    for name, value in (("SERVICE_HOST", "10.0.0.1"), ("PORT_443_TCP_PORT", "443")):
        monkeypatch.setenv(f"KUBERNETES_{name}", value)
    monkeypatch.setenv("HOSTNAME", "pod")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asking = "from wandb import util; util.image_id_from_k8s()"
    with subprocess.Popen([sys.executable, "-c", asking]) as process:
        calls: list[str] = []
        eventually(lambda: bool(calls.extend(web.calls()) or calls))
        process.wait(10)
    assert [call.split()[:2] for call in calls] == [["CONNECT", "10.0.0.1:443"]]
    log = Lines()
    trackers = Trackers(("wandb",), a_run(tmp_path), log)
    trackers.record(RECORDS[0])
    trackers.close(0)
    assert [line.split()[:3] for line in log.lines] == [["info", "tracker", "wandb:"]]
    assert web.calls() == []


@pytest.mark.long
def test_offline_trackers_continue(tmp_path: Path, web) -> None:
    """Killed at step 9, resumed at step 6 by the next job. All files name one run, which services join."""
    for first, last in ((0, 9), (6, 9)):
        trackers = Trackers(("wandb", "swanlab", "mlflow"), a_run(tmp_path, first), Lines())
        for record in RECORDS[first:last]:
            trackers.record(record)
        trackers.close(0)
        time.sleep(1)  # wandb names its folders by seconds
    wandb_files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    swanlab_files = sorted(tmp_path.glob("swanlog/run-*/*.swanlab"))
    parts = [losses(*range(1, 10)), losses(7, 8, 9)]
    for files, read in ((wandb_files, tracked.wandb_log), (swanlab_files, tracked.swanlab_log)):
        read_back = [read(file) for file in files]
        assert {getattr(run, "run_id", "") or run.id for run, _ in read_back} == {"gpt-3f9a2c"}
        assert [floats32(curves["loss"]) for _, curves in read_back] == [floats32(part) for part in parts]
    _, curves = tracked.mlflow_files(tmp_path / "mlruns")  # one run, found again by its tag
    assert curves["loss"] == parts[0] + parts[1]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the process of a tracker: tensorboardX would import it, for nothing."""
    monkeypatch.setitem(sys.modules, "torch", None)


def test_tensorboard_shows_one_curve(tmp_path: Path, no_torch) -> None:
    """Killed, restarted with a clock that is behind, and resumed by another job elsewhere. Oracle: TensorBoard's reader."""
    log, second = Lines(), tmp_path / "second"
    trackers = Trackers(("tensorboard",), a_run(tmp_path), log)
    for record in RECORDS[:7]:
        trackers.record(record)
    (process,) = trackers._processes
    eventually(lambda: process.tell(log) or bool(log.lines))
    os.kill(process._process.pid, signal.SIGTERM)  # Slurm sends it to all processes of a job
    trackers.close(0)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.rename(file.with_name("events.out.tfevents.9999999990.far"))
    for folder, step, last, resumed in ((tmp_path, 4, 8, ""), (second, 6, 9, str(tmp_path / "step_6"))):
        folder.mkdir(exist_ok=True)
        board = TensorBoard(a_run(folder, step, resumed))
        for record in RECORDS[step:last]:
            board.log(record["step"], {"loss": 3 / record["step"] + step}, 1e9 + record["step"])
        board.finish(0)
    assert (tmp_path / "tensorboard" / f"events.out.tfevents.9999999991.{socket.gethostname()}").exists()
    whole = [(step, 3 / step + 4 * (step > 4)) for step in range(1, 9)]
    assert tracked.event_curves(tmp_path / "tensorboard")["loss"] == floats32(whole)
    continued = [*whole[:6], *((step, 3 / step + 6) for step in (7, 8, 9))]
    assert tracked.event_curves(second / "tensorboard")["loss"] == floats32(continued)
    assert log.lines == [f"info tracker tensorboard: {tmp_path}/tensorboard"]


def test_tensorboard_has_the_config_once(tmp_path: Path, no_torch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (0, 3):
        TensorBoard(a_run(tmp_path, step)).finish(0)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Tensors("config/text_summary")
    assert "| `Data.split` | `[949, 50, 1]` |" in event.tensor_proto.string_val[0].decode()


def test_a_full_disk_loses_only_what_did_not_fit(tmp_path: Path, no_torch) -> None:
    """A limit of the file's size in the place of a full disk: the kernel also writes a part, then refuses."""
    board = TensorBoard(a_run(tmp_path))
    (file,) = (tmp_path / "tensorboard").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        board.log(1, {"loss": 3.0}, 1e9)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                board.log(step, {"loss": 3 / step}, 1e9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    board.log(4, {"loss": 0.75}, 1e9)
    board.finish(0)
    assert tracked.event_curves(tmp_path / "tensorboard") == {"loss": [(1, 3.0), (4, 0.75)]}


def test_earlier_curves_are_copied_only_from_files(tmp_path: Path, no_torch) -> None:
    """A FIFO with such a name would block, and a link may lead anywhere."""
    (tmp_path / "first" / "tensorboard").mkdir(parents=True)
    os.mkfifo(tmp_path / "first" / "tensorboard" / "events.out.tfevents.1.x")
    with pytest.raises(OSError, match="regular"):
        TensorBoard(a_run(tmp_path / "second", 3, str(tmp_path / "first")))


BAD = {
    "raise RuntimeError('no key abcdefghij or klmnopqrst\\x1b[31m')": "tracker wandb is off: no key … or …?[31m",
    "raise SystemExit(3)": "tracker wandb is off: 3",
    "import os; os.kill(os.getpid(), 9)": "",
}


@pytest.mark.parametrize(("text", "expected"), BAD.items())
def test_a_package_that_fails(tmp_path: Path, bad_package, monkeypatch, text: str, expected: str) -> None:
    """The oracle is the other tracker: it has all records. What is said has no secret and no control sequence."""
    monkeypatch.setenv("WANDB_API_KEY", "abcdefghij")
    monkeypatch.setenv("hub_passwd", "klmnopqrst")  # named as `secret_names.py` knows it
    bad_package(f"print('noise'); {text}")
    # Python runs this in every process, before anything of ours.
    (tmp_path / "packages" / "sitecustomize.py").write_text("print('noise'); print([])")
    log = Lines()
    trackers = Trackers(("wandb", "tensorboard"), a_run(tmp_path), log)
    for record in RECORDS:
        trackers.record(record)
    trackers.close(0)
    warned = [line.removeprefix("warning ") for line in log.lines if line.startswith("warning")]
    assert warned == [expected or "tracker wandb ended unexpectedly (signal 9): see trackers.log"]
    assert tracked.event_curves(tmp_path / "tensorboard")["loss"] == floats32(losses(*range(1, 10)))
    assert "noise" in (tmp_path / "trackers.log").read_text() or not expected


FAILS_ONCE = """
class Run:
    dir, offline = "/x/files", True
    def log(self, values, step):
        if step in (3, 4):
            raise RuntimeError("refused")
        open("logged", "a").write(f"{step} ")
    def finish(self, exit_code):
        open("logged", "a").write(f"code {exit_code}")
def init(**more):
    return Run()
Settings = dict
"""


def test_records_that_fail_are_counted_and_told_once(tmp_path: Path, bad_package, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad_package(FAILS_ONCE)
    log = Lines()
    trackers = Trackers(("wandb",), a_run(tmp_path), log)
    for record in RECORDS:
        trackers.record(record)
    trackers.close(1)
    assert log.lines[1:] == [
        "warning tracker wandb cannot record step 3: refused",
        "warning tracker wandb lost 2 records; metrics.jsonl has them",
    ]
    assert (tmp_path / "logged").read_text() == "1 2 5 6 7 8 9 code 1"


@pytest.mark.parametrize("seconds", [None, 0])
def test_a_tracker_that_hangs_neither_slows_nor_holds_up(tmp_path: Path, bad_package, monkeypatch, seconds) -> None:
    """Records are dropped when its queue is full, and at the end nobody waits longer than was agreed. After a failure
    of the run nobody waits at all: the tracker has its time for itself."""
    bad_package("import subprocess, time; subprocess.Popen(['sleep', '977']); time.sleep(977)")
    monkeypatch.setattr(processes, "FLUSH_SECONDS", 0.2)
    log = Lines()
    trackers = Trackers(("wandb",), a_run(tmp_path), log)
    (process,) = trackers._processes
    spent = []
    for step in range(1, 30_001):
        began = time.perf_counter()
        trackers.record({"step": step, "loss": 1.0, "lr": 2.0})
        spent.append(time.perf_counter() - began)
    assert np.median(spent) < 1e-3
    began = time.perf_counter()
    trackers.close(0, seconds)
    assert time.perf_counter() - began < 3
    dropped, *late = log.lines
    assert f"tracker wandb is too slow: {process.dropped} of 30000 records were dropped" in dropped
    assert 10_000 < process.dropped < 29_900  # a megabyte is queued
    assert [line.partition(" seconds:")[0] for line in late] == ["warning tracker wandb did not finish within 0.2"] * (
        seconds is None
    )
    if seconds is not None:
        assert alive_in(process._process.pid)
        process.kill()
    eventually(lambda: not alive_in(process._process.pid))  # nor is anything left that it had started


@pytest.mark.long
def test_a_hanging_tracker_ends_with_its_rank(tmp_path: Path, bad_package) -> None:
    """The rank is killed: nobody else would end the tracker. Oracle: its exit code, some time after."""
    bad_package("import time; time.sleep(977)")
    first = processes._line({**a_run(tmp_path)._asdict(), "folder": str(tmp_path)})
    process = subprocess.Popen([sys.executable, "-m", "trainer.trackers", "wandb"], stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(first)
    process.stdin.close()
    assert process.wait(processes.ORPHAN_SECONDS + 20) == 1


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(PACKAGES, "tensorboard", "no_such_package")
    assert missing_packages(["tensorboard", "mlflow"]) == ["tensorboard"]
    log = Lines()
    trackers = Trackers(("tensorboard",), a_run(tmp_path), log)
    trackers.record(RECORDS[0])
    trackers.close(0)
    message = "warning tracker tensorboard is off: no_such_package is not installed: pip install 'gptctl[track]'"
    assert log.lines == [message]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[tensorboard]", ("tensorboard",)),
        ("tensorboard,wandb", ("tensorboard", "wandb")),
        ("[MLflow, tensorboardX, mlflow]", ("mlflow", "tensorboard")),
        ("[]", ()),
        ("", ()),
    ],
)
def test_names_of_trackers(written: str, expected: tuple[str, ...]) -> None:
    run = load(None, [Override.parse(f"Engine.trackers={written}")]).run
    assert run.Engine.trackers == expected


def test_unknown_trackers_are_refused_together() -> None:
    with pytest.raises(UserError) as refused:
        load(None, [Override.parse("Engine.trackers=[tensorbord, wandb, comet]")])
    shown = [f"{finding}; {finding.hint}" for finding in refused.value.findings]
    assert len(shown) == 2
    assert "unknown value tensorbord; use tensorboard, wandb, swanlab or mlflow" in shown[0]
    assert "comet" in shown[1]
