"""The other verbs as a person types them. The oracle is what the process prints and its exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from gptctl.cli import MODULE_OF, VERBS, cli
from gptctl.spec.resources import named_files
from trainer.config.tree import parse

TEMPLATES = named_files("templates/configs")


def test_topo_of_two_nodes(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Model: {name: 345M}\nGlobal: {local_batch_size: 2}\n")
    degrees = ["-o", "mp_degree=2", "-o", "pp_degree=2", "-o", "sharding_degree=2"]
    arguments = ["topo", "config", "--nodes", "2", "--gpus-per-node", "8", *degrees]
    answer = json.loads(gptctl(*arguments, "--json").stdout)
    rows = answer["ranks"]
    assert [row["rank"] for row in rows] == list(range(16))
    assert rows[11] == {
        "rank": 11, "node": 1, "local_rank": 3, "dp": 1, "pp": 0, "sharding": 1, "mp": 1, "data_rank": 3,
    }  # fmt: skip
    for axis, group in {"dp": [3, 11], "pp": [11, 15], "sharding": [9, 11], "mp": [10, 11]}.items():
        assert group in answer["groups"][axis]
        assert len(answer["groups"][axis]) == 8
    table = gptctl(*arguments).stdout.splitlines()
    assert len(table) == 18
    assert table[-5].split() == ["1", "11", "3", "1", "0", "1", "1", "10,11", "9,11", "11,15", "3,11"]
    assert len(gptctl(*arguments, "--rank", "3").stdout.splitlines()) == 3
    assert gptctl(*arguments, "--rank", "16").returncode == 2
    assert gptctl("topo", "config", "--gpus-per-node", "3", "-o", "mp_degree=2").returncode == 1


def test_collectives_of_a_rank(gptctl, tmp_path) -> None:
    """Of rank 0 unless told otherwise; bytes in JSON, readable sizes and their sums in the table."""
    (tmp_path / "config.yaml").write_text("Model: {name: 345M}\nGlobal: {local_batch_size: 2}\n")
    arguments = ["topo", "config", "--gpus-per-node", "4", "-o", "mp_degree=2", "-o", "pp_degree=2", "--collectives"]
    answer = json.loads(gptctl(*arguments, "--json").stdout)
    assert answer["rank"] == 0
    assert {row["axis"] for row in answer["collectives"]} == {"mp", "pp", "tied", "world"}
    assert answer["totals"]["total"]["sent"] == sum(row["sent"] for row in answer["collectives"])
    lines = gptctl(*arguments, "--rank", "3").stdout.splitlines()
    assert lines[0] == "Collectives of rank 3 per update: mp 2 × sharding 1 × pp 2 × dp 1"
    assert any(line.startswith("mp     all_reduce  loss: largest logit") for line in lines)
    assert lines[-1].startswith("more than needed, pp: every mp rank sends the whole hidden state")
    assert gptctl(*arguments, "--rank", "4").returncode == 2
    alone = gptctl("topo", "config", "--gpus-per-node", "1", "--collectives")
    assert alone.stdout == "A single rank sends nothing.\n"
    gptctl("init", "--force")  # the vocabulary of a text is known only when it is read
    assert gptctl("topo", "config", "--collectives").stdout.endswith("with 256 different characters.\n")


def test_init_writes_a_config_and_never_overwrites(gptctl, tmp_path) -> None:
    assert gptctl("init").returncode == 0
    assert (tmp_path / "config.yaml").read_text() == TEMPLATES["char-gpt"].read_text()
    assert gptctl("validate", "config").returncode == 0
    refused = gptctl("init", "dp8")
    assert (refused.returncode, (tmp_path / "config.yaml").read_text()) == (2, TEMPLATES["char-gpt"].read_text())
    assert gptctl("init", "dp8", "--force").returncode == 0
    assert (tmp_path / "config.yaml").read_text() == TEMPLATES["dp8"].read_text()
    assert gptctl("init", "dp8", "--output", "no/such/folder.yaml").returncode == 2
    unknown = gptctl("init", "sharding-8")
    assert unknown.returncode == 2
    assert "did you mean sharding8?" in unknown.stderr
    assert set(json.loads(gptctl("init", "--list", "--json").stdout)) == set(TEMPLATES)


def test_the_schema_accepts_every_template_and_refuses_a_wrong_key(gptctl) -> None:
    """The oracle is the jsonschema package."""
    import jsonschema

    schema = json.loads(gptctl("schema").stdout)
    jsonschema.Draft7Validator.check_schema(schema)
    for name, file in TEMPLATES.items():
        config = json.loads(gptctl("validate", str(file), "--json", "--resolved").stdout)["resolved"]
        jsonschema.validate(config, schema)
        assert parse(file.read_text(), name, []) is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"Distributed": {"mp_degre": 2}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"Global": {"device": "tpu"}}, schema)
    assert "Launch" in schema["properties"]
    assert schema["properties"]["Distributed"]["properties"]["mp_degree"]["description"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(gptctl, shell: str) -> None:
    result = gptctl("completion", shell)
    assert result.returncode == 0
    assert "_GPTCTL_COMPLETE" in result.stdout


COMPLETIONS = [
    ("gptctl va", ["validate"]),
    ("gptctl validate -o Distributed.mp", ["Distributed.mp_degree="]),
    ("gptctl validate --cluster slurm", ["slurm-example"]),
    ("gptctl init sh", ["sharding8"]),
]


@pytest.mark.parametrize(("typed", "completed"), COMPLETIONS)
def test_bash_completes(gptctl, tmp_path, typed: str, completed: list[str]) -> None:
    """Real bash, asked as it asks on the tabulator key."""
    script = tmp_path / "completion.bash"
    script.write_text(gptctl("completion", "bash").stdout)
    program = f'PATH="{Path(sys.executable).parent}:$PATH"; source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}; _gptctl_completion gptctl; echo "${{COMPREPLY[@]}}"'
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == completed


def test_rules_are_listed(gptctl) -> None:
    assert "num_attention_heads must be divisible by mp_degree" in gptctl("rules", "l002").stdout
    assert len(json.loads(gptctl("rules", "--json").stdout)) > 80
    assert gptctl("rules", "X999").returncode == 2


def verbs_and_help(gptctl) -> dict[tuple[str, ...], str]:
    """The help page of every verb that there is, those of a group too."""
    verbs = [(name,) for name in MODULE_OF]
    for group in ("clusters", "hosts", "sweep"):
        found = cli.get_command(click.Context(cli), group)
        verbs += [(group, name) for name in found.commands]
    return {verb: gptctl(*verb, "--help").stdout for verb in [(), *verbs]}


def options_of(verb: tuple[str, ...]) -> list[str]:
    """The first long name of every option that the verb takes."""
    command: click.Command = cli
    for name in verb:
        command = command.get_command(click.Context(command), name)
    shown = [each for each in command.params if each.name not in getattr(command, "refused", ())]
    return [
        next(name for name in each.opts if name.startswith("--")) for each in shown if each.param_type_name == "option"
    ]


def test_help_pages(gptctl) -> None:
    """They end with two or three examples and name every option; the summaries on the first page are those of the verbs."""
    pages = verbs_and_help(gptctl)
    for verb, text in pages.items():
        examples = text.split("Examples:")[1].strip().splitlines()
        assert 2 <= len(examples) <= 3, verb
        assert "..." not in text.replace("[ARGS]...", "").replace("JOBS...", ""), verb
        assert [name for name in options_of(verb) if not re.search(rf"[ ,]{name}\b", text)] == [], verb
    first_page = " ".join(pages[()].split())
    for verbs in VERBS.values():
        for verb, (_, summary) in verbs.items():
            assert f"{verb} {summary}" in first_page
            assert pages[verb,].split("\n\n")[1].split() == summary.split(), verb


def test_topo_of_a_large_world_is_quick(gptctl, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("Global: {seed: 1}\n")
    start = time.perf_counter()
    answer = json.loads(gptctl("topo", "config", "--nodes", "512", "--gpus-per-node", "8", "--json").stdout)
    one = gptctl("topo", "config", "--nodes", "65536", "--gpus-per-node", "1024", "--rank", "5")
    assert time.perf_counter() - start < 5
    assert (len(answer["ranks"]), len(answer["groups"]["dp"][0])) == (4096, 4096)
    assert one.stdout.splitlines()[-1].split()[-1] == "0-67108863"
    assert gptctl("topo", "config", "--nodes", "65536", "--gpus-per-node", "1024").returncode == 2


def test_keys_are_listed(gptctl) -> None:
    rows = json.loads(gptctl("keys", "distributed.sharding", "--json").stdout)
    assert rows[0] == {
        "key": "Distributed.sharding.sharding_degree",
        "default": "1",
        "meaning": "ranks that share one copy of the training state",
    }
    assert "Launch.rdzv.port" in gptctl("keys").stdout
    assert gptctl("keys", "nothing").returncode == 2


@pytest.mark.parametrize(
    ("typed", "error", "hint"),
    [
        (["sumbit"], "no such command: sumbit", "did you mean `gptctl submit`?"),
        (["xyz"], "no such command: xyz", "`gptctl --help` lists commands"),
        (["clusters", "shw"], "no such command 'shw'", "did you mean show? see `gptctl clusters --help`"),
        (["logs", "--folow"], "no such option '--folow'", "did you mean --follow? see `gptctl logs --help`"),
        (["submit", "--nodes"], "option '--nodes' requires an argument", "see `gptctl submit --help`"),
        (["cancel"], "missing argument 'JOBS...'", "see `gptctl cancel --help`"),
        (["submit", "a.py"], "a.py is a script, not a run config", "did you mean `gptctl submit -- a.py`?"),
        (
            ["render", "--nodes", "2", "a b.py", "--lr", "1"],
            "a b.py is a script, not a run config",
            "did you mean `gptctl render --nodes 2 -- 'a b.py' --lr 1`?",
        ),
        (
            ["render", "--nodes", "2", "--gpus-per-node", "1", "--style", "c10d", "--", "x.py"],
            "2 nodes, but no rendezvous endpoint is set",
            "add -o Launch.rdzv.endpoint=HOST:29400 with the address of node 0, or in single quotes "
            "'$MASTER_ADDR:29400'; or choose a cluster with --cluster",
        ),
        (
            ["submit", "-c", "a.yaml", "--", "-m", "trainer", "-c", "b"],
            "config given twice: a.yaml and b",
            "give only one",
        ),
    ],
)
def test_wrong_usage_is_reported_like_every_mistake(gptctl, typed: list[str], error: str, hint: str) -> None:
    done = gptctl(*typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {error}\nhint: {hint}\n"


def test_wrong_usage_as_json(gptctl) -> None:
    answer = json.loads(gptctl("logs", "--json", "--folow").stdout)
    assert answer["error"] == "no such option '--folow'"
    assert answer["hint"].startswith("did you mean --follow?")


def test_a_missing_script_is_an_error_of_every_verb(gptctl) -> None:
    """Not only of submit: a printed command would fail later, on the cluster."""
    script, tutorial, module = ["nosuch.py"], ["run_pretrain.py", "--mine", "1"], ["-m", "nosuch"]
    for verb, words in (
        (["render"], script),
        (["render"], tutorial),
        (["submit", "--dry-run"], script),
        (["submit"], module),
    ):
        done = gptctl(*verb, "--", *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: S001 Launch.entrypoint")
        assert "\nhint: " in done.stderr


def test_the_bundled_trainer_stands_in_for_a_tutorials_script(gptctl) -> None:
    """The printed command trains what the flags say; stderr says who runs."""
    done = gptctl("render", "--gpus-per-node", "2", "--", "run_pretrain.py", "--mp_degree", "2", "--input_dir", "a b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("  -m trainer -o mp_degree=2 -o 'input_dir=a b'\n")
    assert "notice: S020 Launch.entrypoint: run_pretrain.py does not exist" in done.stderr


def test_other_names_of_verbs() -> None:
    """In this process: a start of gptctl for each would take seconds."""
    names = {"ps": "list", "ls": "list", "kill": "cancel", "stop": "cancel", "run": "submit"}
    context = click.Context(cli)
    for name, verb in names.items():
        assert cli.resolve_command(context, [name, "x"])[::2] == (verb, ["x"])
    assert not set(names) & set(cli.list_commands(context))


def test_other_names_of_options(gptctl, tmp_path) -> None:
    """The oracle is the option under its own name; help pages show only that."""
    (tmp_path / "config.yaml").write_text("Global: {device: cpu}\n")
    first = gptctl("topo", "-c", "config", "--nnodes", "2", "--nproc_per_node", "2").stdout
    assert first == gptctl("topo", "config", "--nodes", "2", "--gpus-per-node", "2").stdout != ""
    assert "config given twice" in gptctl("validate", "config", "--config=config").stderr
    words = gptctl("submit", "--help").stdout.split()
    assert not {"--nnodes", "--nproc_per_node", "--nproc-per-node"} & set(words)
    assert {"--nodes", "--gpus-per-node", "-c,", "--config"} <= set(words)
    # A program after `--` is part of the usage line of every verb that takes one.
    assert "[CONFIG] [-- SCRIPT ARGS]" in " ".join(words)
    again = " ".join(gptctl("rerun", "--help").stdout.split())
    assert "JOB [-- SCRIPT ARGS]" in again
    assert "JOB [-- FLAGS]" in gptctl("resume", "--help").stdout
    assert all(text in again for text in ("--code now -- train.py", "-o Engine.max_steps=2000 --dry-run"))


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        (["render", "--style"], "s", ["standalone", "static", "srun-script", "sbatch"]),
        (["keys"], "Distributed.mp", ["Distributed.mp_degree"]),
        (["rules"], "l00", [f"L00{number}" for number in range(1, 10)]),
    ],
)
def test_the_shell_completes(words: list[str], incomplete: str, expected: list[str]) -> None:
    from click.shell_completion import ShellComplete

    found = ShellComplete(cli, {}, "gptctl", "_GPTCTL_COMPLETE").get_completions(words, incomplete)
    assert [item.value for item in found] == expected


def test_a_rule_is_explained(gptctl) -> None:
    text = gptctl("rules", "l002").stdout
    assert text.startswith("L002 (error): num_attention_heads must be divisible by mp_degree\n")
    (answer,) = json.loads(gptctl("rules", "L002", "--json").stdout)
    assert answer["code"] == "L002"
    for key in ("meaning", "wrong", "fixed"):
        assert answer[key].splitlines()[0] in text
    (outside,) = json.loads(gptctl("rules", "S004", "--json").stdout)
    assert (outside["wrong"], "This happens" in outside["meaning"]) == (None, True)
    assert gptctl("rules", "L999").returncode == 2
    some = json.loads(gptctl("rules", "t02", "--json").stdout)
    assert [rule["code"] for rule in some][:2] == ["T020", "T021"]
    assert all(rule["code"].startswith("T02") for rule in some)


def test_init_from_a_launch_command(gptctl, tmp_path) -> None:
    """Stdout has the command that submits the config; what has no counterpart is named on stderr."""
    line = "torchrun --nproc_per_node 8 --node_rank 0 pretrain_gpt.py --num-layers 2 --hidden-size 64 --swiglu --num-attention-heads 2"
    (tmp_path / "run.sh").write_text(f"#SBATCH -p gpu\n{line} --lr 1e-4 --train-iters 5 --lr-decay-style cosine\n")
    done = gptctl("init", "--from", "run.sh", "--output", "run.yaml")
    assert (done.returncode, done.stdout) == (0, "gptctl submit run.yaml --cluster NAME\n"), done.stderr
    assert done.stderr.splitlines() == [
        "not translated: --node_rank 0: not needed: gptctl computes it",
        "not translated: --swiglu: no counterpart: the model differs, it is GPT-2's",
        "wrote run.yaml; submit it with:",
    ]
    assert gptctl("validate", "run.yaml").returncode == 0
    again = gptctl("init", "--from", "run.sh", "--output", "run.yaml")
    assert (again.returncode, again.stderr.splitlines()[0]) == (2, "error: run.yaml already exists")
    answer = json.loads(gptctl("init", "--from", "run.sh", "--output", "run.yaml", "--force", "--json").stdout)
    assert answer["keys"]["Model.hidden_size"] == "64"
    assert answer["unmapped"][0] == {"what": "--node_rank 0", "reason": "not needed: gptctl computes it"}
    assert gptctl("init", "--from", "missing.sh").returncode == 2
    assert gptctl("init", "dp8", "--from", line).returncode == 2
