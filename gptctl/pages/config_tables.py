"""What runs were started with: the differences from the first run, and everything, folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gptctl.jobs.comparison import Run, Section, compare
from gptctl.jobs.config_differences import affects_training
from gptctl.jobs.run_facts import SECTIONS, Facts, Value
from gptctl.jobs.run_report import RunReport
from gptctl.pages.markup import Markup, element, joined
from gptctl.pages.page_parts import cut, folded, table
from gptctl.text import count, plain_value

MOST_ROWS = 300  # of one table: a virtual environment may have thousands of packages
MOST_OPEN = 15  # rows of a table of differences; a longer one is folded
MISSING = "–"
CODE = "code"  # its values are digests, which tell people nothing: only names are shown
NOT_SET = ("default", "derived")  # how the origins begin of values that nobody wrote


def differences(runs: Sequence[RunReport]) -> Markup | None:
    """What differs from the first run; of a single one, what differs from the defaults."""
    if len(runs) == 1:
        return _set_keys(runs[0])
    first = Run(runs[0].job, runs[0].facts, ())
    found = [compare(first, Run(each.job, each.facts, ()), 0.0).sections for each in runs[1:]]
    tables = [
        _difference_table(name, runs, sections)
        for name, *sections in zip(SECTIONS, *found)
        if not all(section.is_equal for section in sections)
    ]
    return joined(*tables) if tables else element("p", None, "Nothing that is recorded differs.")


def _set_keys(run: RunReport) -> Markup | None:
    values = _values(run.facts, "config") | _values(run.facts, "layout")
    rows = [
        (key, cut(plain_value(each.value)), each.origin)
        for key, each in values.items()
        if each.origin and not each.origin.startswith(NOT_SET)
    ]
    if not rows:
        return None
    title = f"{count(len(rows), 'key')} set: config, profile, command line"
    return folded(title, table(("key", "value", "from"), rows), is_open=True)


def _difference_table(name: str, runs: Sequence[RunReport], sections: Sequence[Section]) -> Markup:
    """A row for each key that differs in any run."""
    is_code = sections[0].name == CODE
    keys = list(dict.fromkeys(each.key for found in sections for each in found.differences))
    firsts = {each.key: each.a for found in sections for each in found.values}
    others = [{each.key: each for each in found.values} for found in sections]
    rows = []
    for key in keys[:MOST_ROWS]:
        cells = [_cell(firsts.get(key), is_code, is_changed=False)]
        for values in others:
            each = values.get(key)
            # Without an entry it was not compared: one of the two did not record it.
            is_changed = each is not None and not each.is_equal
            cells.append(_cell(each.b if each else None, is_code, is_changed))
        is_training = sections[0].name == "config" and affects_training(key)
        rows.append((element("b", None, key) if is_training else key, *cells))
    more = len(keys) - MOST_ROWS
    note = element("p", {"class": "note"}, f"and {more:,} more") if more > 0 else None
    made = joined(table(("", *(each.job for each in runs)), rows), note)
    if len(rows) > MOST_OPEN:
        return folded(f"{name}: {count(len(keys), 'difference')}", made)
    return joined(element("h3", None, name.capitalize()), made)


def _cell(value: Value | None, is_code: bool, is_changed: bool) -> Markup:
    text = MISSING if value is None else cut(plain_value(value.value)) or MISSING
    if is_code and value is not None:
        text = "changed" if is_changed else "same"
    return element("span", {"class": "changed" if is_changed else None}, text)


def everything(run: RunReport) -> Markup:
    """All that is recorded of a run, in folded tables."""
    parts = []
    for name in SECTIONS:
        rows = list(_rows(run.facts, name))
        if rows:
            heads = ("name",) if name == CODE else ("name", "value", "from")
            more = len(rows) - MOST_ROWS
            note = element("p", {"class": "note"}, f"and {more:,} more") if more > 0 else None
            title = f"{name} ({len(rows):,})"
            parts.append(folded(title, table(heads, rows[:MOST_ROWS]), note))
    return joined(*parts)


def _rows(facts: Facts, section: str) -> Iterator[tuple[str, ...]]:
    for key, each in _values(facts, section).items():
        text = cut(plain_value(each.value))
        if section == CODE:
            yield (key,)
        elif text:
            yield key, text, each.origin


def _values(facts: Facts, section: str) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for values in facts.get(section, {}).values():
        for key, value in (values or {}).items():
            merged.setdefault(key, value)
    return merged
