"""`gptctl top` of a job on ssh hosts. Oracles: what the job prints, and what was done to its host."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path

import pytest

from tests.integration.ssh.desk import Desk, await_true
from tests.terminal import FullScreen


@pytest.mark.long
def test_lines_of_a_host_arrive_and_keys_answer_without_it(desk: Desk) -> None:
    Path(desk.folder, "talk.py").write_text(
        "import time\nfor i in range(600):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n"
    )
    asked = ["submit", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", "--json", "--", "talk.py"]
    job = json.loads(desk.run(*asked).stdout)["job"]
    desk.wait(job, "RUNNING")
    desk.env["TERM"] = "xterm-256color"
    screen = FullScreen(partial(desk.start, "top", job))
    await_true(lambda: "log of rank 0" in screen.text, 30, lambda: screen.text)
    await_true(lambda: "line 2" in screen.text, 30, lambda: screen.text)
    seen = max(int(number) for number in re.findall(r"line (\d+)", screen.text))
    await_true(lambda: f"line {seen + 30} " in screen.text, 30, lambda: screen.text[-3000:])
    shown = json.loads(desk.run("top", "--json").stdout)
    assert [(each["job"], each["state"]) for each in shown["jobs"]] == [(job, "RUNNING")]
    desk.lab.cut("ssh1")
    try:
        time.sleep(3)
        began = time.monotonic()
        screen.press(b"?")
        await_true(lambda: "show and hide this help" in screen.text, 5, lambda: screen.text[-3000:])
        screen.press(b"xq")
        assert screen.process.wait(5) == 0
        assert time.monotonic() - began < 5
    finally:
        desk.lab.restore("ssh1")
        desk.run("cancel", "--now", job)
