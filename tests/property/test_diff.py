"""Comparisons of runs whose files hold anything at all: valid, hostile or damaged.

Oracles: a run does not differ from itself; swapping two runs swaps the sides of every difference and changes nothing
else; whatever is in the files, the answer is JSON, and nothing that controls a terminal is printed.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptctl.cli import diff as verb
from gptctl.cli import ui
from gptctl.jobs.code_differences import code_diff
from gptctl.jobs.comparison import Comparison, Run, compare, comparison_json
from gptctl.jobs.run_facts import job_facts
from gptctl.jobs.run_metrics import file_rows
from gptctl.jobs.store import JobRecord

HOSTILE = (
    "\x1b[2J\x1b]0;x\x07",
    "\u202egpj\u2066",
    "a\nb\r\x00c",
    "\x9b31m",
    "<job>",
    "x" * 5000,
    "[red]x[/]",
)
# Made here: hypothesis draws the texts that a test module contains, and an id is compared as such.
ONE, OTHER, THIRD = ("-".join(("gpt", mark * 6)) for mark in "abc")
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
FLAT = st.dictionaries(TEXTS | st.sampled_from(["torch", "MY_TOKEN", "numpy"]), SCALARS, max_size=4)


def mapping(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={name: part | JSON for name, part in parts.items()})


CONFIG = mapping(
    resolved=mapping(
        Global=FLAT,
        Launch=mapping(secrets=st.dictionaries(TEXTS, FLAT, max_size=2), env=FLAT),
        Distributed=mapping(mp_degree=SCALARS),
    ),
    origins=st.dictionaries(st.sampled_from(["Global", "Launch.secrets", "Launch.env"]), TEXTS, max_size=3),
)
FILES = {
    "config.json": CONFIG,
    "plan.json": mapping(env=FLAT, env_origins=FLAT, python=TEXTS),
    "cluster.json": FLAT,
    "git.json": mapping(commit=TEXTS, branch=TEXTS, diff=TEXTS),
    "attempt-0/environment.json": mapping(
        software=FLAT,
        variables=FLAT,
        packages=FLAT,
        node=mapping(host=TEXTS, memory=SCALARS),
        data=mapping(fingerprint=TEXTS, digests=FLAT, files=st.lists(FLAT | JSON, max_size=3)),
    ),
}
ROW = st.fixed_dictionaries(
    {"step": st.integers(0, 30)},
    optional={"loss": SCALARS, "valid_loss": SCALARS, "tokens_per_second": SCALARS, "eval_ppl:" + HOSTILE[0]: SCALARS},
)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, bytes]:
    """The files of a run; each may be missing or damaged."""
    files = {}
    for name, strategy in FILES.items():
        if draw(st.integers(0, 5)):
            data = json.dumps(draw(strategy)).encode()
            files[name] = data if draw(st.integers(0, 9)) else data[: len(data) // 2] + draw(st.binary(max_size=3))
    rows = draw(st.lists(ROW, max_size=6))
    files["metrics.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name in draw(st.sets(st.sampled_from(["x.py", "pkg/y.py", "\x1b[2J.py"]))):
        files[f"code/{name}"] = draw(st.text(max_size=20)).encode() + draw(st.sampled_from(HOSTILE)).encode()
    return files


def run_in(folder: Path, job: str, files: dict[str, bytes]) -> Run:
    shutil.rmtree(folder / job, ignore_errors=True)
    for name, data in files.items():
        file = folder / job / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    record = JobRecord(job, "gpt", 1.0, "desk", "local", str(folder / job), str(folder / job / "logs"), 1, 2, 2)
    return Run(job, job_facts(record), file_rows(folder / job / "metrics.jsonl"), (job,), 1.0)


def swapped(found: dict[str, Any]) -> Any:
    """The JSON of a comparison with its sides swapped."""
    other = {"a": "b", "b": "a", "a_from": "b_from", "b_from": "a_from"}

    def swap(value: Any) -> Any:
        if isinstance(value, dict) and "ratio" not in value:
            return {other.get(key, key): swap(each) for key, each in value.items()}
        if isinstance(value, dict):
            return {other.get(key, key): each for key, each in value.items() if key != "ratio"}
        return [swap(each) for each in value] if isinstance(value, list) else value

    return swap(found)


def without_values(found: dict[str, Any]) -> Any:
    """Hide the values themselves from `swapped`: they may be mappings with keys of any name."""
    for section in found["sections"].values():
        for each in section["values"]:
            each["a"], each["b"] = json.dumps(each["a"]), json.dumps(each["b"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def as_json(found: Comparison) -> dict[str, Any]:
    return without_values(json.loads(json.dumps(comparison_json(found, True), allow_nan=False)))


SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip


@SETTINGS
@given(one=contents(), other=contents())
def test_a_comparison_is_a_mirror(one: dict[str, bytes], other: dict[str, bytes], folder: Path) -> None:
    a, b = run_in(folder, ONE, one), run_in(folder, OTHER, other)
    same = compare(a, a, 0.0)
    assert same.is_equal
    assert not any(section.differences or any(section.lacking) for section in same.sections)
    there, back = compare(a, b, 1e-6), compare(b, a, 1e-6)
    expected, found = as_json(there), as_json(back)
    found["metrics"]["tokens_per_second"].pop("ratio")
    assert swapped(expected) == found
    # The same files in another folder are the same run.
    assert compare(a, run_in(folder, THIRD, one), 0.0).is_equal


@SETTINGS
@given(one=contents(), other=contents())
def test_nothing_controls_a_terminal(
    one: dict[str, bytes], other: dict[str, bytes], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run_in(folder, ONE, one), run_in(folder, OTHER, other)
    found = compare(a, b, 1e-6)
    names = [each.key for section in found.sections if section.name == "code" for each in section.differences]
    lines = code_diff(folder / ONE / "code", folder / OTHER / "code", names, (ONE, OTHER))
    capsys.readouterr()
    verb.show(found, True, lines)
    ui.print_json({**comparison_json(found, True), "code_diff": lines})
    told = capsys.readouterr()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", told.out + told.err)


def test_values_of_secrets_are_compared_and_never_told(folder: Path) -> None:
    """Planned ones and recorded ones. Oracle: the values that were written."""
    files = [
        {
            "plan.json": json.dumps({"env": {"HF_TOKEN": f"one-{n}"}, "env_origins": {"HF_TOKEN": "--env"}}).encode(),
            "attempt-0/environment.json": json.dumps({"variables": {"DB_PASSWORD": f"two-{n}"}}).encode(),
            "config.json": b'{"resolved": {"Global": {"seed": 1}}}',
        }
        for n in range(2)
    ]
    found = comparison_json(compare(run_in(folder, "a-1", files[0]), run_in(folder, "b-1", files[1]), 0.0), True)
    values = found["sections"]["environment"]["values"]
    assert [each["key"] for each in values if not each["equal"]] == ["DB_PASSWORD", "HF_TOKEN"]
    assert not re.search("one-|two-", json.dumps(found))
