"""Layers: bases, overrides, and where a value came from. The oracle is the file and line a reader would point at."""

from __future__ import annotations

import pytest

from trainer.config import Override, load
from trainer.config.rules import value_at
from trainer.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    return write_file


def findings_of(file, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as caught:
        load(file, [Override.parse(override) for override in overrides])
    return [(finding.code, str(finding.place)) for finding in caught.value.findings]


def test_a_chain_of_bases_merges_and_the_child_wins(write) -> None:
    write("sub/grand.yaml", "Global: {seed: 1, micro_batch_size: 4}\nModel: {name: 345M}\n")
    write("base.yaml", "_base_: sub/grand.yaml\nGlobal: {seed: 2}\n")
    file = write("run.yaml", "_base_: base.yaml\nEngine: {max_steps: 7}\n")
    resolved = load(file)
    wanted = {"Global.seed": 2, "Global.micro_batch_size": 4, "Model.name": "345M", "Engine.max_steps": 7}
    assert {path: value_at(resolved.run, path) for path in wanted} == wanted
    origins = {path: resolved.origins[path].rsplit("/", 1)[-1] for path in wanted}
    assert origins == {
        "Global.seed": "base.yaml:2",
        "Global.micro_batch_size": "grand.yaml:1",
        "Model.name": "grand.yaml:2",
        "Engine.max_steps": "run.yaml:2",
    }


def test_not_inherited_replaces_the_section(write) -> None:
    write("base.yaml", "Model: {name: GPT, hidden_size: 64, num_layers: 2, num_attention_heads: 2}\n")
    file = write("run.yaml", "_base_: base.yaml\nModel:\n  _inherited_: False\n  name: 345M\n")
    assert load(file).run.Model.hidden_size == 1024
    file = write("run.yaml", "_base_: base.yaml\nModel:\n  name: 345M\n")
    assert load(file).run.Model.hidden_size == 64


def test_an_emptied_key_is_derived_again(write) -> None:
    write("base.yaml", "Global: {local_batch_size: 16, micro_batch_size: 2}\nModel: {name: 345M}\n")
    file = write("run.yaml", "_base_: base.yaml\nGlobal:\n  local_batch_size:\nModel:\n")
    run = load(file).run
    assert (run.Global.local_batch_size, run.Model.name) == (2, "345M")


def test_cycles_and_missing_bases_are_findings(write) -> None:
    write("a.yaml", "_base_: b.yaml\nGlobal: {seed: 1}\n")
    b = write("b.yaml", "Global: {seed: 2}\n_base_: a.yaml\n")
    assert [code for code, _ in findings_of(b)] == ["C015"]
    own = write("own.yaml", "_base_: own.yaml\nGlobal: {seed: 2}\n")
    assert findings_of(own) == [("C015", f"{own}:1")]
    missing = write("run.yaml", "Global: {seed: 2}\n_base_: nowhere.yaml\n")
    assert findings_of(missing) == [("C015", f"{missing}:2")]
    twice = write("run.yaml", "_base_: [a.yaml, b.yaml]\n")
    assert [code for code, _ in findings_of(twice)] == ["C015"]


OVERRIDES = [
    ("Distributed.mp_degree=2", "Distributed.mp_degree", 2),
    ("Optimizer.lr.max_lr=1e-3", "Optimizer.lr.max_lr", 1e-3),
    ("Model.use_recompute=yes", "Model.use_recompute", True),
    ("Data.Train.dataset.split.0=900", "Data.Train.dataset.split", (900, 50, 1)),
    ("Data.Train.dataset.split=[1, 2]", "Data.Train.dataset.split", (1, 2)),
    ("Data.Train.dataset.split=1,2,3", "Data.Train.dataset.split", (1, 2, 3)),
    ("Engine.save_load.output_dir=a=b=c", "Engine.save_load.output_dir", "a=b=c"),
    ("Engine.save_load.output_dir='x # y'", "Engine.save_load.output_dir", "x # y"),
    ("Engine.save_load.output_dir=x: y", "Engine.save_load.output_dir", "x: y"),
    ("Optimizer.grad_clip=0.5", "Optimizer.grad_clip.clip_norm", 0.5),
    ("Model={name: 345M}", "Model.hidden_size", 1024),
    ("Global.seed=", "Global.seed", 1024),
    ("Data.Train.dataset.split.000=900", "Data.Train.dataset.split", (900, 50, 1)),
]


@pytest.mark.parametrize(("override", "path", "value"), OVERRIDES)
def test_overrides(write, override: str, path: str, value: object) -> None:
    file = write("run.yaml", "Global: {seed: 5}\nData: {Train: {dataset: {split: '949,50,1'}}}\n")
    resolved = load(file, [Override.parse(override)])
    assert value_at(resolved.run, path) == value


def test_an_index_changes_an_unwritten_default(write) -> None:
    file = write("run.yaml", "Global: {seed: 5}\n")
    assert load(file, [Override.parse("Data.Train.dataset.split.1=40")]).run.Data.Train.dataset.split == (949, 40, 1)


def test_the_last_override_wins_and_is_named(write) -> None:
    file = write("run.yaml", "Global: {seed: 5}\n")
    resolved = load(file, [Override.parse("Global.seed=6"), Override.parse("Global.seed=7")])
    assert (resolved.run.Global.seed, resolved.origins["Global.seed"]) == (7, "-o Global.seed=7")


def test_wrong_overrides_are_findings_with_their_own_words(write) -> None:
    file = write("run.yaml", "Global: {seed: 5}\n")
    assert findings_of(file, "Distributed.mp_degre=2") == [("C010", "-o Distributed.mp_degre=2")]
    assert findings_of(file, "Distributed.mp_degree=two") == [("C011", "-o Distributed.mp_degree=two")]
    assert findings_of(file, "Data.Train.dataset.split.9=1") == [("C018", "-o Data.Train.dataset.split.9=1")]
    assert findings_of(file, "Model=[")[0] == ("C001", "-o Model=[")


@pytest.mark.parametrize("text", ["no equals", "=1", ".a=1", "a..b=1", "a.=1", "a." * 900 + "a=1"])
def test_what_is_no_override_is_wrong_usage(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Override.parse(text)
    assert caught.value.exit_code == 2


def test_origins_tell_defaults_presets_and_derived_values_apart(write) -> None:
    resolved = load(write("run.yaml", "Model:\n  name: 345M\n"))
    assert resolved.origins["Global.seed"] == "default"
    assert resolved.origins["Model.hidden_size"] == "derived: preset 345M"
    assert resolved.origins["Model.ffn_hidden_size"].startswith("derived: 4")


def test_resolved_json_loads_back_to_the_same_object(write) -> None:
    file = write("run.yaml", "Model: {name: 345M, no_recompute_layers: [1, 3]}\nOptimizer: {lr: {decay_steps: }}\n")
    resolved = load(file, [Override.parse("Engine.save_load.output_dir=“数据” \\ 'x'")])
    again = load(write("config.json", resolved.as_json()))
    assert again.run == resolved.run
    assert again.run.Optimizer.lr.decay_steps == 500000
    assert again.as_json() == resolved.as_json()


def test_a_long_chain_of_bases_ends(write) -> None:
    write("0.yaml", "Global: {seed: 1}\n")
    for number in range(1, 200):
        write(f"{number}.yaml", f"_base_: {number - 1}.yaml\nGlobal: {{seed: {number}}}\n")
    assert load(write("run.yaml", "_base_: 40.yaml\n")).run.Global.seed == 40
    assert [code for code, _ in findings_of(write("run.yaml", "_base_: 199.yaml\n"))] == ["C015"]


def test_control_characters_do_not_come_in_through_overrides(write) -> None:
    file = write("run.yaml", "Global: {seed: 5}\n")
    assert [code for code, _ in findings_of(file, "Engine.save_load.output_dir=a\x1bb")] == ["C006"]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "pipe")
    assert caught.value.exit_code == 2


def test_a_bare_grad_clip_merges_with_its_section(write) -> None:
    file = write("run.yaml", "Optimizer: {grad_clip: 0.5}\n")
    assert (
        load(file, [Override.parse("Optimizer.grad_clip.name=ClipGradByGlobalNorm")]).run.Optimizer.grad_clip.clip_norm
        == 0.5
    )


def test_an_index_of_eval_changes_what_train_has(write) -> None:
    file = write("run.yaml", "Data: {Train: {dataset: {split: [1, 2, 3]}}}\n")
    data = load(file, [Override.parse("Data.Eval.dataset.split.0=9")]).run.Data
    assert (data.Eval.dataset.split, data.Test.dataset.split) == ((9, 2, 3), (1, 2, 3))


def test_an_empty_override_takes_away_what_is_there(check) -> None:
    text = "Launch: {env: {A: 1}}\nModel: {name: 345M}\n"
    assert check(text, "Launch.env=").launch.env == {}
    assert check(text, "Model=").resolved.run.Model.name == "gpt2-en"
    merged = check(text, "Launch.env={}")
    assert (merged.launch.env, merged.launch_origins["Launch.env"].rsplit("/", 1)[-1]) == ({"A": "1"}, "run.yaml:1")


def test_one_word_with_a_comma_stays_one_word(check) -> None:
    assert check("Launch: {args: '--x=1,2'}\n", "Launch.args.0=--y").launch.args == ("--y",)


EMPTIED = [
    ("Engine: {max_steps: -1}\nOptimizer: {lr: {decay_steps: }}\n", "Optimizer.lr.decay_steps", 360000),
    ("Optimizer: {lr: {decay_steps: }}\nEngine: {max_steps: 77}\n", "Optimizer.lr.decay_steps", 77),
    ("Engine: {save_load: {save_steps: }}\n", "Engine.save_load.save_steps", 0),
    ("Engine: {max_steps: -1, num_train_epochs: 3}\n", "Engine.run_mode", "epoch"),
    ("Model: {no_recompute_layers: [3, 1, 3]}\n", "Model.no_recompute_layers", (1, 3)),
    ("Engine: {eval_iters: 7}\n", "Engine.test_iters", 70),
    ("Global: {device: cpu}\n", "Distributed.backend", "gloo"),
    ("Launch: {entrypoint: ''}\nGlobal: {seed: ''}\n", "Global.seed", 1024),
]


@pytest.mark.parametrize(("text", "path", "value"), EMPTIED)
def test_what_is_left_empty_is_derived(write, text: str, path: str, value: object) -> None:
    assert value_at(load(write("run.yaml", text)).run, path) == value
