"""A rerun is the config as written with other overrides.

The oracle is a fresh check of the same file with both sets of overrides: the resolved configs, the origins of all values
and the findings are equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptctl.backends import Backends
from gptctl.engine.atomic_files import private_files
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.freeze import freeze, frozen_config
from gptctl.jobs.rerun import Changes, prepare_rerun
from gptctl.jobs.store import JobRecord, Store, new_record
from gptctl.jobs.submit import Prepared, prepare, this_site
from gptctl.spec.check import Checked, check_config
from tests.conftest import save_checkpoint
from trainer.config import Override
from trainer.errors import UserError

BASE = """
_base_: base.yaml
Global: {device: cpu, local_batch_size: 8, micro_batch_size: 2}
Engine: {max_steps: 40, save_load: {save_steps: }}
Optimizer: {lr: {decay_steps: , max_lr: 1.0e-3}}
Launch: {nodes: 2, env: {A: "1e3"}, files: [notes]}
"""
SMALL = """
Model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, vocab_size: 64, name: GPT}
Data: {Train: {dataset: {name: CharDataset, path: builtin, max_seq_len: 16}}}
"""
PADDLE = """
model_name_or_path: gpt2-en
device: cpu
max_steps: 100
global_batch_size: 16
micro_batch_size: 2
use_pure_fp16: False
use_sharding: True
sharding_degree: 2
input_dir: ./data
"""
VALUES = {
    "Engine.max_steps": ["1", "3000", "0", "x"],
    "Launch.nodes": ["1", "4", "1:2", "0"],
    "Launch.gpus_per_node": ["1", "2", "4", ""],
    "Distributed.mp_degree": ["1", "2", "3"],
    "Distributed.dp_degree": ["", "1", "2"],
    "Distributed.sharding.sharding_degree": ["1", "2"],
    "Distributed.pp_degree": ["1", "2"],
    "Global.global_batch_size": ["", "16", "32"],
    "Global.local_batch_size": ["", "8"],
    "Global.micro_batch_size": ["1", "2"],
    "Optimizer.lr.decay_steps": ["", "500"],
    "Optimizer.lr.name": ["None", "CosineAnnealingWithWarmupDecay"],
    "Engine.save_load.save_steps": ["", "10"],
    "Engine.check_accuracy": ["True", "False"],
    "Data.Train.dataset.split.0": ["900"],
    "Data.Eval.dataset.split": ["[9, 1, 0]", "949,50,1"],
    "Model.name": ["gpt2-medium-en", "tiny", "GPT"],
    "Model.no_recompute_layers": ["[1, 0]", ""],
    "Launch.env.A": ["2", "a b", "'1e3'", "", "'it''s $(x)'", '"a\\nb"'],
    "Launch.env": ["{B: '0x1', C: ~}"],
    "Launch.secrets": ["{KEY: {file: notes}}"],
    "Launch.log_dir": ["./logs", ""],
    "Launch.job_name": ["other", "a b"],
    "Launch.slurm.extra.nice": ["7", ""],
    "Engine.save_load.ckpt_dir": ["./data", "auto"],
    "Global.seed": ["7"],
    "Engine.mix_precision.enable": ["True"],
    "Data.Train.dataset.path": ["./notes", "~/x", "builtin"],
    "_base_": ["other.yaml"],
    "Launch.args": ["[a, 'b c']"],
    "Launch": [""],
    "use_pure_fp16": ["true", "false"],
    "use_sharding": ["false", "true"],
    "max_lr": ["1e-4"],
    "Unknown.key": ["1"],
}
OVERRIDES = st.lists(
    st.sampled_from(sorted(VALUES)).flatmap(
        lambda key: st.sampled_from(VALUES[key]).map(lambda value: f"{key}={value}")
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerun")
    for name, text in {"own.yaml": BASE, "base.yaml": SMALL, "paddle.yaml": PADDLE, "notes": "x"}.items():
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    return folder


def parsed(overrides: list[str]) -> list[Override]:
    return [Override.parse(text) for text in overrides]


def frozen_job(checked: Checked, folder: Path, store: Store) -> JobRecord:
    """The folder of a job that was submitted, and its record; nothing is started."""
    backends = Backends(print)
    prepared = prepare(checked, store, backends, this_site())
    run = folder / "jobs" / os.urandom(6).hex()
    with private_files():
        run.parent.mkdir(exist_ok=True)
        freeze(run, prepared.plan, checked, prepared.site, prepared.scripts, (), {})
    plan = prepared.plan
    places = {"local_dir": str(run), "log_dir": str(run / "logs"), "output_dir": str(run / "output")}
    sizes = {"nodes": plan.nodes, "per_node": plan.per_node, "world": plan.world}
    return new_record(id=run.name, name="x", cluster="local", kind="local", config=str(checked.path), **places, **sizes)


def outcome(prepare_job: Callable[[], Prepared]) -> object:
    """What is known of a job before it starts: config, origins and findings; or why it was refused."""
    try:
        prepared = prepare_job()
    except UserError as error:
        return [(finding.code, finding.key, str(finding.place)) for finding in error.findings] or error.message
    checked = prepared.checked
    # As the job reads it: the paths of both are absolute there.
    frozen = frozen_config(checked, prepared.site)["resolved"]
    return frozen, checked.resolved.origins, checked.launch_origins, checked.machines


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["own.yaml", "paddle.yaml"]), first=OVERRIDES, second=OVERRIDES)
def test_a_rerun_is_a_fresh_submit(
    name: str, first: list[str], second: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    store, backends = Store(folder / "home"), Backends(print)
    before = check_config(Path(name), parsed(first))
    try:
        record = frozen_job(before, folder, store)
    except UserError:
        return  # it was never submitted
    both = check_config(Path(name), parsed([*first, *second]))
    fresh = outcome(lambda: prepare(both, store, backends, this_site()))
    again = outcome(lambda: prepare_rerun(record, store, backends, Changes(parsed(second))))
    assert again == fresh


DAMAGE = st.sampled_from([None, 5, -1, "", "x\ny", [], [1], {}, {"a": 1}, True])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["plan.json", "written.json", "config.json", "cluster.json", "git.json"]))
def test_a_damaged_folder_is_reported(
    data: st.DataObject, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a file holds, a rerun or a resume is prepared or refused: never an exception of Python."""
    monkeypatch.chdir(folder)
    store, backends = Store(folder / "home"), Backends(print)
    record = frozen_job(check_config(Path("own.yaml"), []), folder, store)
    save_checkpoint(record.run_folder / "output", 20)
    RunFolder(record.local_dir).finish("FAILED", "")
    file = record.run_folder / name
    values = json.loads(file.read_text())
    part, parent, key = values, None, None
    # One value, not too deep: what is read first.
    for _ in range(data.draw(st.integers(1, 5))):
        if not isinstance(part, dict) or not part:
            break
        parent, key = part, data.draw(st.sampled_from(sorted(part)))
        part = part[key]
    if parent is not None:
        parent[key] = data.draw(DAMAGE)
        file.write_text(json.dumps(values))
    changes = Changes(parsed(["Engine.max_steps=60"]), resume=data.draw(st.booleans()))
    outcome(lambda: prepare_rerun(record, store, backends, changes))


@pytest.mark.parametrize("name", ["own.yaml", "paddle.yaml"])
def test_the_configs_of_this_file_can_be_submitted(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the properties above would hold for nothing."""
    monkeypatch.chdir(folder)
    assert check_config(Path(name), []).is_valid
