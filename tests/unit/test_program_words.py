"""The words after `--`, and the files of a module. Oracles: overrides written by hand, and Python itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptctl.jobs.module_source import is_installed, is_runnable, module_source
from gptctl.jobs.preflight import check_program
from gptctl.planning.build import Site, build_plan
from gptctl.spec.check import check_config
from gptctl.spec.program_words import read_program
from trainer import rank_log
from trainer.config import load
from trainer.config.flags import parse_arguments
from trainer.errors import UserError

PADDLENLP = "--model_name_or_path gpt2-en --input_dir ./data --mp_degree=2 --use_amp --max-lr 0.00015".split()


@pytest.mark.parametrize(
    ("words", "entrypoint", "arguments"),
    [
        (["train.py", "--lr", "1"], "train.py", ["--lr", "1"]),
        (["-m", "pkg.mod", "-m", "--", "a b"], "-m pkg.mod", ["-m", "--", "a b"]),
        (["-mpkg.mod", "x"], "-m pkg.mod", ["x"]),
        (["null"], "null", []),
        (["-m", "trainer"], "trainer", []),
        (["-m", "trainer", *PADDLENLP], "trainer", []),
        (["run_pretrain.py", *PADDLENLP], "trainer", []),
        (["./gpt/run_pretrain_static.py", *PADDLENLP], "trainer", []),
        (["run_pretrain.py", *PADDLENLP, "--mine", "1"], "run_pretrain.py", [*PADDLENLP, "--mine", "1"]),
        (["run_pretrain.py"], "run_pretrain.py", []),
        (["tran.py", "--seed", "1"], "tran.py", ["--seed", "1"]),
    ],
)
def test_what_runs(words: list[str], entrypoint: str, arguments: list[str]) -> None:
    """None of the files exists."""
    checked = check_config(None, read_program(words, is_file=lambda path: False).overrides)
    assert (checked.launch.entrypoint, list(checked.launch.args)) == (entrypoint, arguments)


def test_flags_of_paddlenlp_are_keys_with_their_origin() -> None:
    program = read_program(["-m", "trainer", *PADDLENLP, "-o", "Engine.max_steps=7", "-c", "run.yaml", "seed=3"])
    assert (program.config, program.notices) == ("run.yaml", ())
    resolved = check_config(None, program.overrides).resolved
    assert resolved is not None
    assert (resolved.run.Model.name, resolved.run.Distributed.mp_degree) == ("gpt2-en", 2)
    assert (resolved.run.Engine.max_steps, resolved.run.Global.seed) == (7, 3)
    assert resolved.run.Engine.mix_precision.enable
    assert resolved.origins["Optimizer.lr.max_lr"] == "--max-lr 0.00015"


def test_gptctl_and_the_trainer_read_the_same_arguments_alike() -> None:
    """The oracle is the trainer's own command line."""
    words = [*PADDLENLP, "--device", "cpu", "Engine.max_steps=7"]
    checked = check_config(None, read_program(["-m", "trainer", *words]).overrides)
    config, overrides = parse_arguments(words)
    assert checked.resolved is not None
    assert checked.resolved.run == load(config, overrides, checked.machines).run


def test_a_tutorials_script_that_exists_is_run_itself() -> None:
    words = ["run_pretrain.py", *PADDLENLP]
    assert read_program(words, is_file=lambda path: True).entry[0].value == "run_pretrain.py"
    (notice,) = read_program(words, is_file=lambda path: False).notices
    assert str(notice).startswith("notice: S020 Launch.entrypoint: run_pretrain.py does not exist: the bundled trainer")


@pytest.mark.parametrize("words", [["-m"], ["-m", ""], ["--lr", "1"], ["-x.py"], ["-m", "trainer", "word"]])
def test_words_that_run_nothing(words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        read_program(words)
    assert error.value.hint


@pytest.mark.parametrize("text", ["-m", "-m .x", "-m a..b", "-m a/b", "-m a b", "-x", "-m a;b"])
def test_an_entrypoint_that_is_no_module(check, text: str) -> None:
    (finding,) = [each for each in check(f"Launch: {{entrypoint: '{text}'}}").findings if each.level == "error"]
    assert finding.message.startswith("invalid module")


def test_a_config_may_name_a_module(check) -> None:
    launch = check("Launch: {entrypoint: -m   pkg.mod}").launch
    assert (launch.entrypoint, launch.module) == ("-m pkg.mod", "pkg.mod")
    assert check("Launch: {entrypoint: -m trainer}").launch.entrypoint == "trainer"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for file in ("pack/__init__.py", "pack/train.py", "pack/deep/__main__.py", "plain/run.py", "single.py", "pack.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("print(__file__)")
    return tmp_path


@pytest.mark.parametrize(
    "module",
    "pack pack.train pack.deep pack.nothing plain plain.run single single.x nothing json.tool json.x 7".split(),
)
def test_modules_are_found_as_python_finds_them(packages: Path, module: str) -> None:
    """The oracle is `python -m` in that folder. Nothing is imported to know it."""
    found = module_source(module, [], packages)
    ours = is_runnable(module, found) if found else is_installed(module)
    ended = subprocess.run([sys.executable, "-m", module], cwd=packages, capture_output=True, text=True, input="1")
    assert ours == (ended.returncode == 0), ended.stderr
    if ours and found:
        assert Path(ended.stdout.strip()).is_relative_to(found)


def test_listed_files_come_before_those_of_the_folder(packages: Path, tmp_path: Path) -> None:
    """So a job is run again from its copies."""
    copy = tmp_path / "runs" / "pack"
    copy.mkdir(parents=True)
    assert module_source("pack.train", [copy], packages) == copy
    assert module_source("pack.train", [copy.with_name("other")], packages) == packages / "pack"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch.py"], "nosuch.py does not exist"),
        (["pack"], "pack is a folder"),
        (["-m", "nosuch.mod"], "there is no module nosuch.mod in "),
        (["-m", "pack.nosuch"], "has no module pack.nosuch that can be run"),
        (["-m", "rank_log"], "gptctl copies its own rank_log.py"),
    ],
)
def test_a_program_that_cannot_start(packages: Path, words: list[str], said: str) -> None:
    (packages / "rank_log.py").write_text("")
    site = Site(str(packages), sys.executable, str(packages))
    checked = check_config(None, read_program(words, is_file=lambda path: False).overrides)
    (finding,) = check_program(checked, build_plan(checked, site), site)
    assert finding.code == "S001"
    assert said in finding.message
    assert finding.hint


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_a_frozen_module_is_not_the_one_of_the_current_folder(tmp_path: Path, monkeypatch, version) -> None:
    """The same with Python 3.10, which has no -P. The oracle is what the module prints."""
    for folder in ("code", "work"):
        (tmp_path / folder / "pack").mkdir(parents=True)
        text = "import sys, pack.part\nprint(pack.part.WHERE, __name__, sys.argv[1:], '' in sys.path)"
        (tmp_path / folder / "pack/train.py").write_text(text)
        (tmp_path / folder / "pack/part.py").write_text(f"WHERE = {folder!r}")
    (tmp_path / "code/rank_log.py").write_text(Path(rank_log.__file__).read_text())
    program = "import runpy, sys; sys.version_info = VERSION; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [program.replace("VERSION", str(version)), str(tmp_path / "code/rank_log.py"), "-P", "-m", "pack.train"]
    env = {**os.environ, "GPTCTL_WORK_DIR": str(tmp_path / "work")}
    command = [sys.executable, "-c", *words, "a b", "-m"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.stdout == "code __main__ ['a b', '-m'] False\n", ended.stderr
