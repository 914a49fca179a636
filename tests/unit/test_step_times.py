"""Where the time of a step goes. Oracle: times that the tests choose. Events of a GPU are made up: there is none here."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import step_times
from trainer.step_times import OPTIMIZER, STEP, WAIT, DeviceSpans, HostSpans, Shares, measured


class Device:
    """A stream whose clock the test moves; what it has recorded is complete only when it says so."""

    def __init__(self) -> None:
        self.now, self.is_done = 0.0, False

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.now

            def query(self) -> bool:
                return device.is_done

            def elapsed_time(self, end: Any) -> float:
                return end.at - self.at

        return Event()


def test_a_device_is_read_only_when_its_step_is_complete() -> None:
    device = Device()
    spans = DeviceSpans(device.event)
    spans.begin_step(True)
    step = spans.begin()
    for kind, length in ((WAIT, 2.0), (OPTIMIZER, 1.0), (WAIT, 1.0)):
        with measured(spans, kind):
            device.now += length
    device.now += 6.0
    spans.end(STEP, step)
    assert spans.shares() == Shares()
    device.is_done = True
    assert spans.shares() == Shares(wait=0.3, optimizer=0.1)
    spans.reset()
    spans.begin_step(False)
    assert spans.begin() is None, "a step that is not logged records nothing"
    assert spans.shares() == Shares(wait=0.3, optimizer=0.1), "until another step is measured"


def test_a_host_adds_up_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 10.0, 20.0])
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: next(times))
    spans = HostSpans()
    step = spans.begin()  # 0
    with measured(spans, WAIT):  # 1 to 3
        pass
    with measured(spans, OPTIMIZER):  # 4 to 10
        pass
    spans.end(STEP, step)  # 20
    assert spans.shares() == Shares(wait=0.1, optimizer=0.3)
    spans.reset()
    assert spans.shares() == Shares()
