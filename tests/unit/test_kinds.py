"""Scalars read as meant. The oracle is a table of what a person means by a spelling."""

from __future__ import annotations

import pytest

from gptctl.spec.launch import Devices, Duration, NodeCount
from trainer.config import kinds, tree
from trainer.errors import Place


def node_of(text: str) -> tree.Node:
    parsed = tree.parse(f"key: {text}\n", "f.yaml", [])
    assert parsed is not None
    return parsed.items["key"]


MEANT = [
    (kinds.Integer(), "8", 8),
    (kinds.Integer(), "'8'", 8),
    (kinds.Integer(), "+8", 8),
    (kinds.Integer(), "500_000", 500000),
    (kinds.Integer(), "5e5", 500000),
    (kinds.Integer(), "0", 0),
    (kinds.Number(), "1e-5", 1e-5),
    (kinds.Number(), "1.0e-5", 1e-5),
    (kinds.Number(), ".5", 0.5),
    (kinds.Number(), "3", 3.0),
    (kinds.Boolean(), "True", True),
    (kinds.Boolean(), "yes", True),
    (kinds.Boolean(), "'true'", True),
    (kinds.Boolean(), "T", True),
    (kinds.Boolean(), "1", True),
    (kinds.Boolean(), "off", False),
    (kinds.Boolean(), "N", False),
    (kinds.Integers(), "[949, 50, 1]", (949, 50, 1)),
    (kinds.Integers(), "'949,50,1'", (949, 50, 1)),
    (kinds.Integers(), "949, 50, 1", (949, 50, 1)),
    (kinds.Integers(), "[]", ()),
    (kinds.Choice(("gpu", "cpu")), "GPU", "gpu"),
    (kinds.Text(), "no", "no"),
    (kinds.Names(), "{A: no, B: 1, C: , D: 'x y'}", {"A": "no", "B": "1", "C": "", "D": "x y"}),
    (kinds.Words(), "one", ("one",)),
    (kinds.Words(), "[a b, '$(c)']", ("a b", "$(c)")),
    (Duration(), "12:00:00", "12:00:00"),
    (Duration(), "90", "01:30:00"),
    (Duration(), "90:30", "01:30:30"),
    (Duration(), "1-12", "1-12:00:00"),
    (Duration(), "36:00:00", "1-12:00:00"),
    (Duration(), "2-01:30", "2-01:30:00"),
    (NodeCount(), "2", 2),
    (NodeCount(), "2:4", "2:4"),
    (NodeCount(), "3:3", 3),
    (Devices(), "'0,1,2,3'", ("0", "1", "2", "3")),
    (Devices(), "0,1", ("0", "1")),
    (Devices(), "[0, 1]", ("0", "1")),
]


@pytest.mark.parametrize(("kind", "text", "value"), MEANT)
def test_values_are_read_as_meant(kind: kinds.Kind, text: str, value: object) -> None:
    read = kind.read(node_of(text))
    assert read == value
    assert type(read) is type(value)


REFUSED = [
    (
        kinds.Integer(),
        ["1.5", "true", "'8 '", "NaN", "0x10", "010", "8.0", "9" * 5000, "1e400", "[8]", "{a: 8}", "٨", "1__0"],
    ),
    (kinds.Integer(1, 100), ["0", "-1", "101", str(2**63)]),
    (kinds.Number(), ["nan", "inf", "-.inf", "1e999", "1,5", "abc", "1e", "[1]"]),
    (kinds.Number(above=0), ["0", "-1"]),
    (kinds.Boolean(), ["2", "maybe", "tru", "[true]"]),
    (kinds.Choice(("gpu", "cpu")), ["tpu", "xpu", "[gpu]"]),
    (kinds.Integers(), ["[a]", "'1,,2'", "{a: 1}", "[-1]", "[[1]]"]),
    (kinds.Integers(longest=3), ["[1, 2, 3, 4]"]),
    (kinds.Text(), ['"a\\nb"', '"a\\tb"', "x" * 5000, "[x]"]),
    (kinds.FilePath(), ["s3://bucket/key", "https://host/file", '"a\\nb"']),
    (kinds.Names(), ["{1A: x}", "{'a b': x}", "{'A=B': x}", "[A]", "A", '{A: "x\\ny"}']),
    (Duration(), ["0", "abc", "1:2:3:4", "-5", "1-", "9999999-00"]),
    (NodeCount(), ["0", "-1", "4:2", "1:2:3", "a", "1.5", "99999999", "[1, 2]"]),
    (Devices(), ["'0,0'", "'0,,1'", "'-1'", "'a'", "{a: 1}"]),
]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in REFUSED for text in texts])
def test_wrong_values_are_refused_with_a_fix(kind: kinds.Kind, text: str) -> None:
    with pytest.raises((kinds.BadValue, kinds.BadItems)) as caught:
        kind.read(node_of(text))
    faults = [caught.value] if isinstance(caught.value, kinds.BadValue) else caught.value.faults
    assert all(fault.message and fault.hint for fault in faults)


def test_long_values_are_cut_in_messages() -> None:
    assert len(kinds.shown("x" * 500)) == 58


def test_an_unlikely_integer_does_not_become_a_float() -> None:
    """2^53 + 1 as text: a detour over float would lose the 1."""
    limit = str(2**53 - 1)
    assert kinds.Integer().read(tree.Scalar(limit, Place("f"))) == 2**53 - 1
