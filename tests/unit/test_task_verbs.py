"""Which checkpoint a verb means, and what it would run. Oracle: paths and words, by hand."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gptctl.backends import Backends
from gptctl.cli import cli
from gptctl.cli.session import Session
from gptctl.cli.tasks import generate
from gptctl.jobs.store import Store
from gptctl.jobs.submit import this_site
from gptctl.jobs.tasks import Task, check_task, foreground_script, seen_by
from gptctl.jobs.trained_models import TrainedModel, find_model
from gptctl.planning.build import JobIdentity
from tests.unit.test_jobs import record
from tests.unit.test_tasks import BASE, EVALUATION, GENERATION
from trainer.config import Override
from trainer.errors import UserError
from trainer.tasks import texts

CONFIG = {
    "Global": {"device": "cpu", "seed": 3, "global_batch_size": 64},
    "Model": {"name": "GPT", "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "vocab_size": 257},
    "Distributed": {"dp_degree": 8, "mp_degree": 2},
    "Offline_Eval": {"batch_size": 4},
}
BACKENDS = Backends(lambda text: None)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "records"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def saved(step: int, marker: str = "", folder: str = "output", **facts: Any) -> Path:
        place = tmp_path / folder / f"step_{step}"
        place.mkdir(parents=True)
        (place / "rank_0.safetensors").touch()
        if marker:
            (place / f"rank_0.safetensors.{marker}").touch()
        (place / "manifest.json").write_text(json.dumps({"config": CONFIG, "step": step, **facts}))
        return place

    return saved


def find(name: str, step: int | None = None) -> TrainedModel:
    return find_model(name, step, Store(), BACKENDS)


def test_the_newest_verified_checkpoint_is_used(save: Callable[..., Path]) -> None:
    """Not a newer one that nobody has read back; a damaged one only if there is no other."""
    good = save(10, "verified")
    save(20)
    save(30, "damaged")
    assert find("output").folder == str(good)
    assert find("output", 20).folder == str(good.with_name("step_20"))
    assert find("output/step_30").folder == str(good.with_name("step_30"))
    assert find("output").config["Global"]["seed"] == 3


def test_a_run_that_verified_nothing(save: Callable[..., Path]) -> None:
    save(10)
    save(20)
    save(30, "damaged")
    assert find("output").folder.endswith("step_20")


def test_a_path_comes_before_a_job_of_the_same_name(save: Callable[..., Path], place: Path) -> None:
    save(5, folder="gpt-1")
    save(7, folder="of-the-job")
    job = record("gpt-1", output_dir=str(place / "of-the-job"), local_dir=str(place / "runs/gpt-1"))
    assert Store().add(job)
    Store().accept(job)
    assert find("gpt-1").folder.endswith("gpt-1/step_5")
    os.rename("gpt-1", "elsewhere")
    found = find("gpt-1")
    assert found.folder.endswith("of-the-job/step_7")
    assert found.record
    assert found.record.id == "gpt-1"


def test_a_folder_without_checkpoints_hides_a_job(save: Callable[..., Path], place: Path) -> None:
    save(7, folder="of-the-job")
    job = record("gpt-1", output_dir=str(place / "of-the-job"), local_dir=str(place / "runs/gpt-1"))
    assert Store().add(job)
    Store().accept(job)
    (place / "gpt-1").mkdir()
    with pytest.raises(UserError) as caught:
        find("gpt-1")
    assert caught.value.message == "gpt-1 here contains no checkpoint, and hides the job gpt-1"
    assert str(place / "of-the-job") in caught.value.hint
    with pytest.raises(UserError, match=r"^gpt-1 contains no checkpoint"):
        find("./gpt-1")


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("./nowhere", None, ["./nowhere does not exist"]),
        ("nowhere", None, ["neither a path nor a job"]),
        ("empty", None, ["empty contains no checkpoint", "such as output/step_1000"]),
        ("hf", None, ["hf contains no checkpoint", "gptctl import hf --output NEW_FOLDER"]),
        ("output", 7, ["no checkpoint of step 7", "it has the steps 5"]),
        ("output/step_5", 7, ["is not the checkpoint of step 7"]),
        ("odd", None, ["cannot read odd/step_1/manifest.json"]),
        ("pipe", None, ["cannot read pipe/step_1/manifest.json"]),
        ("bare", None, ["contains no config"]),
    ],
)
def test_what_is_no_checkpoint(
    save: Callable[..., Path], place: Path, name: str, step: int | None, words: list[str]
) -> None:
    save(5)
    (place / "empty").mkdir()
    (place / "hf").mkdir()
    (place / "hf/model.safetensors").touch()
    (save(1, folder="odd") / "manifest.json").write_text("[" * 1000)
    pipe = save(1, folder="pipe") / "manifest.json"
    pipe.unlink()
    os.mkfifo(pipe)
    save(1, folder="bare", config=None)
    with pytest.raises(UserError) as caught:
        find(name, step)
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words), caught.value.message


def task(model: TrainedModel, *overrides: str, config: str | None = None) -> Task:
    typed = tuple(Override.parse(text) for text in overrides)
    return Task("eval", "evaluate", model, ("--cloze",), ("/data/text",), config, typed)


def test_a_task_has_its_own_layout(save: Callable[..., Path], place: Path) -> None:
    """The layout of the training, 16 ranks, is not that of the task; what is typed is checked before anything starts."""
    model = find(str(save(5)))
    checked = check_task(task(model), [], this_site(), is_job=False)
    assert (checked.machines.world, checked.is_valid) == (1, True)
    (place / "eval.yaml").write_text("Offline_Eval: {batch_size: 9}\nDistributed: {mp_degree: 2}\n")
    checked = check_task(task(model, config="eval.yaml"), [], this_site(), is_job=False)
    assert checked.resolved
    assert (checked.machines.world, checked.resolved.run.Offline_Eval.batch_size) == (2, 9)
    wrong = check_task(task(model, "Distributed.mp_degree=3"), [], this_site(), is_job=False)
    with pytest.raises(UserError) as caught:
        foreground_script(wrong, this_site(), BACKENDS)
    assert [finding.code for finding in caught.value.findings] == ["L002"]


def test_what_runs_in_the_foreground_and_as_a_job(save: Callable[..., Path], place: Path) -> None:
    """The same program and arguments; a job reads its config from its own folder."""
    (place / "eval.yaml").write_text("Offline_Eval: {batch_size: 9}\n")
    model = find(str(save(5)))
    typed = task(model, "Offline_Eval.max_seq_len=16", config="eval.yaml")
    here = foreground_script(check_task(typed, [], this_site(), False), this_site(), BACKENDS)
    words = f"-m trainer.tasks.evaluate --cloze -c {place}/eval.yaml -o Offline_Eval.max_seq_len=16 -- {model.folder} /data/text"
    assert here.rstrip().endswith(words)
    assert "torch.distributed.run" not in here
    checked = check_task(typed, [], this_site(), is_job=True)
    plan = BACKENDS.of("local").plan(checked, this_site(), JobIdentity("eval-1", "/runs/eval-1"))
    assert plan.program[1:] == (
        *("-P", "-m", "trainer.tasks.evaluate", "-c", "/runs/eval-1/config.json"),
        *("--cloze", "--", model.folder, "/data/text"),
    )
    assert checked.launch.files == (this_site().trainer,)
    assert checked.launch.job_name == "eval"


def test_several_ranks_start_through_torchrun(save: Callable[..., Path]) -> None:
    typed = task(find(str(save(5))), "Distributed.mp_degree=2")
    script = foreground_script(check_task(typed, [], this_site(), False), this_site(), BACKENDS)
    assert "torch.distributed.run --standalone --nproc-per-node=2" in script


def test_the_key_of_the_job_signs_and_verifies(save: Callable[..., Path], place: Path) -> None:
    """By its reference: gptctl never reads the key."""
    model = find(str(save(5)))
    (place / "run").mkdir()
    secrets = {"GPTCTL_CHECKPOINT_KEY": {"file": "/key"}, "OTHER": {"env": "OTHER"}}
    (place / "run/config.json").write_text(json.dumps({"resolved": {"Launch": {"secrets": secrets}}}))
    model = model._replace(record=record(local_dir=str(place / "run")))
    checked = check_task(task(model), [], this_site(), is_job=True)
    assert checked.launch.secrets == {"GPTCTL_CHECKPOINT_KEY": {"file": "/key"}}


def test_a_checkpoint_on_other_machines(save: Callable[..., Path], place: Path) -> None:
    """It cannot be used here, and the message says what can be done."""
    model = find(str(save(5)))._replace(is_here=False, record=record("gpt-1")._replace(cluster="lab"))
    checked = check_task(task(model), [], this_site(), is_job=False)
    with pytest.raises(UserError) as caught:
        seen_by(task(model), checked, None, BACKENDS)
    assert "gptctl fetch gpt-1 --checkpoints" in caught.value.hint
    assert "--cluster lab" in caught.value.hint


@pytest.mark.parametrize("text", [EVALUATION, "Model: {module: GPTEvalModule}\n" + EVALUATION, GENERATION % ""])
@pytest.mark.parametrize("is_job", [False, True])
def test_files_of_fleetx_for_tasks(save: Callable[..., Path], place: Path, text: str, is_job: bool) -> None:
    """gptctl checks them as the program reads them: the base file of a training, too, whose model is that of the checkpoint."""
    (place / "base.yaml").write_text(BASE.replace("device: gpu", "device: cpu"))
    (place / "eval.yaml").write_text(f"_base_: ./base.yaml\n{text}")
    model = {"name": "GPT", "hidden_size": 1024, "num_layers": 24, "num_attention_heads": 16, "vocab_size": 50304}
    saved = find(str(save(5, config={"Model": {**model, "ffn_hidden_size": 4096}})))
    checked = check_task(task(saved, config="eval.yaml"), [], this_site(), is_job)
    assert not [str(each) for each in checked.findings if each.level == "error"]
    assert checked.resolved
    assert checked.resolved.run.Model.ffn_hidden_size == 4096
    expected = (True, "./lambada_test.jsonl") if "Offline_Eval" in text else (False, None)
    offline = checked.resolved.run.Offline_Eval
    assert (offline.cloze_eval, offline.eval_path) == expected
    assert checked.machines.world == 1


def test_values_that_begin_with_a_dash(save: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The words that gptctl prints, read by the program's own parser."""
    save(5)
    words = ["generate", "output", "hi", "--stop", "---", "--stop", "-x", "--top-k", "5", "--greedy", "--dry-run"]
    cli(words, standalone_mode=False)
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    read = texts._parser("").parse_args(printed[printed.index("trainer.tasks.generate") + 1 :])
    assert (read.stop, read.top_k, read.greedy, read.prompts) == (["---", "-x"], "5", True, ["hi"])


