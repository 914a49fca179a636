"""Tables in windows of any width. Oracles: the width of the window, and texts that must not be broken."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptctl.cli.listing import LIST_COLUMNS
from gptctl.cli.table_layout import Column, as_columns, broken_name, fitted, text_width, wrapped
from gptctl.jobs.store import short_id
from gptctl.text import plain_value

JOBS = [Column("job"), Column("state"), Column("when", importance=2), Column("reason", "cut", importance=1)]
ROW = ["gpt-3f9a2c", "COMPLETED", "2026-11-17 15:23:24", "rank 3 (node 1): RuntimeError: no such file"]


def total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + 2 * len(widths)


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (20, None),
        (23, [0, 1]),
        (56, [0, 1, 2]),
        (57, [0, 1, 3]),
        (77, [0, 1, 3]),
        (78, [0, 1, 2, 3]),
        (120, [0, 1, 2, 3]),
    ],
)
def test_columns_are_added_in_the_order_of_their_importance(width: int, shown: list[int] | None) -> None:
    widths = fitted(JOBS, [ROW], width)
    assert (widths and list(widths)) == shown


def test_a_time_is_never_broken_and_the_reason_gets_what_is_left() -> None:
    widths = fitted(JOBS, [ROW], 80)
    assert widths == {0: 10, 1: 9, 2: 19, 3: 34}
    assert total(widths) == 80


def test_an_empty_column_makes_room_for_others() -> None:
    assert fitted(JOBS, [[*ROW[:3], ""]], 45) == {0: 10, 1: 9, 2: 19}


def test_columns_of_one_importance_are_shown_together() -> None:
    columns = [Column("rank"), Column("dp", importance=1), Column("pp", importance=1)]
    assert fitted(columns, [["0", "1", "1"]], 13) == {0: 4}
    assert fitted(columns, [["0", "1", "1"]], 14) == {0: 4, 1: 2, 2: 2}


def test_a_name_is_broken_between_words_if_its_column_is_narrow() -> None:
    assert fitted([Column("sharding group")], [["0,1"]], 12) == {0: 8}
    assert broken_name("sharding group", 8) == "sharding\ngroup"
    assert broken_name("sharding group", 14) == "sharding group"


@given(
    st.lists(st.lists(st.text("ab 训\n", max_size=40), min_size=3, max_size=3), max_size=5),
    st.integers(8, 120),
    st.sampled_from(["keep", "wrap", "cut"]),
)
def test_a_table_never_exceeds_its_window(cells: list[list[str]], width: int, fit: str) -> None:
    columns = [Column("a"), Column("b b", fit, importance=1), Column("c", fit)]
    widths = fitted(columns, cells, width)
    if widths is not None:
        assert total(widths) <= width
        assert all(text_width(row[0]) <= widths[0] for row in cells)


def test_the_last_of_named_columns_is_wrapped() -> None:
    assert as_columns(["code", "rule"]) == [Column("code"), Column("rule", "wrap")]


def test_wide_characters_take_two_columns() -> None:
    assert text_width("训练 a\u0301") == 6


def test_list_items_are_wrapped_with_their_indent() -> None:
    text = "memory is an estimate:\n  · activations as in Korthikanti et al. 2022"
    assert wrapped(text, 30).split("\n") == [
        "memory is an estimate:",
        "  · activations as in",
        "    Korthikanti et al. 2022",
    ]


@pytest.mark.parametrize("width", range(20, 60))
def test_a_time_in_a_text_is_never_broken(width: int) -> None:
    text = "2 d 11:58, about 2026-11-20 02:03:12; run folder removed 2026-11-17 15:23:24"
    lines = wrapped(text, width).split("\n")
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= max(width, 20)
    assert all(line.count("2026-11") == len(re.findall(r"2026-11-\d\d \d\d:", line)) for line in lines)


def test_values_are_shown_without_python() -> None:
    """Oracle: how YAML writes them."""
    assert plain_value(True) == "true"
    assert plain_value(None) == ""
    assert plain_value(("module load cuda", "conda activate gpt")) == "module load cuda\nconda activate gpt"
    assert (
        plain_value({"NCCL_IB_DISABLE": "1", "image": None, "binds": ("/a", "/b")})
        == "NCCL_IB_DISABLE: 1\nbinds: /a, /b"
    )


def test_the_job_that_a_job_continues_is_listed_at_80_columns() -> None:
    """Long states and reasons leave room for the hash, which finds the job."""
    row = {"job": "char-gpt-3f9a2c-2", "state": "COMPLETED", "done": "100%", "step": "600/600", "left": "12:00"}
    row |= {"reason": "x" * 60, "from": short_id("char-gpt-77b0d1"), "cluster": "local", "created": "2026-01-01 10:00"}
    shown = fitted(LIST_COLUMNS, [[row.get(column.name, "") for column in LIST_COLUMNS]], 80)
    assert shown is not None
    names = [LIST_COLUMNS[index].name for index in shown]
    assert names == ["job", "state", "done", "from", "reason"]
    assert row["from"] == "77b0d1"
    assert short_id("own-name") == "own-name"
