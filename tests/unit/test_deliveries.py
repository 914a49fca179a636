"""Who sends a message: real processes that compete for one, are killed, and hand it over. Oracles: what arrived at a
real server, and how many senders there were at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.engine import deliveries, notifier
from gptctl.engine.deliveries import (
    DELIVERED,
    ENGINE,
    EXPIRES,
    FAILED,
    GAVE_UP,
    MOST_TRIES,
    SENDING,
    WATCHER,
    Delivery,
    Try,
    is_settled,
    next_try,
)
from gptctl.engine.events import EventLog
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.notifier import Notifier, View
from tests import webhooks
from tests.conftest import ROOT
from tests.unit.test_supervisor import plan_in
from tests.webhooks import Webhook, closed_port, reply, webhook

HOOK = {"kind": "webhook", "url": {"env": "HOOK"}, "on": ["start", "failure", "end"]}


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules with shorter times."""
    monkeypatch.setattr(deliveries, "PAUSES", (0.02,) * 5)
    monkeypatch.setattr(deliveries, "YIELD", 0.05)
    monkeypatch.setattr(notifier, "PATIENCE", 0.2)


def finished_job(folder: Path, state: str = "COMPLETED") -> LaunchPlan:
    folder.mkdir(exist_ok=True)
    log = EventLog(folder)
    log.add("started")
    log.add("end", state=state)
    return plan_in(folder, job_id="j", notify=(HOOK,))


def sender(plan: LaunchPlan, role: str, url: str, said: list[str] | None = None, is_copy: bool = False) -> Notifier:
    view = View(Path(plan.remote_dir), "", role, is_copy)
    made = Notifier(plan, view, {"HOOK": url}, (said if said is not None else []).append)
    made.start()
    return made


def records(folder: Path) -> dict[str, str]:
    files = sorted((folder / "notifications").glob("[a-z]*"))
    return {file.name: json.loads(file.read_text())["state"] for file in files}


# The rules


def tries_of(*words: str, age: float = 100.0) -> list[Try]:
    """`e failed`: a try of the engine that failed."""
    parts = [word.partition(" ") for word in words]
    return [Try(n, ENGINE if who == "e" else WATCHER, state, age) for n, (who, _, state) in enumerate(parts)]


@pytest.mark.parametrize(
    ("tries", "role", "expected"),
    [
        ([], ENGINE, 0),
        (["e delivered"], WATCHER, "settled"),
        (["e failed"], ENGINE, 1),
        (["e failed"], WATCHER, 1),
        (["e gave up"], ENGINE, "settled"),
        (["e gave up"], WATCHER, 1),
        (["e gave up", "w gave up"], WATCHER, "settled"),
        (["e failed", "w gave up"], ENGINE, 2),
        (["e failed"] * MOST_TRIES, ENGINE, "settled"),
        (["e failed"] * MOST_TRIES, WATCHER, MOST_TRIES),
    ],
)
def test_whose_turn_it_is(tries: list[str], role: str, expected: int | str) -> None:
    found = tries_of(*tries)
    assert ("settled" if is_settled(found, role) else next_try(found, role)) == expected


def test_a_running_try_is_waited_for_until_its_sender_is_dead_or_too_slow() -> None:
    (running,) = tries_of("e sending", age=EXPIRES - 1)
    assert next_try([running], WATCHER) is None
    assert next_try([running._replace(age=EXPIRES)], WATCHER) == 1
    assert next_try([running._replace(is_orphaned=True, age=0)], WATCHER) == 1


