"""Find in a log why its process failed: one safe line. Pure: text in, text out.

Logs are written by foreign programs: what is taken from them is bounded, and cannot control a
terminal.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

LONGEST = 200  # characters of a cause
MOST_LINES = 100  # searched at the end of a log: an older traceback was probably handled
TRACEBACK = "Traceback (most recent call last)"

# Compiled when a log is searched: most commands search none, and compiling takes a millisecond.
_PREFIX = r"\[rank\d+\]: ?"  # torch adds it to every line of a traceback
_GROUP = r"\s*[|+][-+ ]?"  # the margin of an exception group
# An exception without a traceback, such as a syntax error.
_EXCEPTION = r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)"
_ERROR = (
    r"(?:rank \d+: )?error: (.+)"  # the trainer, launch.sh
    r"|(?:\S+: error: .+)"  # argparse
    r"|(?:\S*python[\d.]*: .+)"  # the interpreter: it cannot open a file, or finds no module
    r"|(?:\S*(?:sh|bash|launch\.sh): line \d+: .+)"  # a shell
)
_ABORT = r"\s*what\(\):\s*(.+)|(.*: Assertion .+ failed\.?)|Fatal Python error: (.+)"
_SYNTAX = r"(?:Syntax|Indentation|Tab)Error: "
_BUILD_PATH = re.compile(r"\[/\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")  # where torch was compiled
_FRAME = r'\s*File "([^"]+)", line (\d+)'
# What a process writes when another one has failed: never the cause, if there is another failure.
_CONSEQUENCE = (
    r"Connection (?:closed|reset|refused|timed out)|closed by (?:peer|remote)|Broken pipe"
    r"|pair closure|Timed out waiting|collective operation timeout|remote process|RemoteError"
    r"|Dist(?:Network|Store|Backend)Error|recvValue failed|NCCL communicator was aborted"
    r"|another rank exited|Rendezvous(?:Closed|Timeout|Connection)Error"
)
_MEMORY = (
    r"(?i)out[ -]of[ -]memory|OutOfMemory|MemoryError|can't allocate memory|Unable to allocate"
    r"|Cannot allocate memory"
)
KILLED_FOR_MEMORY = "killed by the out-of-memory killer"
_HANG = r"error: (.* does not respond.*)"


def one_line(text: str, longest: int = LONGEST) -> str:
    """Make one bounded line of a text; control characters are shown as escapes."""
    # Cut first: a line of a log can have any length.
    text = " ".join(text[: 4 * longest].split())
    safe = text if text.isprintable() else "".join(map(_escaped, text))
    return safe if len(safe) <= longest else f"{safe[: longest - 1]}…"


def _escaped(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def describe_exit(code: int | None, killer: int | None, log: str, oom: str | None = None) -> str:
    """Say why a process failed, from its exit code or signal and the end of its log.

    `oom`: whose out-of-memory killer was active while it ran: its control group's, the machine's.
    """
    lines = [re.sub(_PREFIX, "", line, count=1).rstrip() for line in log.splitlines()[-MOST_LINES:]]
    if killer is not None:
        return one_line(_of_signal(killer, lines, oom))
    # Python exits with 1 after an exception. With another code, a traceback was handled before.
    found = _exception(lines) if code == 1 else ""
    found = found or next((_error(line) for line in reversed(lines) if _error(line)), "")
    if found:
        return one_line(_BUILD_PATH.sub("", found))
    last = last_line(log)
    return one_line(f"exit code {code}; last line: {last}" if last else f"exit code {code}")


def last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.split("\n")))
    return next((line[:LONGEST] for line in lines if line), "")


def is_consequence(text: str, rank: int | None = None) -> bool:
    """Whether a process that wrote this failed because another one did."""
    accused = re.match(r"rank (\d+) ", text)
    return bool(re.search(_CONSEQUENCE, text)) or bool(accused and int(accused[1]) != rank)


def is_about_memory(text: str) -> bool:
    return bool(re.search(_MEMORY, text))


def is_killed_for_memory(text: str) -> bool:
    """Whether the kernel surely killed a process for lack of memory in its own control group."""
    return text.endswith(KILLED_FOR_MEMORY)


def about_itself(text: str, rank: int) -> str:
    """Remove the rank's own name from the start of what it says: the reader knows it."""
    return re.sub(rf"rank {rank} (?:\((?:[^()]|\([^()]*\))*\) )?", "", text, count=1) or text


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _of_signal(killer: int, lines: Sequence[str], oom: str | None) -> str:
    how = f"killed by signal {killer} ({signal_name(killer)})"
    if killer == signal.SIGKILL:
        # The watchdog writes into the log of a rank that does not respond, before it kills it.
        if hang := next((found[1] for line in lines[-5:] if (found := re.match(_HANG, line))), ""):
            return hang
        if oom == "cgroup":
            return KILLED_FOR_MEMORY
        if oom == "machine":
            return "killed by signal 9 (SIGKILL), probably by the out-of-memory killer"
        return f"{how}; possibly out of memory"
    if killer == signal.SIGINT and "KeyboardInterrupt" in lines:
        return "KeyboardInterrupt"
    said = ""
    if killer == signal.SIGABRT:
        aborts = [found for line in lines if (found := re.match(_ABORT, line))]
        said = next((next(filter(None, found.groups())) for found in aborts), "")
    how = how if said in ("", "Aborted") else f"{how}: {said}"
    # Python's fault handler prints where it was.
    begin = next((n for n, line in enumerate(lines) if "(most recent call first)" in line), None)
    frame = re.match(_FRAME, lines[begin + 1]) if begin is not None and lines[begin + 1 :] else None
    return f"{how} at {frame[1]}:{frame[2]}" if frame else how


def _exception(lines: Sequence[str]) -> str:
    """Return the last exception that was not caught: its type and the first line of its text."""
    begins = [number for number, line in enumerate(lines) if TRACEBACK in line]
    for number in reversed(begins):
        margin = "Exception Group" in lines[number]
        for place in range(number + 1, len(lines)):
            line = re.sub(_GROUP, "", lines[place], count=1) if margin else lines[place]
            if line and not line[0].isspace():
                return _with_place(line, lines[:place], lines[place + 1 :])
    alone = next((n for n in reversed(range(len(lines))) if re.match(_EXCEPTION, lines[n])), None)
    return "" if alone is None else _with_place(lines[alone], lines[:alone], ())


def _with_place(line: str, before: Sequence[str], after: Sequence[str]) -> str:
    # A syntax error is useless without its place, which is in the lines before it.
    if re.match(_SYNTAX, line):
        frame = next(
            (found for each in reversed(before) if (found := re.match(_FRAME, each))), None
        )
        return f"{line} at {frame[1]}:{frame[2]}" if frame else line
    # `RuntimeError: Error(s) in loading state_dict for GPT:` says what is wrong in the next line.
    return f"{line} {after[0].strip()}" if line.endswith(":") and after else line


def _error(line: str) -> str:
    found = re.match(_ERROR, line)
    return (found[1] or found[0]) if found else ""
