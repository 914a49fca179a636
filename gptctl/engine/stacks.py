"""Print the Python stacks of the ranks on this machine: engine.pyz stacks RUN_DIR NODE [RANK]

Nothing is stopped. Where py-spy is installed, it reads the stacks. Otherwise each rank gets SIGURG
and writes them to its own file: see `trainer/startup.py`. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptctl.engine.file_reading import LARGEST, load_value, read_tail
from gptctl.engine.processes import PROC, send
from gptctl.engine.ranks_here import LiveRank, environment_of, live_ranks
from gptctl.engine.run_folder import RunFolder

ANSWER_TIMEOUT = 5.0  # seconds
POLL = 0.1  # seconds; a dump that has not grown for so long is complete
HEADER = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
NO_FILE = "its Python has not started, or was started without gptctl's sitecustomize"

Thread = dict[str, Any]  # name, is_main, frames: [file, line, function], the innermost first


def parse_dump(text: str) -> list[Thread]:
    """Parse what faulthandler wrote. It lists the main thread, which is the oldest, last."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if header := HEADER.fullmatch(line):
            threads.append({"name": header[1], "is_main": False, "frames": []})
        elif threads and (frame := FRAME.fullmatch(line)):
            number = int(frame[2]) if frame[2].isdecimal() else 0
            threads[-1]["frames"].append([frame[1], number, frame[3]])
    if threads:
        threads[-1] |= {"name": "MainThread", "is_main": True}
    return threads[::-1]


def parse_py_spy(text: str, pid: int) -> list[Thread]:
    """Parse the output of `py-spy dump --json`."""
    threads = [
        {
            "name": thread["thread_name"] or hex(thread["thread_id"]),
            "is_main": thread.get("os_thread_id") == pid or thread["thread_name"] == "MainThread",
            "frames": [[each["filename"], each["line"], each["name"]] for each in thread["frames"]],
        }
        for thread in load_value(text)
    ]
    return sorted(threads, key=lambda thread: not thread["is_main"])


def by_py_spy(ranks: Sequence[LiveRank]) -> dict[int, list[Thread]]:
    """The stacks of the ranks that py-spy can read; none where it is missing or not permitted."""
    import subprocess

    started = []
    for found in ranks:
        if program := _py_spy(found.pid):
            command = [program, "dump", "--json", "--pid", str(found.pid)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            started.append((found, process))
    stacks = {}
    deadline = time.monotonic() + ANSWER_TIMEOUT
    for found, process in started:
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            stacks[found.rank] = parse_py_spy(output, found.pid)
        # Such as a kernel that does not let users trace their own processes.
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            process.kill()
            process.wait()
    return stacks


def _py_spy(pid: int) -> str | None:
    from shutil import which

    # Often it is in the environment of the ranks only.
    return which("py-spy", path=environment_of(pid).get("PATH")) or which("py-spy")


def by_signal(folder: Path, ranks: Sequence[LiveRank]) -> dict[int, list[Thread]]:
    """Ask all ranks at once; return the stacks of those that answer in time."""
    files = {found: folder / f"stacks.{found.rank}" for found in ranks}
    # Each dump is appended to those before it.
    starts = {found: file.stat().st_size for found, file in files.items() if file.exists()}
    for found in starts:
        send(found.pid, signal.SIGURG)
    written: dict[LiveRank, str] = dict.fromkeys(starts, "")
    stacks: dict[int, list[Thread]] = {}
    deadline = time.monotonic() + ANSWER_TIMEOUT
    while written and time.monotonic() < deadline:
        time.sleep(POLL)
        for found, before in list(written.items()):
            written[found] = _text_from(files[found], starts[found])
            if before and before == written[found]:
                stacks[found.rank] = parse_dump(written.pop(found))
    return stacks


def _text_from(file: Path, start: int) -> str:
    return read_tail(file, LARGEST, start).decode(errors="replace")


def collect(folder: RunFolder, node: int, only: int | None = None) -> dict[str, Any]:
    """The stacks of all ranks of a node on this machine, and why a rank has none."""
    here = [found for found in live_ranks(folder) if found.node == node]
    ranks = [found for found in here if only in (None, found.rank)]
    attempt = folder.attempt(folder.attempts() - 1)
    spied = by_py_spy(ranks)
    answered = by_signal(attempt, [found for found in ranks if found.rank not in spied])
    return {
        "ranks": [
            {
                **found._asdict(),
                "host": os.uname().nodename,
                "source": "py-spy" if found.rank in spied else "faulthandler",
                "threads": spied.get(found.rank) or answered.get(found.rank, []),
                "problem": ""
                if found.rank in spied or found.rank in answered
                else _problem(found, (attempt / f"stacks.{found.rank}").exists()),
            }
            for found in ranks
        ]
    }


def _problem(found: LiveRank, has_file: bool) -> str:
    if not has_file:
        return NO_FILE
    return f"no answer in {ANSWER_TIMEOUT:.0f} s; state of its process: {_state(found.pid)}"


def _state(pid: int) -> str:
    """As the kernel names it: `T (stopped)`, `D (disk sleep)`."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return "exited"
    return next((line.split(None, 1)[1] for line in lines if line.startswith("State:")), "unknown")


def main() -> None:
    node, *only = map(int, sys.argv[2:])
    print(json.dumps(collect(RunFolder(sys.argv[1]), node, *only)))


if __name__ == "__main__":
    main()
