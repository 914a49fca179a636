"""Following a job on a real terminal (a pty), at several widths, and beside it through a pipe.

A script plays torchrun and the ranks: it writes the logs and records of a job as a training would, and waits where the
test wants to look. Everything else is real: submit, supervisor, run folder, follow. The oracle is what the script wrote
and, for the screen, a model of a terminal (`tests/terminal.py`) that refuses sequences it does not know.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest

from tests.terminal import GPTCTL, Run
from tests.unit.test_logs_terminal import REPORT, STOPPED
from trainer.logline import TrainLine, evaluation_line, prefixed

WIDTHS = (40, 80, 120)
CONFIG_LINES = 104
SAMPLE = ["def learn(self):", "", "    return [1;31mred"]  # a bare bracket is text, not a sequence

# Runs once per node, instead of `python -m torch.distributed.run …`.
STAGE = """
import json, os, sys, time
from pathlib import Path

folder, node, attempt = Path(sys.argv[1]), int(os.environ["GPTCTL_NODE"]), int(os.environ["GPTCTL_ATTEMPT"])
ranks = [2 * node, 2 * node + 1]

def append(path, text):
    with open(path, "a") as stream:
        stream.write(text + "\\n")

def log(rank, text):
    append(f"{os.environ['GPTCTL_LOG_DIR']}/workerlog.{rank}", text)

def note(event, rank, **facts):
    who = {"rank": rank, "node": node, "host": "stage", "pid": 1, "time": time.time()}
    append(f"{os.environ['GPTCTL_ATTEMPT_DIR']}/ranks.{node}.jsonl", json.dumps({"event": event, **who, **facts}))

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

def start(*ranks):
    for rank in ranks:
        note("start", rank)

def end(*ranks, exit=0, signal=None):
    for rank in ranks:
        note("end", rank, exit=None if signal else exit, signal=signal)

lines = json.loads((folder / "lines.json").read_text())
"""

TRAINING = """
if node == 1:
    wait_for("second node")
    for rank in ranks:
        log(rank, lines["detail"].replace("RANK", str(rank)))
start(*ranks)
wait_for("first step")
if node == 1:
    wait_for("end")
else:
    for line in lines["begin"]:
        log(0, line)
    wait_for("end")
    for line in lines["rest"]:
        log(0, line)
end(*ranks)
"""


def stamped(text: str, level: str = "INFO") -> str:
    return prefixed(text, level, datetime(2026, 11, 16, 4, 25, 43), coloured=False)


def train(step: int, cost: float = 0.5) -> str:
    return stamped(str(TrainLine(step, 0, step - 1, 4 - step / 100, 0.1, cost, 1 / cost, 12345, 3086, 2.5e-4)))


def lines_of_training() -> dict[str, object]:
    config = [f"  Section.key_{number:<33} {number}" for number in range(CONFIG_LINES)]
    begin = [
        *(stamped("Resolved config:"), *config),
        stamped("rank 0: mp 1 on cpu"),
        stamped("Training: 100 steps of 48 samples; data: 1,000 samples"),
        stamped("the valid split is small", "WARNING"),
        *(train(25), train(50)),
    ]
    rest = [
        *(train(75), train(100)),
        stamped(evaluation_line("valid", 100, 0, 4, 1.9375, 8.0)),
        stamped("Sample text after 'class A:\\n':"),
        *(stamped(line) for line in SAMPLE),
        stamped("The training process is complete."),
    ]
    detail, stop = stamped("rank RANK: mp 1 on cpu"), [*REPORT[:3], STOPPED]
    return {"begin": begin, "rest": rest, "detail": detail, "report": REPORT, "stop": stop}


class Play:
    """A job whose ranks follow a script."""

    def __init__(self, jobs, script: str, *arguments: str) -> None:
        self.jobs, self.folder = jobs, jobs.folder
        (self.folder / "play.py").write_text(STAGE + script)
        (self.folder / "lines.json").write_text(json.dumps(lines_of_training()))
        (self.folder / "play").write_text(f"#!/bin/sh\nexec {sys.executable} -S {self.folder}/play.py {self.folder}\n")
        (self.folder / "play").chmod(0o755)
        (self.folder / "play.yaml").write_text(f"kind: local\npython: {self.folder}/play\nrun_root: ./runs\n")
        if "--" not in arguments:
            jobs.gptctl("init")
        shape = ("--nodes", "2", "--gpus-per-node", "2", "-o", "Engine.max_steps=100")
        self.id = jobs.submit("--cluster", "./play.yaml", *shape, *arguments)
        self.runs: list[Run] = []

    def cue(self, name: str) -> None:
        (self.folder / name).touch()

    def run(self, *arguments: str, columns: int = 80) -> Run:
        self.runs.append(Run(GPTCTL, *arguments, cwd=self.folder, columns=columns))
        assert self.runs[-1].finish() == 0
        return self.runs[-1]

    def follow(self, *arguments: str, columns: int = 80, **env: str) -> Run:
        command = (GPTCTL, "logs", self.id, "--follow", *arguments)
        self.runs.append(Run(*command, cwd=self.folder, columns=columns, **env))
        return self.runs[-1]


@pytest.fixture
def play(jobs) -> Iterator[Callable[..., Play]]:
    plays: list[Play] = []

    def begin(script: str, *arguments: str) -> Play:
        plays.append(Play(jobs, script, *arguments))
        return plays[-1]

    yield begin
    for one in plays:
        for run in one.runs:
            run.child.kill()
            run.child.wait()


def bottom_lines(run: Run) -> list[str]:
    """Everything that was drawn in place, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", run.text)
    return re.findall(r"\r([^\r\n]*)\x1b\[J\r", text)