def test_after_a_failure_others_go_first() -> None:
    (failed,) = tries_of("e failed", age=0.6)
    own = failed._replace(is_own=True)
    assert next_try([failed], WATCHER) == 1
    assert next_try([own], ENGINE) is None
    assert next_try([own._replace(age=2.0)], ENGINE) == 1


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([ENGINE, WATCHER]),
            st.sampled_from(["begin", "ok", "fail", "final", "die"]),
            st.floats(0, 70),
        )
    )
)
def test_at_most_one_sender_and_none_after_an_acknowledgement(steps: list[tuple[str, str, float]]) -> None:
    """Any order of turns, answers and deaths. Oracle: a count kept beside the rules."""
    tries: list[Try] = []
    num_running = 0
    for role, action, passed in steps:
        tries = [each._replace(age=each.age + passed) for each in tries]
        last = tries[-1] if tries else None
        num_running = int(last is not None and last.is_running)
        if action == "begin":
            if not is_settled(tries, role) and (number := next_try(tries, role)) is not None:
                assert num_running == 0
                assert not any(each.state == DELIVERED for each in tries)
                assert number == len(tries)
                tries.append(Try(number, role, SENDING, 0.0))
        elif last and last.state == SENDING and last.role == role:
            states = {"ok": DELIVERED, "fail": FAILED, "final": GAVE_UP, "die": SENDING}
            tries[-1] = last._replace(state=states[action], age=0.0, is_orphaned=action == "die")
    assert len(tries) <= 2 * MOST_TRIES


# Real files and processes


COMPETE = """
import sys, time
from pathlib import Path
from gptctl.engine.deliveries import Delivery, WATCHER
mine = Delivery(Path(sys.argv[1]), "end.0", 0, WATCHER)
while not Path(sys.argv[1], "go").exists():
    pass
print(sum(mine.begin(number) for number in range(50)), flush=True)
time.sleep(60)
"""


def test_of_many_processes_one_gets_each_try(tmp_path: Path) -> None:
    """And it keeps it while it lives; killed, it loses it at once."""
    command = [sys.executable, "-c", COMPETE, str(tmp_path)]
    rivals = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(6)]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    try:
        won = [int(rival.stdout.readline()) for rival in rivals if rival.stdout]
        tries = Delivery(tmp_path, "end.0", 0, WATCHER).tries()
        assert sum(won) == len(tries) == 50
        assert all(each.is_running for each in tries)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    tries = Delivery(tmp_path, "end.0", 0, WATCHER).tries()
    assert all(each.is_orphaned and not each.is_running for each in tries)
    assert not [name for name in os.listdir(tmp_path / "notifications") if name.startswith(".")]


