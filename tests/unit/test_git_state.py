"""The state of a repository that its author made hostile. Oracle: a program that leaves a file behind when it runs, and
git itself on the same repository without that config."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from gptctl.engine import file_reading
from gptctl.jobs.git_state import copied_settings, git_state

HOME = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    environment = {**os.environ, **HOME}
    done = subprocess.run(["git", *own, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in HOME.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("print(1)\n")
    (folder / "data.bin").write_text("one\n")
    (folder / ".gitattributes").write_text("*.bin filter=evil diff=evil\n*.py filter=evil diff=evil\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    (folder / "train.py").write_text("print(2)\n")
    (folder / "data.bin").write_text("two\n")
    (folder / "new.txt").write_text("new\n")
    return folder


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A program that says that it was run, and with which words."""
    program = tmp_path / "trap"
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/ran\ncat 2> /dev/null\n')
    program.chmod(0o755)
    return program


def hostile_config(trap: Path) -> str:
    """Every setting of git that names a program and that some command of a submit could reach."""
    keys = {
        "core": "fsmonitor pager editor sshCommand gitProxy askPass alternateRefsCommand".split(),
        "diff": ["external"],
        'diff "evil"': ["command", "textconv"],
        'filter "evil"': ["clean", "smudge", "process"],
        "pager": "status diff branch config rev-parse symbolic-ref".split(),
        "alias": "status diff rev-parse".split(),
        "credential": ["helper"],
        "gpg": ["program"],
        "uploadpack": ["packObjectsHook"],
        'remote "origin"': ["uploadpack", "vcs"],
    }
    lines = [f"[{section}]\n" + "".join(f"\t{key} = {trap}\n" for key in names) for section, names in keys.items()]
    return "".join(lines)


def be_hostile(folder: Path, trap: Path, included: Path | None = None) -> None:
    hooks = trap.parent / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "pre-commit", "post-checkout", "fsmonitor-watchman", "reference-transaction"):
        (hooks / name).symlink_to(trap)
    text = hostile_config(trap) + f'[core]\n\thooksPath = {hooks}\n[filter "evil"]\n\trequired = true\n'
    target = included or folder / ".git" / "config"
    with open(target, "a") as config:
        config.write(text)
    if included:
        with open(folder / ".git" / "config", "a") as config:
            config.write(f"[include]\n\tpath = {included}\n")


@pytest.mark.parametrize("is_included", [False, True])
def test_a_hostile_repository_runs_nothing(repository: Path, trap: Path, is_included: bool) -> None:
    """And its state is the one that git shows without that config."""
    expected_status, expected_diff = (
        git(repository, "status", "--porcelain"),
        git(repository, "diff", "--binary", "HEAD"),
    )
    be_hostile(repository, trap, trap.parent / "included" if is_included else None)
    state = git_state(str(repository))
    assert not (trap.parent / "ran").exists(), (trap.parent / "ran").read_text()
    assert state["changed"] == expected_status.splitlines()
    assert state["diff"] == expected_diff
    assert state["diff_is_complete"] is True
    assert state["branch"] == "main"


def test_a_hostile_submodule_runs_nothing(repository: Path, trap: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "a.py").write_text("1\n")
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "first")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "inner")
    git(repository, "commit", "-q", "-m", "with inner")
    (repository / "inner" / "a.py").write_text("2\n")
    config = repository / ".git" / "modules" / "inner" / "config"
    config.write_text(config.read_text() + hostile_config(trap))
    assert git_state(str(repository))["commit"]
    assert not (trap.parent / "ran").exists(), (trap.parent / "ran").read_text()