def test_a_training_on_terminals_and_through_a_pipe(play) -> None:
    """Oracles: the lines that the script wrote, each of them shown, shortened or counted; the width of each window."""
    job = play(TRAINING)
    terminals = {columns: job.follow(columns=columns) for columns in WIDTHS}
    plain, dumb = job.follow(NO_COLOR="1"), job.follow(TERM="dumb")
    piped_command = [GPTCTL, "logs", job.id, "--follow"]
    env = {"HOME": str(job.folder / "home"), "PATH": "/usr/bin:/bin"}
    piped = subprocess.Popen(piped_command, cwd=job.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    everyone = [*terminals.values(), plain, dumb]
    for cue, status in (
        ("second node", "2 of 4 ranks are up"),
        ("first step", "4 of 4 ranks are up; waiting for the"),
        ("end", "step   50/100"),
    ):
        for run in everyone:
            run.read_until(status)
        if cue == "end":
            for run in [*terminals.values(), plain]:
                run.read_until(" 50% ")
        job.cue(cue)
    assert [run.finish() for run in everyone] == [0] * 5
    for columns, run in terminals.items():
        assert max(map(len, bottom_lines(run))) < columns
    for run in [*terminals.values(), plain]:
        check_in_place(run)
    for run in everyone:
        check_screen(run, job)
    assert "\x1b[32m━" in terminals[80].text
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][;m]", plain.text)
    assert "\x1b" not in dumb.text
    assert not re.search(r"\r(?!\n)", dumb.text)
    assert [line for line in dumb.screen() if "ranks are up" in line] == [
        "2 of 4 ranks are up",
        "4 of 4 ranks are up; waiting for the first step",
    ]
    check_pipe(*piped.communicate(timeout=20), job)


def check_in_place(run: Run) -> None:
    bars = [line for line in bottom_lines(run) if "%" in line]
    assert any(re.fullmatch(r" 50% ━+─+ (step 50/100  )?\d:\d\d(, | elapsed  )0:2\d left", bar) for bar in bars)
    assert not any("ranks are up" in line or "%" in line for line in run.screen())


def check_screen(run: Run, job: Play) -> None:
    """What is left on the screen. Lines wider than the window are joined again."""
    shown = "\n".join(run.screen())
    flat = shown.replace("\n", "")
    hidden = f"… {CONFIG_LINES} config lines and 3 rank lines hidden: gptctl logs {job.id} --raw"
    assert flat.index(hidden) < flat.index("step   25/100")
    assert "mp 1 on cpu" not in flat
    assert "Section.key" not in shown
    assert "[rank 0] 04:25:43 WARNING: the valid split is small" in flat
    for step in (25, 50, 75, 100):
        assert f"step  {step:>3}/100  loss {4 - step / 100:.4f}   12,345 tokens/s  lr 2.50e-04" in flat
    assert "valid 100/100  loss 1.9375" in shown
    sample = shown[shown.index("─ Sample text ") : shown.index("[rank 0] 04:25:43 The training")]
    assert [line.strip("│ ") for line in sample.splitlines()[1:-1]] == [
        *("after 'class A:\\n':", ""),
        *(line.strip() for line in SAMPLE),
    ]
    summary = " ".join(line.strip("│ ") for line in shown[shown.rindex(f"─ {job.id} ") :].splitlines())
    for text in ("COMPLETED", "loss 3.0000, valid 1.9375", "12,345 tokens/s", "100 of 100"):
        assert re.search(rf"\s+{re.escape(text)}".replace("\\ ", r"\s+"), summary), text
    for command in ("--metrics", "show", "rerun", "-o"):
        assert command in summary
    assert all(len(line) <= run.columns for line in run.screen())


