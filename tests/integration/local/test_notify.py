"""Messages about real jobs on the local cluster. Oracles: what arrived at a real server, what is in files and in /proc,
and how long the job took by its own record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import webhooks
from tests.integration.local.conftest import Jobs
from tests.webhooks import Webhook, closed_port, reply, webhook

TOKEN = "Tk0123456789abcdef"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def seconds_of(jobs: Jobs, job: str) -> float:
    """From the start of the job to its result, by its own records."""
    lines = (jobs.run_dir(job) / "events.jsonl").read_text().split("\n")
    started = next(json.loads(line)["time"] for line in lines if '"started"' in line)
    return json.loads((jobs.run_dir(job) / "result.json").read_text())["ended"] - started


def delivered(jobs: Jobs, job: str) -> list[str]:
    files = [file for file in (jobs.run_dir(job) / "notifications").glob("[a-z]*") if ".part" not in file.name]
    return [file.name.rsplit(".", 2)[0] for file in files if '"delivered"' in file.read_text()]


def test_a_job_that_restarts_tells_each_event_once(jobs: Jobs, hook: Webhook) -> None:
    """One server answers with errors at first. The URL with its token is in no file, log or command line."""
    hook.answers = [reply(500), webhooks.reset]
    script = jobs.folder / "quick"
    script.write_text('#!/bin/sh\ncat /proc/[0-9]*/cmdline > "$0.ps" 2> /dev/null\n[ "$GPTCTL_ATTEMPT" = 1 ]\n')
    url = f"{hook.url}/{TOKEN}"
    job = jobs.quick("--max-restarts", "1", "-o", "Launch.notify.env=HOOK", HOOK=url)
    assert jobs.ended(job) == ["COMPLETED"]
    deadline = time.monotonic() + 20
    while sorted(delivered(jobs, job)) != ["end.0", "failure.0", "start.0"]:
        assert time.monotonic() < deadline, hook.ids
        time.sleep(0.05)
    assert len(hook.ids) == 5  # two of them were not acknowledged
    assert {*hook.ids} == {f"{job}.{news}" for news in ("start.0", "failure.0", "end.0")}
    events = {body["event"]: body for body in hook.received}
    assert events["failure"]["reason"] == "node 0: exit code 1"
    assert events["end"]["state"] == "COMPLETED"
    assert hook.paths == [f"/hook/{TOKEN}"] * 5
    assert TOKEN.encode() not in (jobs.folder / "quick.ps").read_bytes()
    found = subprocess.run(["grep", "-rl", TOKEN, str(jobs.folder)], capture_output=True, text=True)
    assert found.stdout == ""


def test_dead_webhooks_do_not_touch_the_job(jobs: Jobs, hook: Webhook) -> None:
    """One is silent, one refuses, one is not set. Its result and duration are those of a job without them, and the
    command returns as soon."""
    hook.answers = [webhooks.silent] * 20
    notify = f"Launch.notify=[{hook.url}, {closed_port()}, {{env: UNSET}}]"
    began = time.monotonic()
    words = ("--cluster", "./quick.yaml", "-o", notify, "--wait", "--json", "--", "x.py")
    answer = jobs.gptctl("submit", *words, QUICK_CODE="3")
    took = time.monotonic() - began
    assert answer.returncode == 1
    facts = json.loads(answer.stdout)
    assert facts["state"] == "FAILED"
    # One try lasts up to 10 seconds, and there are several.
    assert seconds_of(jobs, facts["job"]) < 5
    assert took < 10
    assert "warning: S033" in answer.stderr
    # `cancel`, `rm` and others find a job that is over, although its engine may still send.
    assert jobs.gptctl("rm", facts["job"], "--yes").returncode == 0


@pytest.mark.long
def test_a_watcher_tells_the_end_of_a_job_whose_engine_was_killed(jobs: Jobs, hook: Webhook) -> None:
    """Exactly once, although two commands watch, and with the same id as the engine's."""
    (jobs.folder / "quick").write_text(f"#!/bin/sh\nwhile [ ! -e {jobs.folder}/go ]; do sleep 0.05; done\n")
    job = jobs.quick("-o", "Launch.notify.env=HOOK", HOOK=hook.url)
    hook.await_ids(f"{job}.start.0")
    gptctl = str(Path(sys.executable).with_name("gptctl"))
    env = {**os.environ, "HOME": str(jobs.folder / "home"), "HOOK": hook.url}
    commands = (["wait", job], ["logs", job, "--follow"])
    watchers = [
        subprocess.Popen([gptctl, *words], cwd=jobs.folder, env=env, stderr=subprocess.PIPE) for words in commands
    ]
    time.sleep(1)
    claim = json.loads((jobs.run_dir(job) / "claim.json").read_text())
    os.kill(claim["pid"], signal.SIGKILL)
    (jobs.folder / "go").touch()
    for watcher in watchers:
        watcher.communicate(timeout=40)
    assert sorted(hook.ids) == [f"{job}.end.0", f"{job}.start.0"]