def test_prompts_of_several_lines_arrive(save: Callable[..., Path], place: Path) -> None:
    """The oracle is the process that the script starts: it prints its arguments."""
    printer = place / "python"
    printer.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    printer.chmod(0o755)
    options, prompts = ("--stop", "\n", "--stop", "\t"), ("two\nlines\t'", "\r\n")
    typed = Task("generate", "generate", find(str(save(5))), options, prompts)
    site = this_site()._replace(python=str(printer))
    script = foreground_script(check_task(typed, [], site, False), site, BACKENDS)
    found = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode()
    assert found.split("\0")[2:-1] == [*options, "--", str(place / "output/step_5"), *prompts]
    plan = BACKENDS.of("local").plan(check_task(typed, [], site, True), site, JobIdentity("g-1", "/runs/g-1"))
    assert plan.program[-3:] == (str(place / "output/step_5"), *prompts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x" * 17_000], "prompt 1 has 17,000 characters"),
        (["x" * 16_000] * 7, "the prompts have 112,000 bytes"),
        (["fine", "\udcff\udcfe"], "prompt 2 is not valid UTF-8"),
        (["--stop", "\udcff", "fine"], "--stop is not valid UTF-8"),
    ],
)
def test_prompts_that_a_command_line_cannot_carry(save: Callable[..., Path], words: list[str], message: str) -> None:
    result = CliRunner().invoke(generate, [str(save(5)), *words, "--dry-run"], obj=Session())
    assert isinstance(result.exception, UserError)
    assert message in result.exception.message
    assert "--prompts prompts.jsonl" in result.exception.hint
