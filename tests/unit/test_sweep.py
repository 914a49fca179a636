"""Sweep files: which runs they mean, and what is refused. The oracle is the list of runs, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.cli.sweep import announce, result_columns
from gptctl.cli.sweep_runs import is_array
from gptctl.cli.table_layout import fitted
from gptctl.jobs.sweep_submit import SubmittedRun
from gptctl.jobs.sweeps import SweepStore, new_sweep
from gptctl.spec.check import check_config
from gptctl.spec.sweep import expand, load_sweep, name_of, overrides_of, overruled, short_names, varied
from gptctl.spec.sweep_checks import check_runs
from tests.unit.test_jobs import record
from trainer.config import Override
from trainer.errors import UserError

RANGE = "{min: 1e-5, max: 1e-3, distribution: log_uniform}"


@pytest.fixture
def load(tmp_path: Path):
    def load_text(text: str):
        (tmp_path / "sweep.yaml").write_text(text)
        return load_sweep(tmp_path / "sweep.yaml")

    return load_text


def test_a_grid_is_every_combination_in_order(load) -> None:
    loaded = load("parameters: {A.x: [1e-3, null], B: {values: ['a b', [1, 2], {k: 'v'}]}}")
    assert not loaded.findings
    assert expand(loaded.sweep) == [
        {"A.x": first, "B": second} for first in ("1e-3", "") for second in ("'a b'", "[1, 2]", "{k: 'v'}")
    ]


def test_a_list_is_its_runs(load) -> None:
    loaded = load("method: list\nruns:\n- {Launch.nodes: 2, A.x: 1}\n- {A.x: 2}\n")
    assert not loaded.findings
    assert expand(loaded.sweep) == [{"Launch.nodes": "2", "A.x": "1"}, {"A.x": "2"}]
    assert varied(expand(loaded.sweep)) == ["Launch.nodes", "A.x"]


def test_random_runs_are_different_repeatable_and_in_range(load) -> None:
    text = f"method: random\nsamples: 50\nseed: 3\nparameters: {{lr: {RANGE}, n: {{min: 1, max: 9}}, s: [a, b]}}"
    runs = expand(load(text).sweep)
    assert runs == expand(load(text).sweep)
    assert runs != expand(load(text.replace("seed: 3", "seed: 4")).sweep)
    assert len({tuple(run.items()) for run in runs}) == 50
    assert all(1e-5 <= float(run["lr"]) <= 1e-3 and run["n"] in "123456789" and run["s"] in "ab" for run in runs)
    # Log-uniform: about half of the values are below the geometric mean, 1e-4.
    assert 15 < sum(float(run["lr"]) < 1e-4 for run in runs) < 35


def test_fewer_combinations_than_samples_end(load) -> None:
    assert len(expand(load("method: random\nsamples: 100\nparameters: {a: [1, 2]}").sweep)) == 2


WRONG = [
    ("{}", ["C007"]),
    ("parameters: {a: []}", ["C012"]),
    ("parameters: {a: [1], b c: [2]}", ["C014"]),
    ("parameter: {a: [1]}", ["C010"]),
    ("method: best\nparameters: {a: [1]}", ["C013"]),
    ("method: list\nparameters: {a: [1]}", ["W002"]),
    ("method: list\nruns: [1]", ["C011"]),
    ("method: list\nruns: [{a: 1}, {a: 1}]", ["W001"]),
    ("parameters: {a: [1]}\nruns: [{a: 1}]", ["W002"]),
    ("parameters: {a: [1]}\nsamples: 3", ["W002"]),
    (f"parameters: {{a: {RANGE}}}", ["W002"]),
    ("method: random\nsamples: 3\nparameters: {a: {min: 3, max: 1}}", ["C012"]),
    ("method: random\nsamples: 3\nparameters: {a: {min: 0, max: 1, distribution: log_uniform}}", ["C012"]),
    ("method: random\nsamples: 3\nparameters: {a: {min: 0, max: 1, distribution: bell}}", ["C014"]),
    ("method: random\nsamples: 3\nparameters: {a: {min: 0}}", ["C011"]),
    ("method: random\nsamples: 3\nparameters: {a: {min: [1], max: 2}}", ["C011"]),
    ("parallel: 0\nparameters: {a: [1]}", ["C012"]),
    ("parameters: {a: {values: [1], x: 2}}", ["C011"]),
    (f"parameters: {{{', '.join(f'k{n}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]' for n in range(10))}}}", ["W001"]),
    ("config: http://x/y.yaml\nparameters: {a: [1]}", ["C014"]),
    ("[1, 2]", ["C001"]),
]


@pytest.mark.parametrize(("text", "codes"), WRONG)
def test_mistakes_are_findings(load, text: str, codes: list[str]) -> None:
    found = load(text).findings
    assert [finding.code for finding in found] == codes
    assert all(finding.hint for finding in found)


def test_values_reach_the_config(tmp_path: Path) -> None:
    """Lists, mappings and quoted text are read as in a config."""
    (tmp_path / "sweep.yaml").write_text(
        "parameters: {Launch.args: [[a, 'b c']], Launch.env: [{A: '1e3'}], Optimizer.lr.max_lr: [1e-3], Model.name: ['gpt2-en']}"
    )
    (run,) = expand(load_sweep(tmp_path / "sweep.yaml").sweep)
    checked = check_config(None, overrides_of(run, "s"))
    assert checked.launch.args == ("a", "b c")
    assert checked.launch.env == {"A": "1e3"}
    assert checked.resolved.run.Optimizer.lr.max_lr == 1e-3
    assert checked.resolved.run.Model.hidden_size == 768


def checked(*overrides: str):
    tiny = ("Global.device=cpu", "Data.Train.dataset.name=CharDataset", "Data.Train.dataset.path=builtin")
    return check_config(None, [Override.parse(text) for text in (*tiny, *overrides)])


def test_runs_are_compared_by_what_they_mean() -> None:
    """Equal values that are written differently, and folders that two runs would share."""
    lr = "Optimizer.lr.max_lr"
    assert not [*check_runs([checked(f"{lr}=1e-3"), checked(f"{lr}=2e-3")])]
    (same,) = check_runs([checked(f"{lr}=2e-3"), checked(f"{lr}=1e-3"), checked(f"{lr}=0.001")])
    assert (same.code, same.message) == ("W001", "runs 1 and 2 have the same config")
    output = "Engine.save_load.output_dir"
    (shared,) = check_runs([checked(f"{output}=out", f"{lr}={value}") for value in ("1e-3", "2e-3")])
    assert (shared.code, shared.key) == ("W003", output)
    assert not [*check_runs([checked(f"{output}=a"), checked(f"{output}=b")])]
    snapshot = "Engine.save_load.snapshot_path"
    (shared,) = check_runs([checked(f"{snapshot}=x.pt", f"{lr}={value}") for value in ("1e-3", "2e-3")])
    assert (shared.code, shared.key) == ("W003", snapshot)


@pytest.mark.parametrize(
    ("file", "name"),
    [("lr.yaml", "lr"), ("a b\nc.yaml", "a-b-c"), ("$(x).yaml", "x"), ("..yaml", "sweep"), ("x" * 90, "x" * 48)],
)
def test_the_name_of_a_file_becomes_part_of_paths(file: str, name: str) -> None:
    assert name_of(Path(file)) == name


DAMAGED = [
    {"arguments": value} for value in (None, {}, {"overrides": None}, {"overrides": [1]}, {"overrides": [["a", "b"]]})
]
DAMAGED += [{"metric": None}, {"created": float("inf")}, {"created": "x"}, {"parallel": "3"}, {"parallel": 0}]
DAMAGED += [{"runs": [1]}, {"folder": 5}, {"written": [1]}]


@pytest.mark.parametrize("damage", DAMAGED, ids=str)
def test_a_damaged_record_is_left_out(tmp_path: Path, damage: dict) -> None:
    store = SweepStore(tmp_path)
    facts = {"file": "f", "folder": "/", "config": "c", "runs": ({"a": "1"},), "arguments": {"overrides": []}}
    record = store.add(new_sweep(id="lr", **facts))
    assert [sweep.id for sweep in store.all()] == [record.id]
    file = tmp_path / "sweeps" / f"{record.id}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    assert store.all() == []


def test_only_one_gptctl_submits_a_sweep(tmp_path: Path) -> None:
    store = SweepStore(tmp_path)
    record = store.add(new_sweep(id="lr", file="f", folder="/", config="c", runs=({"a": "1"},), arguments={}))
    with store.locked(record), pytest.raises(UserError, match="another gptctl"), store.locked(record):
        pass
    with store.locked(record):
        pass


def test_runs_with_templates_of_the_user_are_no_array() -> None:
    """The script of an array is gptctl's own; the backend would take these runs."""
    backend = SimpleNamespace(is_array=lambda plans, numbers: True)
    session: Any = SimpleNamespace(backends=SimpleNamespace(of=lambda kind: backend))

    def run(*templates: Path, kind: str = "slurm") -> Any:
        return SimpleNamespace(plan=SimpleNamespace(kind=kind), templates=templates)

    assert is_array(session, {0: run(), 1: run()})
    assert not is_array(session, {0: run(), 1: run(Path("templates"))})
    assert not is_array(session, {0: run(), 1: run(kind="local")})