def test_the_verb_shows_what_each_server_answered(jobs: Jobs, hook: Webhook) -> None:
    """Exit code 1 if one did not take the message. The config may be invalid elsewhere."""
    (jobs.folder / "run.yaml").write_text(
        "Model: {hidden_size: -5}\nLaunch:\n  notify:\n"
        f"  - {{url: {{env: HOOK}}, kind: feishu}}\n  - {hook.url}\n  - {{env: UNSET}}\n"
    )
    hook.answers = [reply(200, b'{"code": 19001, "msg": "param invalid"}')] * 2
    answer = jobs.gptctl("notify", "test", "run.yaml", HOOK=f"{hook.url}/{TOKEN}")
    assert answer.returncode == 1
    assert 'feishu at 127.0.0.1   failed  HTTP 200: {"code": 19001' in answer.stdout.replace("     ", "  ")
    assert "target 3" in answer.stdout
    assert "the variable UNSET is not set, or empty" in answer.stdout
    assert TOKEN not in answer.stdout + answer.stderr
    assert {body.get("msg_type", "webhook") for body in hook.received} == {"text", "webhook"}
    good = jobs.gptctl("notify", "test", "--json", GPTCTL_NOTIFY=hook.url)
    assert good.returncode == 0
    assert json.loads(good.stdout) == [
        {"target": "webhook at 127.0.0.1", "delivered": True, "answer": 'HTTP 200: {"ok": true}'}
    ]
    nobody = jobs.gptctl("notify", "test")
    assert (nobody.returncode, "nobody would be told" in nobody.stderr) == (2, True)
    wrong = jobs.gptctl("notify", "test", "-o", "Launch.notify=htps//x")
    assert (wrong.returncode, "C014" in wrong.stderr) == (1, True)


@pytest.mark.long
def test_apprise_sends_what_gptctl_cannot(jobs: Jobs, hook: Webhook) -> None:
    """In a process of its own, from the engine's Python. Oracle: the JSON that apprise's own `json://` service posts."""
    pytest.importorskip("apprise")
    url = hook.url.replace("http://", "json://")
    answer = jobs.gptctl("notify", "test", "--json", GPTCTL_NOTIFY=url)
    assert json.loads(answer.stdout) == [{"target": "apprise (json)", "delivered": True, "answer": "apprise: sent"}]
    unknown = jobs.gptctl("notify", "test", "--json", GPTCTL_NOTIFY="nosuch://x")
    assert json.loads(unknown.stdout)[0]["answer"] == "apprise does not know this kind of URL"


@pytest.mark.long
def test_the_engine_uses_apprise(jobs: Jobs, hook: Webhook) -> None:
    pytest.importorskip("apprise")
    url = hook.url.replace("http://", "json://")
    job = jobs.quick("-o", "Launch.notify.on=end", "-o", "Launch.notify.env=HOOK", HOOK=url)
    deadline = time.monotonic() + 20
    while not hook.received:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert hook.received[0]["title"] == f"gptctl: {job} COMPLETED"
    assert f"id: {job}.end.0" in hook.received[0]["message"]


@pytest.mark.long
def test_a_dead_webhook_does_not_delay_cancel(jobs: Jobs, hook: Webhook) -> None:
    """`cancel` waits for the engine. Oracle: the clock, compared with the 10 seconds of one try."""
    hook.answers = [webhooks.silent] * 20
    (jobs.folder / "quick").write_text("#!/bin/sh\nsleep 60\n")
    job = jobs.quick("-o", f"Launch.notify={hook.url}")
    hook.await_ids(f"{job}.start.0")
    began = time.monotonic()
    assert jobs.gptctl("cancel", job, "--now").returncode == 0
    assert time.monotonic() - began < 8
    assert jobs.ended(job) == ["CANCELLED"]