def test_a_try_of_another_machine_expires_by_the_steady_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever looks: the times of files and of machines may be any."""
    monkeypatch.setattr(deliveries, "EXPIRES", 0.3)
    delivery = Delivery(tmp_path, "end.0", 0, ENGINE)
    assert delivery.begin(0)
    file = tmp_path / "notifications" / "end.0.0.0"
    elsewhere = {"role": "engine", "state": "sending", "sender": {"pid": 1, "boot": "another", "host": "node-1"}}
    file.write_text(json.dumps(elsewhere))
    for moment in (0, 2**31):
        os.utime(file, (moment, moment))
        assert delivery.tries()[0].is_running
    time.sleep(0.3)
    assert not delivery.tries()[0].is_running


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"sender": 5, "state": null}', b'{"state": "\x1b[2J"}', b"x" * 100_000]
)
def test_damaged_records_count_as_tries_that_expire(tmp_path: Path, content: bytes) -> None:
    delivery = Delivery(tmp_path, "end.0", 0, ENGINE)
    (tmp_path / "notifications").mkdir()
    (tmp_path / "notifications" / "end.0.0.0").write_bytes(content)
    (found,) = delivery.tries()
    assert next_try([found], WATCHER) == 1


# The engine alone


def test_a_server_that_fails_at_first_gets_the_message_until_it_takes_it(tmp_path: Path, hook: Webhook, quick) -> None:
    """500, a broken connection, a lie, then 200: the same id each time, and nothing more after that."""
    hook.answers = [reply(500), webhooks.reset, reply(200, b'{"ok": false}')]
    plan = finished_job(tmp_path)
    engine = sender(plan, ENGINE, hook.url)
    assert engine.close(10)
    assert sorted(hook.ids) == ["j.end.0"] * hook.ids.count("j.end.0") + ["j.start.0"] * hook.ids.count("j.start.0")
    assert len(hook.ids) == 5
    assert list(records(tmp_path).values()).count("delivered") == 2
    assert sender(plan, ENGINE, hook.url).close(5)
    assert len(hook.ids) == 5


def test_tries_are_bounded_and_the_failure_is_said_once(tmp_path: Path, quick) -> None:
    said: list[str] = []
    assert sender(finished_job(tmp_path), ENGINE, closed_port(), said).close(10)
    assert len(records(tmp_path)) == 2 * MOST_TRIES
    assert sorted(said) == [
        "end: cannot notify webhook at 127.0.0.1: Connection refused",
        "start: cannot notify webhook at 127.0.0.1: Connection refused",
    ]


@pytest.mark.parametrize("url", ["closed", "silent", "none"])
def test_closing_takes_no_longer_than_allowed(tmp_path: Path, hook: Webhook, url: str) -> None:
    """Whatever the server does. What is left is marked, so that a watcher need not wait."""
    hook.answers = [webhooks.silent] * 9
    engine = sender(finished_job(tmp_path), ENGINE, {"closed": closed_port(), "silent": hook.url, "none": ""}[url])
    began = time.monotonic()
    engine.close(0.3)
    assert time.monotonic() - began < 1
    last = {name.rpartition(".")[0]: state for name, state in records(tmp_path).items()}
    assert last == {"start.0.0": "gave up", "end.0.0": "gave up"}


def test_old_news_is_not_told(tmp_path: Path, hook: Webhook) -> None:
    plan = finished_job(tmp_path)
    file = tmp_path / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().split("\n") if line]
    file.write_text("".join(json.dumps({**each, "time": each["time"] - 7200}) + "\n" for each in events))
    assert sender(plan, ENGINE, hook.url).close(5)
    assert hook.ids == []


def test_each_target_has_its_own_events_and_its_own_pace(tmp_path: Path, hook: Webhook) -> None:
    """A silent one does not delay the other."""
    plan = finished_job(tmp_path)
    silent = {"kind": "webhook", "url": {"env": "DEAD"}, "on": ["end"]}
    plan = plan._replace(notify=(silent, {**HOOK, "on": ["end"]}))
    with webhook() as dead:
        dead.answers = [webhooks.silent] * 9
        environment = {"DEAD": dead.url, "HOOK": hook.url}
        engine = Notifier(plan, View(tmp_path, ""), environment, lambda text: None)
        engine.start()
        hook.await_ids("j.end.0", seconds=5)
        engine.close(0)
    assert hook.ids == ["j.end.0"]


def test_a_full_disk_does_not_silence_the_engine(small_disk: Path, hook: Webhook) -> None:
    """It may be why the job failed. Oracle: one message, and no record of it."""
    plan = finished_job(small_disk, "FAILED")
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(filler, b"x" * 4096)
    os.close(filler)
    assert sender(plan, ENGINE, hook.url).close(5)
    assert sorted(hook.ids) == ["j.end.0", "j.start.0"]
    assert records(small_disk) == {}


# The engine and watchers


def test_a_watcher_sends_what_a_node_without_a_way_out_cannot(tmp_path: Path, hook: Webhook, quick) -> None:
    """The address that the engine knows is dead; the watcher has another one under the same name."""
    plan = finished_job(tmp_path)
    engine, watcher = sender(plan, ENGINE, closed_port()), sender(plan, WATCHER, hook.url)
    assert watcher.close(10)
    assert engine.close(10)
    assert sorted(hook.ids) == ["j.end.0", "j.start.0"]
    assert hook.most_at_once <= 2  # one for each message


def test_a_watcher_leaves_it_to_an_engine_that_can_send(tmp_path: Path, hook: Webhook) -> None:
    plan = finished_job(tmp_path)
    senders = [sender(plan, role, hook.url) for role in (WATCHER, WATCHER, ENGINE)]
    assert all(each.close(10) for each in senders)
    assert sorted(hook.ids) == ["j.end.0", "j.start.0"]
    assert {json.loads(file.read_text())["role"] for file in (tmp_path / "notifications").iterdir()} == {"engine"}


ENGINE_PROGRAM = """
import sys, time
from pathlib import Path
from gptctl.engine.notifier import Notifier, View
from gptctl.engine.run_folder import read_plan
folder = Path(sys.argv[1])
Notifier(read_plan(folder), View(folder, ""), {"HOOK": sys.argv[2]}).start()
time.sleep(60)
"""


def await_true(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_engine_that_is_killed_while_it_sends_is_replaced_by_one_watcher(
    tmp_path: Path, hook: Webhook, quick
) -> None:
    """The server got the request and never answered: a repeat has the same id, and there is one. Oracle: acknowledgements."""
    plan = finished_job(tmp_path)._replace(notify=({**HOOK, "on": ["end"]},))
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_json()))
    hook.answers = [webhooks.silent]
    command = [sys.executable, "-c", ENGINE_PROGRAM, str(tmp_path), hook.url]
    engine = subprocess.Popen(command, cwd=ROOT)
    hook.await_ids("j.end.0")
    watchers = [sender(plan, WATCHER, hook.url) for _ in range(3)]
    time.sleep(0.5)
    assert hook.ids == ["j.end.0"]  # while the engine lives, nobody else sends
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    assert all(watcher.close(10) for watcher in watchers)
    assert hook.ids == ["j.end.0"] * 2
    assert list(records(tmp_path).values()) == ["sending", "delivered"]


def test_a_watcher_tells_the_end_that_a_killed_engine_did_not_record(tmp_path: Path, hook: Webhook, quick) -> None:
    plan = finished_job(tmp_path)
    file = tmp_path / "events.jsonl"
    file.write_text(file.read_text().split("\n")[1] + "\n")
    watcher = sender(plan, WATCHER, hook.url)
    watcher.end_as("LOST", "its processes exited without recording a result")
    assert watcher.close(10)
    assert sorted(hook.ids) == ["j.end.0", "j.start.0"]
    end = next(body for body in hook.received if body["event"] == "end")
    assert (end["state"], end["reason"]) == ("LOST", "its processes exited without recording a result")


def test_a_watcher_waits_for_the_record_of_an_end(tmp_path: Path, hook: Webhook, quick) -> None:
    """The engine writes it after the result that the watcher has seen."""
    plan = finished_job(tmp_path)._replace(notify=({**HOOK, "on": ["end"]},))
    file = tmp_path / "events.jsonl"
    whole = file.read_text()
    file.write_text(whole.split("\n")[1] + "\n")
    watcher = sender(plan, WATCHER, hook.url)
    threading.Timer(1.0, lambda: file.write_text(whole)).start()
    assert watcher.close(10)
    assert hook.ids == ["j.end.0"]


def test_with_a_copy_of_the_folder_a_watcher_waits_until_the_engine_has_stopped(
    tmp_path: Path, hook: Webhook, quick
) -> None:
    """As with ssh: the engine cannot see the files of the watcher. Oracle: nothing is sent before the engine gave up."""
    plan = finished_job(tmp_path)._replace(notify=({**HOOK, "on": ["end"]},))
    engines = Delivery(tmp_path, "end.0", 0, ENGINE)
    assert engines.begin(0)
    engines.record(0, FAILED, "Connection refused")
    watcher = sender(plan, WATCHER, hook.url, is_copy=True)
    time.sleep(1.2)
    assert hook.ids == []
    engines.leave(engines.tries(), "the job has ended")
    assert watcher.close(10)
    assert hook.ids == ["j.end.0"]
    assert records(tmp_path) == {"end.0.0.0": "failed", "end.0.0.1": "gave up", "end.0.0.100": "delivered"}
