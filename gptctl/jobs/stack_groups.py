"""Show the stacks of many ranks: those with the same stack together. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_FRAMES = 25  # of one stack
# What is common to all files of a program says nothing: packages, the code of a job, Python itself.
_PREFIX = re.compile(r"^.*/(?:site-packages|dist-packages|code|lib/python3\.\d+)/")


def number_ranges(numbers: Iterable[int]) -> str:
    """`0-6, 9` of 0 1 2 3 4 5 6 9."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges)


def ranks_text(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"


def stack_lines(frames: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """One line per frame, the innermost first."""
    lines = [f"{_PREFIX.sub('', file)}:{line} in {name}" for file, line, name in frames]
    more = [f"… {len(lines) - MAX_FRAMES} more; --json shows all"] if lines[MAX_FRAMES:] else []
    return (*lines[:MAX_FRAMES], *more)


def shown(answer: dict[str, Any], all_threads: bool) -> str:
    """The report for people: equal stacks once, then who has none."""
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank in answer["ranks"]:
        if not rank["problem"]:
            groups.setdefault(_stacks(rank["threads"], all_threads), []).append(rank["rank"])
    blocks = [
        "\n".join([f"{ranks_text(numbers)}:", *(f"  {line}" for stack in stacks for line in stack)])
        for stacks, numbers in sorted(groups.items(), key=lambda group: group[1])
    ]
    return "\n".join([*blocks, *problems(answer)])


def _stacks(threads: Sequence[dict[str, Any]], all_threads: bool) -> tuple[tuple[str, ...], ...]:
    main = [thread for thread in threads if thread["is_main"]] or list(threads[:1])
    others = [thread for thread in threads if thread not in main] if all_threads else []
    return (
        *(stack_lines(thread["frames"]) for thread in main),
        *(_titled(thread) for thread in others),
    )


def _titled(thread: dict[str, Any]) -> tuple[str, ...]:
    # An address as its name would make every rank different.
    title = "thread" if _is_address(thread["name"]) else thread["name"]
    return (f"{title}:", *(f"  {line}" for line in stack_lines(thread["frames"])))


def _is_address(name: str) -> bool:
    return name.startswith("0x")


def problems(answer: dict[str, Any]) -> list[str]:
    """One line for each reason why ranks have no stack."""
    silent: dict[str, list[int]] = {}
    for rank in answer["ranks"]:
        if rank["problem"]:
            silent.setdefault(rank["problem"], []).append(rank["rank"])
    lines = [f"{ranks_text(numbers)}: {problem}" for problem, numbers in silent.items()]
    lines += [
        f"node {each['node']} ({ranks_text(each['ranks'])}): {each['problem']}"
        for each in answer["nodes"]
    ]
    if answer["missing"]:
        lines.append(f"{ranks_text(answer['missing'])}: not running")
    return lines