def check_pipe(out: bytes, errors: bytes, job: Play) -> None:
    logs = job.jobs.run_dir(job.id) / "logs" / "attempt-0"
    written = [
        f"[rank {rank}] {line}" for rank in (0, 2, 3) for line in (logs / f"workerlog.{rank}").read_text().splitlines()
    ]
    assert sorted(out.decode().splitlines()) == sorted(written)
    assert errors.decode() == f"{job.id}: COMPLETED\n"


def test_pipes_with_a_person_at_stderr_get_the_count_of_ranks_there(play) -> None:
    """Oracle: the count changes twice; stdout has the log lines only."""
    job = play(TRAINING)
    command = f"{GPTCTL} logs {job.id} --follow > out; exit ${{PIPESTATUS[0]}}"
    job.runs.append(run := Run("bash", "-c", command, cwd=job.folder))
    run.read_until("2 of 4 ranks are up")
    job.cue("second node")
    run.read_until("waiting for the first step")
    job.cue("first step")
    job.cue("end")
    assert run.finish() == 0
    expected = ["2 of 4 ranks are up", "4 of 4 ranks are up; waiting for the first step", f"{job.id}: COMPLETED", ""]
    assert [line for line in run.screen() if line != "starting …"] == expected
    assert "\x1b" not in run.text
    assert "ranks are up" not in (job.folder / "out").read_text()


FAILING = """
start(*ranks)
log(ranks[0], "words" if attempt == 0 else "more words")
if node == 1:
    wait_for(f"attempt {attempt}")
    end(3, signal=9)
    end(2, exit=1)
    print(*lines["report"], sep="\\n", flush=True)
    sys.exit(1)
wait_for(f"attempt {attempt}")
end(*ranks, exit=3)
sys.exit(1)
"""


def test_a_job_that_fails_twice(play) -> None:
    """Oracle: rank 3 was killed, in both attempts; the exit code is the job's."""
    job = play(FAILING, "--max-restarts", "1", "--", "x.py")
    run = job.follow("--all-attempts")
    run.read_until("words")
    job.cue("attempt 0")
    run.read_until("more words")
    run.read_until("attempt 1: 4 of 4 ranks are up")
    job.cue("attempt 1")
    assert run.finish() == 1
    shown = "\n".join(run.screen())
    assert "attempt 0: rank 3 failed first: SIGKILL; attempt 1 starts" in shown
    hidden = f"… {len(REPORT)} lines of torchrun's report hidden: gptctl logs {job.id} --raw"
    assert run.screen().count(hidden) == 2
    assert shown.index(hidden) < shown.index("attempt 1 starts")
    summary = shown[shown.rindex(f"─ {job.id} ") :]
    assert re.search(r"state +FAILED: ", summary)
    assert re.search(r"failure +attempt 1: rank 3 failed first: SIGKILL", summary)
    assert f"gptctl logs {job.id} --failed" in summary
    assert re.search(r"duration .* in 2 attempts", summary)


QUIET = """
start(*ranks)
log(ranks[0], "no step here")
wait_for("end")
end(*ranks)
"""


def test_a_script_that_logs_no_steps_and_a_window_that_gets_narrower(play) -> None:
    """Oracle: no word about steps or losses; after the change every line in place fits the new width."""
    job = play(QUIET, "--", "x.py")
    run = job.follow(columns=120)
    run.read_until("4 of 4 ranks are up")
    before = len(run.shown)
    run.resize(20)
    run.read_until("4 of 4 ranks are up\x1b[J")  # the time does not fit
    assert run.shown.index(b"4 of 4 ranks are up\x1b[J") >= before
    run.resize(120)
    job.cue("end")
    assert run.finish() == 0
    shown = "\n".join(run.screen())
    assert "[rank 0] no step here" in shown
    assert "COMPLETED" in shown
    assert "first step" not in run.text
    assert not re.search(r"\bloss\b|tokens/s|checkpoints", shown)
    assert f"gptctl logs {job.id}" in shown


