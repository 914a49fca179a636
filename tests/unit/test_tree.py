"""Text to tree. The oracle is a table of texts with the code and line a reader of the file would name."""

from __future__ import annotations

import pytest

from trainer.config import tree
from trainer.errors import Finding, UserError

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n" for before, after in zip("abcdefgh", "bcdefghi")
)
ALIAS_LADDER = "a0: &a0 [1]\n" + "".join(f"a{step}: &a{step} [*a{step - 1}]\n" for step in range(1, 60))

FAULTS = [
    ("", "C007", 0),
    ("# only a comment\n", "C007", 0),
    ("{}", "C007", 0),
    ("- a\n- b\n", "C001", 1),
    ("just words", "C001", 1),
    ("a: 1\nb: [1, 2\n", "C001", 2),
    ("a:\n\tb: 1\n", "C001", 2),
    ("a: 1\n---\nb: 2\n", "C001", 2),
    ("a: *nothing\n", "C001", 1),
    ("a: 1\nb: 2\na: 3\n", "C002", 3),
    ("a: !!python/object/apply:os.system [true]\n", "C003", 1),
    ("a: 1\n<<: {b: 2}\n", "C003", 2),
    ("a: 1\n? [b]\n: 2\n", "C003", 2),
    ("[" * 1000, "C004", 1),
    ("a: " + "{b: " * 40 + "1" + "}" * 40, "C004", 1),
    (ALIAS_LADDER, "C004", 32),
    (BOMB, "C005", 5),
    ('a: "bell \\x07"\n', "C006", 1),
]


@pytest.mark.parametrize(("text", "code", "line"), FAULTS)
def test_each_fault_has_its_code_and_line(text: str, code: str, line: int) -> None:
    found: list[Finding] = []
    tree.parse(text, "f.yaml", found)
    assert [(finding.code, finding.place.line) for finding in found if finding.place] == [(code, line)]


BYTES = [
    (b"a: 1\nb: \xff\n", "C006", 2),
    ("a: 1\n".encode("utf-16"), "C006", 1),
    (b"a: 1\nb: 2\nc: \x00\n", "C006", 3),
    ("a: \u202e1\n".encode(), "C006", 1),
    (b"a: 1\n" * 3_000_000, "C005", 0),
]


@pytest.mark.parametrize(("data", "code", "line"), BYTES, ids=["not UTF-8", "UTF-16", "NUL", "direction", "15 MB"])
def test_bytes_that_are_no_text(tmp_path, data: bytes, code: str, line: int) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(data)
    found: list[Finding] = []
    assert tree.read_file(file, found) is None
    assert [(finding.code, finding.place.line) for finding in found if finding.place] == [(code, line)]


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    found: list[Finding] = []
    node = tree.read_file(file, found)
    assert node is not None
    assert tree.plain(node) == {"a": "1", "b": "x"}
    assert not found


@pytest.mark.parametrize("path", ["/nonexistent.yaml", "/", "/proc/self/mem", "a\0b"])
def test_files_that_cannot_be_read_are_wrong_usage(path: str) -> None:
    """The oracle is the operating system: missing, a folder, an I/O error even for root, not a path at all."""
    with pytest.raises(UserError) as caught:
        tree.read_file(path, [])
    assert caught.value.exit_code == 2


def test_aliases_within_reason_are_read() -> None:
    found: list[Finding] = []
    node = tree.parse("a: &x {b: 1}\nc: *x\n", "f.yaml", found)
    assert node is not None
    assert tree.plain(node) == {"a": {"b": "1"}, "c": {"b": "1"}}
    assert not found


def test_scalars_stay_text() -> None:
    """YAML 1.1 would make these 43200, False, 8, a date and a string."""
    node = tree.parse("a: 12:00:00\nb: no\nc: 010\nd: 2024-01-01\ne: 1e-5\n", "f.yaml", [])
    assert node is not None
    assert list(tree.plain(node).values()) == ["12:00:00", "no", "010", "2024-01-01", "1e-5"]


@pytest.mark.parametrize("parser", ["CLoader", "Loader"])
def test_both_parsers_of_yaml_give_the_same_tree(monkeypatch, parser: str) -> None:
    """PyYAML without its C extension must not change what a config means."""
    import yaml

    text = "a:\nb: ''\nc: [1, 'x', ~]\n"
    if parser == "Loader":
        monkeypatch.delattr(yaml, "CLoader")
    node = tree.parse(text, "f.yaml", [])
    assert node is not None
    assert tree.plain(node) == {"a": None, "b": None, "c": ["1", "x", None]}


FULL_WIDTH = [
    ("Global：\n  seed： 1\n", [1, 2], {"Global": {"seed": "1"}}),
    ("Global:\n  seed：1\n  device: cpu\n", [2], {"Global": {"seed": "1", "device": "cpu"}}),
    ("a: {b： 1，c: 2}\n", [1], {"a": {"b": "1", "c": "2"}}),
    ("a: [8，1，\n  1]\n", [1], {"a": ["8", "1", "1"]}),
    ("- a\n", [], None),
    ("a:\n  - b：1\n", [2], {"a": [{"b": "1"}]}),
]
# In texts, comments and values they mean what they say.
TEXTS = [
    "a: 训练，第一次：好\n",
    "a: '{b：1，c}'  # x：1，[2，3]\n",
    "a: [\"x，y\", 'k：v']\n",
    "a: |\n  b：1\n  [c，d]\ne: 1\n",
    "a: 12：30\n",
]


@pytest.mark.parametrize(("text", "lines", "value"), FULL_WIDTH)
def test_full_width_marks_are_found_and_read_as_meant(text: str, lines: list[int], value: object) -> None:
    found: list[Finding] = []
    node = tree.parse(text, "f.yaml", found)
    assert [finding.place.line for finding in found if finding.code == "C008" and finding.place] == lines
    if value is not None:
        assert node is not None
        assert tree.plain(node) == value
        assert len(found) == len(lines)
        assert all("：" not in finding.hint and "，" not in finding.hint for finding in found)


@pytest.mark.parametrize("text", TEXTS)
def test_full_width_marks_in_texts_are_left_alone(text: str) -> None:
    """The oracle is PyYAML."""
    import yaml

    found: list[Finding] = []
    node = tree.parse(text, "f.yaml", found)
    assert not found
    assert node is not None
    expected = yaml.load(text, Loader=yaml.BaseLoader)
    assert tree.plain(node) == expected


def test_full_width_marks_of_overrides(check) -> None:
    findings = check("Global: {seed: 1}\n", "Data.Train.dataset.split=[8，1，1]").findings
    assert [(finding.code, finding.hint) for finding in findings] == [("C008", "write `[8, 1, 1]`")]
    for typed in ("Global.seed＝1", "Global.seed：1"):
        with pytest.raises(UserError) as caught:
            check("Global: {seed: 1}\n", typed)
        assert "write Global.seed=1" in caught.value.hint