def test_a_resumed_sweep_says_which_run_got_which_job_and_where_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing of runs if none was submitted."""
    sweep = new_sweep(id="lr-1", file="f", folder="/", config="c", runs=({}, {}, {}, {}), arguments={})
    old = record("lr-1-b")
    done = [
        SubmittedRun(0, record("new-0")._replace(continues=old.id), step=20),
        SubmittedRun(1, record("new-1")._replace(continues=old.id), step=0),
        SubmittedRun(3, record("new-3")),
    ]
    assert announce(sweep, done, as_json=False, is_resumed=True) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[1:5] == [
        "runs new jobs for 3 of 4",
        "run 0 new-0: continues lr-1-b from step 20",
        "run 1 new-1: continues lr-1-b",
        "run 3 new-3: starts from the beginning",
    ]
    assert announce(sweep, [], as_json=False, is_resumed=True) == 0
    assert capsys.readouterr().out == ""
    announce(sweep, done, as_json=True, is_resumed=True)
    assert [each["from_step"] for each in json.loads(capsys.readouterr().out)["jobs"]] == [20, 0, None]


def test_parameters_have_short_names_that_differ() -> None:
    keys = ["Optimizer.lr.max_lr", "Global.local_batch_size", "Data.Train.x", "Data.Eval.x", "x", "lr.max"]
    assert short_names(keys) == ["max_lr", "local_batch_size", "Train.x", "Eval.x", "x", "max"]


def test_a_table_of_two_parameters_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 columns, what matters most is left."""
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    columns = result_columns(["Optimizer.lr.max_lr", "Global.local_batch_size"], "valid_loss")
    row = ["0", "3e-3", "12", "char-gpt-a39790-12", "COMPLETED", "2000", "4.36839"]
    shown = {width: fitted(columns, [row], width) for width in (40, 80)}
    names = {width: [columns[index].name for index in widths or ()] for width, widths in shown.items()}
    assert names[80] == ["run", "max_lr", "local_batch_size", "job", "state", "step", "valid_loss"]
    assert names[40] == ["run", "max_lr", "state", "valid_loss"]


def test_options_that_the_file_overrules_are_named() -> None:
    typed = [Override("Launch.nodes", "2", "--nodes 2"), Override("Global.seed", "1", "-o Global.seed=1")]
    assert overruled(typed, [{"Launch.nodes": "1"}, {"Launch.nodes": "4"}]) == [
        "--nodes 2 has no effect: the sweep file sets Launch.nodes"
    ]
    assert overruled(typed, [{"Launch.nodes": "1"}, {"A": "4"}]) == [
        "--nodes 2 has no effect in 1 of 2 runs: the sweep file sets Launch.nodes"
    ]