def test_the_callers_variables_do_not_choose_repository_or_program(
    repository: Path, trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(trap))
    monkeypatch.setenv("GIT_PAGER", str(trap))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(trap))
    state = git_state(str(repository))
    monkeypatch.undo()
    assert state["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_repository_of_another_user_is_not_read(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: git's own safe.directory."""
    for place in (repository, repository / ".git"):
        os.chown(place, 65534, 65534)
    assert git_state(str(repository)) == {}
    own = tmp_path / "gitconfig"
    own.write_text(f"[safe]\n\tdirectory = {repository}\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(own))
    assert git_state(str(repository))["changed"]


def test_linked_worktrees_and_ignored_files(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    (repository / ".git" / "info" / "exclude").write_text("*.tmp\n")
    (tmp_path / "side" / "a.tmp").write_text("")
    (tmp_path / "side" / "train.py").write_text("print(3)\n")
    (tmp_path / "side" / "deeper").mkdir()
    state = git_state(str(tmp_path / "side" / "deeper"))
    assert (state["branch"], state["changed"]) == ("side", [" M train.py"])
    assert "+print(3)" in state["diff"]


@pytest.mark.parametrize("work_tree", ["..", "../..", "elsewhere"])
def test_a_work_tree_outside_of_the_repository_is_not_read(repository: Path, tmp_path: Path, work_tree: str) -> None:
    """Oracle: a file whose text would be in the diff. `..` is the repository itself; its parent contains it."""
    for place in (tmp_path, tmp_path / "elsewhere"):
        place.mkdir(exist_ok=True)
        (place / "train.py").write_text("secret\n")
    value = str(tmp_path / work_tree) if work_tree == "elsewhere" else work_tree
    git(repository, "config", "core.worktree", value)
    state = git_state(str(repository))
    assert "secret" not in str(state)
    assert bool(state) == (work_tree == "..")


def test_a_submodule_is_a_repository_of_its_own(repository: Path, tmp_path: Path) -> None:
    """Its .git is a file, and the config of its git folder sets core.worktree."""
    git(tmp_path, "clone", "-q", str(repository), "inner")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "inner"), "inner")
    (repository / "inner" / "train.py").write_text("print(4)\n")
    state = git_state(str(repository / "inner"))
    assert (state["branch"], state["changed"]) == ("main", [" M train.py"])


def test_all_commands_together_have_a_limit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git waits for a FIFO in `status` and in `diff`. What was found before is kept, and the user is told."""
    monkeypatch.setattr("gptctl.jobs.git_state.TIMEOUT", 2.0)
    monkeypatch.setattr(file_reading, "noticed", said := {})
    monkeypatch.setattr("gptctl.jobs.git_state._unanswered", set())
    for name in (".gitignore", ".gitattributes"):
        (repository / name).unlink(missing_ok=True)
        os.mkfifo(repository / name)
    began = time.monotonic()
    state = git_state(str(repository))
    assert time.monotonic() - began < 3.5  # not twice the limit, once for each command
    assert state["commit"]
    assert (state["changed"], state["diff"], state["diff_is_complete"]) == (None, None, False)
    assert said == {f"{repository}/.git": "git did not answer within 2 s; its state is incomplete"}
    began = time.monotonic()
    assert git_state(str(repository)) == {}
    assert time.monotonic() - began < 1


def test_a_large_diff_is_cut(repository: Path) -> None:
    (repository / "train.py").write_text("x = 1\n" * 400_000)
    state = git_state(str(repository))
    assert (len(state["diff"]), state["diff_is_complete"]) == (1 << 20, False)


def test_settings_that_are_copied() -> None:
    listed = (
        "global\0core.excludesfile\n~/ignored\0local\0core.excludesfile\n/dev/zero\0"
        "local\0core.filemode\nfalse\0local\0core.fsmonitor\n/bin/evil\0local\0core.eol\na\nb\0"
    )
    assert copied_settings(listed) == (("core.excludesfile", "~/ignored"), ("core.filemode", "false"))


def test_a_large_diff_of_long_characters_is_cut_and_says_so(repository: Path) -> None:
    """The limit is in bytes: the same text has fewer characters."""
    (repository / "train.py").write_text("# 训练\n" * 150_000)
    state = git_state(str(repository))
    assert len(state["diff"]) < 1 << 20
    assert state["diff_is_complete"] is False
