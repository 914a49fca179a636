"""Finds the full-width colons and commas of Chinese input methods where YAML needs `:` and `,`.

Only marks that can be nothing else are taken: after a key, and between the items of a list in
brackets. In texts they stay as they are.
"""

from __future__ import annotations

import re

from trainer.errors import Finding, Place, Rule

FULL_WIDTH = Rule("C008", "a config must use `:` and `,`, not the full-width `：` and `，`")

# A quoted text or a comment: whatever it contains is not syntax.
_QUIET = re.compile(
    r"""(?:(?<=[\s\[{,:，：])|^)(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')|(?:(?<=\s)|^)\#.*"""
)
# A key at the start of a line or, in brackets, after another item; and its colon.
_KEY = re.compile(r"(?:^\s*(?:-\s+)*|[\[{,，]\s*)(?:[A-Za-z_][\w.-]*)\s*(：)")
_BLOCK_TEXT = re.compile(r"(?:^|[\s:-])[|>][+-]?\d?\s*$")


def with_plain_marks(text: str, file: str, found: list[Finding], first_line: int = 1) -> str:
    """Report full-width colons and commas, and replace them, so that the rest can be checked."""
    if "：" not in text and "，" not in text:
        return text
    lines, depth, block = text.split("\n"), 0, -1
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        # The lines of a block text are deeper than the line that opens it.
        if block >= 0 and (indent > block or not line.strip()):
            continue
        bare = _QUIET.sub(lambda quiet: " " * len(quiet[0]), line)
        wrong, depth = _marks(bare, depth)
        block = indent if _BLOCK_TEXT.search(bare) else -1
        if wrong:
            lines[number] = _replaced(line, wrong)
            place = Place(file, number + first_line if first_line else 0)
            found.append(_finding(line, wrong, place))
    return "\n".join(lines)


def _marks(line: str, depth: int) -> tuple[list[int], int]:
    """The positions of wrong marks in a line, and how many brackets are open after it."""
    wrong = [key.start(1) for key in _KEY.finditer(line)]
    for position, character in enumerate(line):
        depth += (character in "[{") - (character in "]}")
        if character == "，" and depth > 0:
            wrong.append(position)
    return sorted(wrong), max(depth, 0)


def _replaced(line: str, positions: list[int]) -> str:
    for position in reversed(positions):
        plain = ":" if line[position] == "：" else ","
        # YAML takes `a:1` for one word.
        blank = "" if line[position + 1 : position + 2] in ("", " ") else " "
        line = line[:position] + plain + blank + line[position + 1 :]
    return line


def _finding(line: str, positions: list[int], place: Place) -> Finding:
    marks = {line[position] for position in positions}
    names = [
        f"{name} `{mark}`" for mark, name in (("：", "colon"), ("，", "comma")) if mark in marks
    ]
    message = f"full-width {' and '.join(names)}"
    return FULL_WIDTH.found(
        "", None, message, f"write `{_replaced(line, positions).strip()}`", place
    )