def test_ctrl_c_leaves_the_job_running_and_the_terminal_clean(play) -> None:
    """Oracle: the modes of the terminal before and after, and `gptctl status`."""
    job = play(TRAINING)
    for cue in ("second node", "first step"):
        job.cue(cue)
    run = job.follow()
    before = termios.tcgetattr(run.terminal)
    run.read_until(" 50% ")
    run.press(b"\x03")
    assert run.finish() == 130
    assert termios.tcgetattr(run.terminal) == before
    assert not any("%" in line or "\x1b" in line for line in run.screen())
    assert f"gptctl logs {job.id} -f" in "".join(run.screen())
    assert "\x1b[?25l" not in run.text
    assert job.jobs.status(job.id)["state"] == "RUNNING"
    job.cue("end")
    assert job.jobs.wait(job.id) == "COMPLETED"


@pytest.mark.parametrize("arguments", [["--grep", "global step"], ["--raw"]])
def test_who_asks_for_lines_gets_them_as_they_are(play, arguments: list[str]) -> None:
    """Oracle: the train lines that were written."""
    job = play(TRAINING)
    for cue in ("second node", "first step", "end"):
        job.cue(cue)
    run = job.follow(*arguments, columns=400)
    assert run.finish() == 0
    assert all(train(step) in run.text for step in (25, 50, 75, 100))
    assert ("Section.key_103" in run.text) == (arguments == ["--raw"])


def test_a_terminal_gets_the_logs_of_a_finished_job_without_the_config_dump(play) -> None:
    """Oracle: the lines that were written, as they are; a pipe, `--raw` and `--grep` get all of them."""
    job = play(TRAINING)
    for cue in ("second node", "first step", "end"):
        job.cue(cue)
    assert job.jobs.wait(job.id) == "COMPLETED"
    path = f"runs/{job.id}/logs/attempt-0/workerlog.0"
    written = (job.folder / path).read_text().splitlines()
    for name in (job.id, path):
        shown = job.run("logs", name, columns=400).screen()
        hidden = f"… {CONFIG_LINES} config lines hidden: gptctl logs {name} --raw"
        prefix = "[rank 0] " if name == job.id else ""  # a single file needs none
        own = [line for line in shown if line and (line.startswith(prefix) or line == hidden)]
        assert own == [hidden, *(f"{prefix}{line}".rstrip() for line in written[CONFIG_LINES + 1 :])]
        for arguments in (["--raw"], ["--grep", "Section"]):
            assert "Section.key_103" in job.run("logs", name, *arguments, columns=400).text
        assert job.jobs.gptctl("logs", name).stdout.count("Section.key") == CONFIG_LINES


def test_following_a_finished_job_shows_how_long_it_took(play) -> None:
    """Oracle: its duration in the summary; the job seems to have ended an hour before it is followed."""
    job = play(TRAINING)
    for cue in ("second node", "first step", "end"):
        job.cue(cue)
    assert job.jobs.wait(job.id) == "COMPLETED"
    folder = job.jobs.run_dir(job.id)
    for file in folder.glob("attempt-0/ranks.*.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**event, "time": event["time"] - 3600}) + "\n" for event in events))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "ended": result["ended"] - 3600}))
    run = job.follow()
    assert run.finish() == 0
    bars = [line for line in bottom_lines(run) if "elapsed" in line]
    assert bars
    assert not [bar for bar in bars if not re.search(r" 0:\d\d elapsed", bar)]


STOPPING = """
start(*ranks)
log(ranks[0], "words")
import signal
signal.signal(signal.SIGTERM, lambda *_: (print(*lines["stop"], sep="\\n", flush=True), sys.exit(143)))
while True:
    time.sleep(0.05)
"""


def test_a_cancelled_job_shows_no_traceback_of_torchrun(play) -> None:
    """Oracle: the four lines that torchrun prints when it is stopped, counted on each node."""
    job = play(STOPPING, "--", "x.py")
    run = job.follow()
    run.read_until("4 of 4 ranks are up")
    job.jobs.gptctl("cancel", job.id)
    assert run.finish() != 0
    assert run.screen().count(f"… 4 lines of torchrun's report hidden: gptctl logs {job.id} --raw") == 2
    assert "Traceback" not in run.text
    assert "SignalException" not in run.text
