"""The messages about a job, and the files that they are made from. Oracles: histories of events as the engine writes
them, and the limits of the services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.engine.events import EventLog
from gptctl.engine.job_story import JobStory
from gptctl.engine.notifications import JobFacts, News, duration, ended_as, message_about, news_in
from tests.conftest import save_checkpoint
from tests.unit.test_supervisor import plan_in

JOB = JobFacts("gpt-3f9a2c", "a800", 2, 8, True, 120, 1000, 3.21987, 100)


def history(*events: str | tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Events ten seconds apart; the attempt counts up with each `attempt`."""
    found, attempt = [], -1
    for number, event in enumerate(events):
        name, facts = (event, {}) if isinstance(event, str) else event
        attempt += name == "attempt"
        found.append({"event": name, "attempt": max(0, attempt), "time": 1000.0 + 10 * number, **facts})
    return found


FAILURE = ("failure", {"state": "FAILED", "reason": "rank 3: CUDA out of memory"})


def told(*events: str | tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(news.name, news.state) for news in news_in(history(*events))]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (("started", "attempt", ("end", {"state": "COMPLETED"})), [("start.0", ""), ("end.0", "COMPLETED")]),
        # A failure that ends the job is told once, as its end.
        (("started", "attempt", FAILURE, ("end", {"state": "FAILED"})), [("start.0", ""), ("end.0", "FAILED")]),
        (
            ("started", "attempt", FAILURE, "attempt", ("end", {"state": "COMPLETED"})),
            [("start.0", ""), ("failure.0", "RESTARTED"), ("end.0", "COMPLETED")],
        ),
        # Requeued: no end, and it starts again.
        (
            ("started", "attempt", FAILURE, "requeue", ("end", {"state": None}), "started", "attempt", ("end", {"state": "COMPLETED"})),
            [("start.0", ""), ("failure.0", "REQUEUED"), ("start.1", ""), ("end.1", "COMPLETED")],
        ),
        # Preempted or at its time limit: Slurm ends it, and the engine cannot know more.
        (("started", "attempt", "signal", ("end", {"state": None})), [("start.0", ""), ("end.0", "STOPPING")]),
        # It never started.
        ((("end", {"state": "CANCELLED"}),), [("end.0", "CANCELLED")]),
        (("started", ("end", {"state": "<script>"}), ("end", {"state": 5})), [("start.0", "")]),
    ],
)  # fmt: skip
def test_what_is_told(events: tuple[Any, ...], expected: list[tuple[str, str]]) -> None:
    assert told(*events) == expected


def test_a_bad_end_is_a_failure_and_a_good_one_is_not() -> None:
    ends = {state: News("end", 0, 1.0, state) for state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")}
    assert [state for state, news in ends.items() if news.is_told(["failure"])] == ["FAILED", "TIMEOUT", "CANCELLED"]
    assert all(news.is_told(["end"]) and not news.is_told(["start"]) for news in ends.values())


def test_a_message_says_what_happened_and_what_to_type() -> None:
    """Whole texts: they are read on a phone."""
    start, failure, end = news_in(
        history("started", "attempt", FAILURE, "attempt", ("end", {"state": "FAILED", "reason": "rank 3: NaN"}))
    )
    assert message_about(start, JOB).text.splitlines() == [
        "gptctl: gpt-3f9a2c has started",
        "on cluster a800: 2 nodes × 8",
        "next: gptctl logs gpt-3f9a2c --follow",
        "id: gpt-3f9a2c.start.0",
    ]
    assert message_about(failure, JOB).text.splitlines() == [
        "gptctl: gpt-3f9a2c failed in attempt 0, and starts again",
        "reason: rank 3: CUDA out of memory",
        "step 120 of 1,000, loss 3.2199; newest checkpoint: step 100",
        "next: gptctl logs gpt-3f9a2c --failed",
        "id: gpt-3f9a2c.failure.0",
    ]
    assert message_about(end, JOB).text.splitlines() == [
        "gptctl: gpt-3f9a2c FAILED after 40 s",
        "reason: rank 3: NaN",
        "step 120 of 1,000, loss 3.2199; newest checkpoint: step 100",
        "next: gptctl logs gpt-3f9a2c --failed",
        "next: gptctl resume gpt-3f9a2c",
        "id: gpt-3f9a2c.end.0",
    ]
    done = message_about(News("end", 0, 1.0, "COMPLETED", seconds=7380), JOB._replace(step=1000)).text
    assert done.splitlines()[:3] == [
        "gptctl: gpt-3f9a2c COMPLETED after 2 h 03 min",
        "step 1,000 of 1,000, loss 3.2199",
        "next: gptctl logs gpt-3f9a2c --metrics",
    ]


@settings(max_examples=60)
@given(st.text(max_size=40).map(lambda text: 30 * text), st.text(max_size=50), st.floats(allow_nan=True))
def test_texts_are_plain_and_bounded(reason: str, state: str, loss: float) -> None:
    """Whatever a failed program wrote. Oracle: WeCom's 2,048 bytes, and str.isprintable of every line."""
    events = history("started", "attempt", ("end", {"state": "FAILED", "reason": reason}))
    for news in [*news_in(events), ended_as([], state, reason, 5.0)]:
        message = message_about(news, JOB._replace(loss=loss))
        assert len(message.text.encode()) < 2048
        lines = message.text.split("\n")
        assert all(line.isprintable() for line in lines[1:])
        assert len(lines) <= 7
        assert message.id == f"gpt-3f9a2c.{news.name}"


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none(), max_size=1)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from(["event", "attempt", "time", "state", "reason"]), values | st.sampled_from(
    ["started", "attempt", "failure", "requeue", "end", "FAILED"]))))  # fmt: skip
