"""The ranks of a job as a grid: who needs longer for a step than most. Pure.

A cell has a character as well as a colour, so that it can be read without colours.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptctl.cli.styled_lines import Styled, StyledLine, line_of
from gptctl.jobs.top_snapshot import JobDetail, SlowRank
from gptctl.text import count

# Below so many times the median: character and style.
LEVELS = ((1.1, "·", "good"), (1.25, "o", ""), (1.5, "O", "warn"), (float("inf"), "#", "bad"))
LEGEND = "  ".join(
    [*(f"{mark} <{limit}" for limit, mark, _ in LEVELS[:-1]), f"{LEVELS[-1][1]} slower"]
)


def rank_lines(detail: JobDetail, width: int, height: int) -> list[StyledLine]:
    """A title, who is slow, and the grid in what is left of `height`."""
    ranks, median = detail.ranks, detail.median_ms
    if ranks is None or median is None:
        return [line_of(Styled("ranks", "title"), Styled(f"  {_missing(detail)}", "dim"))]
    title = f"median {median:,.1f} ms without waiting for others, step {ranks.step:,}"
    cells, group = grouped(ranks.own_ms, median, room_of(width, len(ranks.own_ms), height - 2))
    each = f", {group} in a cell" if group > 1 else ""
    head = line_of(Styled(count(len(ranks.own_ms), "rank"), "title"), f"{each}  {title}")
    return [head, slow_line(detail.slowest, width), *grid(cells, group, width)][:height]


def _missing(detail: JobDetail) -> str:
    if detail.summary.world == 1:
        return "1 rank: nobody waits for it"
    return "no times yet: the bundled trainer records them at every logged step"


def slow_line(slowest: Sequence[SlowRank], width: int) -> StyledLine:
    legend = Styled(f"  {LEGEND}", "dim")
    if not slowest:
        return line_of(Styled("no slow ranks", "good"), legend)
    texts = [_named(each) for each in slowest]
    # As many names as there is room for; the slowest comes first.
    while len(texts) > 1 and len("slow: " + ", ".join(texts) + legend.text) > width:
        texts.pop()
    style = "bad" if slowest[0].ratio >= LEVELS[2][0] else "warn"
    return line_of(Styled("slow: " + ", ".join(texts), style), legend)


def _named(each: SlowRank) -> str:
    where = each.host or f"node {each.node}"
    return f"rank {each.rank} on {where} {each.ms:,.1f} ms ({each.ratio:.2f}×)"


def room_of(width: int, ranks: int, height: int) -> int:
    """How many cells there are."""
    return max(1, (width - label_width(ranks)) * max(1, height))


def label_width(ranks: int) -> int:
    return len(str(max(0, ranks - 1))) + 1


def grouped(own_ms: Sequence[float], median: float, room: int) -> tuple[list[float], int]:
    """The ratio of each cell, and how many ranks it stands for: a power of two."""
    group = 1
    while -(-len(own_ms) // group) > room:
        group *= 2
    ratios = [ms / median if median > 0 else 1.0 for ms in own_ms]
    return [max(ratios[start : start + group]) for start in range(0, len(ratios), group)], group


def grid(cells: Sequence[float], group: int, width: int) -> list[StyledLine]:
    label = label_width(len(cells) * group)
    per_line = max(1, width - label)
    # Round numbers of ranks begin a line, where there is room.
    for size in (64, 32, 16, 10, 8):
        if per_line >= size and len(cells) > per_line:
            per_line -= per_line % size
            break
    lines = []
    for start in range(0, len(cells), per_line):
        number = Styled(f"{start * group:>{label - 1}} ", "dim")
        lines.append((number, *_runs(cells[start : start + per_line])))
    return lines


def _runs(cells: Sequence[float]) -> list[Styled]:
    """Neighbours of one level are one piece: a thousand pieces would cost time."""
    found = list[Styled]()
    for ratio in cells:
        _, character, style = next(level for level in LEVELS if ratio < level[0])
        if found and found[-1].style == style and found[-1].text[-1] == character:
            found[-1] = Styled(found[-1].text + character, style)
        else:
            found.append(Styled(character, style))
    return found