def test_damaged_events_raise_nothing(events: list[dict[str, Any]]) -> None:
    for news in news_in(events):
        assert message_about(news, JOB).text.startswith("gptctl: gpt-3f9a2c ")


def test_durations() -> None:
    times = (0, 59.9, 60, 3599, 3600, 86399, 90000)
    assert [duration(time) for time in times] == [
        "0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "23 h 59 min", "1 d 1 h",
    ]  # fmt: skip


def test_a_clock_that_is_set_does_not_change_a_duration() -> None:
    """By an hour, in the middle of the job. On another machine there is no other clock."""
    start = {"event": "started", "attempt": 0, "time": 9000.0, "clock": 50.0, "host": "a"}
    end = {"event": "end", "attempt": 0, "time": 5400.0, "clock": 62.0, "host": "a", "state": "FAILED"}
    assert news_in([start, end])[1].seconds == 12.0
    assert news_in([start, {**end, "host": "b", "time": 9030.0}])[1].seconds == 30.0
    assert news_in([start, {**end, "clock": "x"}])[1].seconds == 0.0


class Run:
    """The folder of a job of the bundled trainer, and its story."""

    def __init__(self, folder: Path, output: str = "output") -> None:
        self.output = folder / "output"
        self.output.mkdir()
        output_dir = str(self.output) if output else ""
        self.plan = plan_in(folder, job_id="gpt-1", cluster="local", output_dir=output_dir)
        self.log, self.story = EventLog(folder), JobStory(folder, self.plan, output_dir)

    def train(self, **event: Any) -> None:
        with open(self.output / "events.jsonl", "a") as stream:
            stream.write(json.dumps(event) + "\n")


def test_the_first_step_comes_from_the_events_of_the_trainer(tmp_path: Path) -> None:
    """Of this job, and of each attempt once. The file may be shared with other jobs of a chain, and half written."""
    run = Run(tmp_path)
    run.train(event="first step", time=5.0, job="gpt-0", attempt=0)
    assert run.story.news() == []
    run.log.add("started")
    began = run.story.news()[0].time
    for moment in (began + 34, began + 35):
        run.train(event="first step", time=moment, job="gpt-1", attempt=0)
    with open(run.output / "events.jsonl", "a") as stream:
        stream.write('{"event": "first step", "time": ')
    names = [news.name for news in run.story.news()]
    assert names == ["start.0", "first_step.0"]
    assert run.story.news()[1].seconds == pytest.approx(34)
    assert "has completed its first step" in message_about(run.story.news()[1], run.story.facts()).text


def test_of_a_script_it_is_told_that_its_ranks_are_up(tmp_path: Path) -> None:
    run = Run(tmp_path, output="")
    run.log.add("started")
    (tmp_path / "attempt-0").mkdir()
    assert [news.name for news in run.story.news()] == ["start.0"]
    began = run.story.news()[0].time
    (tmp_path / "attempt-0" / "ranks.0.jsonl").write_text(json.dumps({"event": "start", "time": began + 2}) + "\n")
    assert [news.name for news in run.story.news()] == ["start.0", "first_step.0"]
    assert "ranks are up" in message_about(run.story.news()[1], run.story.facts()).text


def test_the_facts_come_from_metrics_config_and_checkpoints(tmp_path: Path) -> None:
    """The newest row of this job counts, not that of the next one, nor a record of something else."""
    run = Run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"resolved": {"Engine": {"max_steps": 500}}}))
    assert run.story.facts()[5:] == (None, 500, None, None)
    rows = [{"step": 10, "loss": 3.5, "job": "gpt-1"}, {"resumed_from": 5}, {"step": 99, "loss": 1.0, "job": "gpt-2"}]
    (run.output / "metrics.jsonl").write_text("garbage\n" + "".join(json.dumps(row) + "\n" for row in rows))
    save_checkpoint(run.output, 8)
    assert run.story.facts()[5:] == (10, 500, 3.5, 8)


def test_a_job_that_fails_again_and_again_does_not_flood_a_phone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.log.add("started")
    for attempt in range(1001):
        run.log.attempt = attempt
        run.log.add("attempt")
        run.log.add("failure", state="FAILED", reason="x")
    run.log.add("end", state="FAILED")
    names = [news.name for news in run.story.news()]
    assert len(names) == 22  # the start, twenty failures, and the end
    assert names[-1] == "end.0"


def test_huge_files_of_garbage_are_read_in_bounds(tmp_path: Path) -> None:
    """A sparse gigabyte. Oracle: the clock, and the events that follow it."""
    run = Run(tmp_path)
    for file in (tmp_path / "events.jsonl", run.output / "metrics.jsonl", run.output / "events.jsonl"):
        with open(file, "wb") as stream:
            stream.truncate(1 << 30)
            stream.seek(1 << 30)
            stream.write(b"\n")
    run.log.add("started")
    assert [news.name for news in run.story.news()] == ["start.0"]
    assert run.story.facts().step is None
