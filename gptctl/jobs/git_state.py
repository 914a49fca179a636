"""The state of the git repository that a job was submitted from: commit, branch, uncommitted diff.

A repository is not trusted: its config can name programs that git runs (fsmonitor, hooks, filters,
diff tools, pagers). So git only looks for the repository here; what it compares, it compares with a
git folder of our own, whose config names no program and which borrows objects and index.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.deadline import Deadline
from gptctl.engine.file_reading import notice, read_text
from gptctl.engine.messages import is_readable

MAX_OUTPUT = 1 << 20  # bytes of `git diff` and of `git status` that are kept
LONGEST_LINK = 8192  # bytes of a file .git, which contains one path
TIMEOUT = 10.0  # seconds for all commands: a submit must not wait longer, as for a FIFO in it
# Without the user's diff tools and colours: the diff must apply again.
DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary")
# Git would look for changes inside a submodule with that submodule's own config.
NO_SUBMODULES = "--ignore-submodules=dirty"
# Where git finds the user's own config, and with it safe.directory. All other variables are left
# out: inside a hook they describe another repository, and some name programs.
KEPT_VARIABLES = (
    *("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"),
    *("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM"),
)
FORMAT = "extensions.objectformat"
# Settings without which unchanged files would look changed. None of them names a program.
COPIED_SETTINGS = (
    *("core.filemode", "core.symlinks", "core.ignorecase", "core.autocrlf", "core.eol"),
    FORMAT,
)
# A file with patterns: the user's own, never one that a repository names.
OWN_SETTINGS = ("core.excludesfile",)


_unanswered: set[str] = set()  # repositories for which git took too long


class Repository(NamedTuple):
    """Where the parts of a repository are."""

    top: str
    git_dir: str  # index
    common_dir: str  # objects; another folder in linked worktrees
    commit: str
    branch: str
    settings: tuple[tuple[str, str], ...]


def git_state(folder: str) -> dict[str, Any]:
    """Commit, branch and uncommitted changes; empty outside of a repository."""
    repository = os.path.join(folder, ".git")
    # git did not answer before: the other jobs of a chain or a sweep do not wait for it again.
    if repository in _unanswered:
        return {}
    limit = Deadline(TIMEOUT)
    state = _state(folder, limit)
    if not limit.left:
        _unanswered.add(repository)
        notice(repository, f"git did not answer within {TIMEOUT:g} s; its state is incomplete")
    return state


def _state(folder: str, limit: Deadline) -> dict[str, Any]:
    found = _find(folder, limit)
    if not found:
        return {}
    with tempfile.TemporaryDirectory(prefix="gptctl-git-") as own:
        environment = _own_git_folder(Path(own), found)
        changed = _git(found.top, environment, limit, "status", "--porcelain", NO_SUBMODULES)
        diff = _git(found.top, environment, limit, *DIFF, NO_SUBMODULES, found.commit)
    return {
        "commit": found.commit,
        "branch": found.branch,
        "changed": None if changed is None else _text(changed).splitlines(),
        "diff": None if diff is None else _text(diff),
        "diff_is_complete": diff is not None and len(diff) <= MAX_OUTPUT,
    }


def _find(folder: str, limit: Deadline) -> Repository | None:
    """Let git find the repository, and refuse one that belongs to another user.

    These commands read the repository's config, but run nothing that it names.
    """
    environment = _environment()
    wanted = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir", "HEAD")
    words = _text(_git(folder, environment, limit, "rev-parse", *wanted)).splitlines()
    if len(words) != len(wanted):
        return None
    top, git_dir, common_dir, commit = words
    # Its config can name any folder as the work tree (core.worktree), such as the user's home.
    if not _is_work_tree(top, git_dir, folder):
        return None
    branch = _text(_git(folder, environment, limit, "symbolic-ref", "--quiet", "--short", "HEAD"))
    listed = _text(_git(folder, environment, limit, "config", "--list", "--null", "--show-scope"))
    common_dir = os.path.join(folder, common_dir)
    return Repository(top, git_dir, common_dir, commit, branch.strip(), copied_settings(listed))


def _is_work_tree(top: str, git_dir: str, folder: str) -> bool:
    """Whether `top` contains the folder, and the .git by which git found the repository."""
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(top)):
        return False
    link = os.path.join(top, ".git")
    if not os.path.isdir(link):
        # A linked worktree or a submodule: a file that says where the git folder is.
        prefix, _, target = read_text(Path(link), LONGEST_LINK).rstrip("\n").partition(": ")
        link = os.path.join(top, target) if prefix == "gitdir" else ""
    return bool(link) and os.path.realpath(link) == os.path.realpath(git_dir)


def copied_settings(listed: str) -> tuple[tuple[str, str], ...]:
    """The settings to copy, from `git config --list --null --show-scope`; the last one wins."""
    kept: dict[str, str] = {}
    fields = listed.split("\0")
    for scope, entry in zip(fields[::2], fields[1::2]):
        name, _, value = entry.partition("\n")
        is_own = scope in ("global", "system") and name in OWN_SETTINGS
        if (is_own or name in COPIED_SETTINGS) and value.isprintable():
            kept[name] = value
    return tuple(kept.items())


def _own_git_folder(own: Path, found: Repository) -> dict[str, str]:
    """Make a git folder with our config; return the environment in which git uses it."""
    (own / "refs").mkdir()
    (own / "HEAD").write_text(f"{found.commit}\n", encoding="utf-8")
    (own / "config").write_text(_config(found.settings), encoding="utf-8")
    # Patterns of files to ignore, and a shared index if the repository has one.
    (own / "info").symlink_to(os.path.join(found.common_dir, "info"))
    for shared in Path(found.git_dir).glob("sharedindex.*"):
        (own / shared.name).symlink_to(shared)
    return {
        **_environment(),
        "GIT_DIR": str(own),
        "GIT_WORK_TREE": found.top,
        "GIT_INDEX_FILE": os.path.join(found.git_dir, "index"),
        "GIT_OBJECT_DIRECTORY": os.path.join(found.common_dir, "objects"),
        # Not even the user's own config: .gitattributes of a repository chooses among its filters.
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }


def _config(settings: Sequence[tuple[str, str]]) -> str:
    version = 1 if any(name == FORMAT for name, _ in settings) else 0
    lines = [f"[core]\nrepositoryformatversion = {version}\nfsmonitor = false\n"]
    for name, value in settings:
        section, _, key = name.partition(".")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'[{section}]\n{key} = "{escaped}"\n')
    return "".join(lines)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in KEPT_VARIABLES
    }
    # A partial clone fetches what it lacks, with whatever program its config names.
    return {**kept, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}


def _git(
    folder: str, environment: Mapping[str, str], limit: Deadline, *arguments: str
) -> bytes | None:
    """The output of git, cut after what is kept; None if git failed or took too long."""
    if not limit.left:
        return None
    # No locks: a submit must not disturb git commands that run at the same time.
    command = ["git", "--no-pager", "--no-optional-locks", *arguments]
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    with process:
        try:
            output = _read_some(process, limit)
        finally:
            process.kill()
    is_cut = output is not None and len(output) > MAX_OUTPUT
    if output is None or (process.returncode and not is_cut):
        return None
    return output


def _text(output: bytes | None) -> str:
    """What is kept of an output."""
    return (output or b"")[:MAX_OUTPUT].decode(errors="replace")


def _read_some(process: subprocess.Popen[bytes], limit: Deadline) -> bytes | None:
    """Read the output up to a byte more than is kept; None after the limit."""
    assert process.stdout is not None
    output = b""
    while len(output) <= MAX_OUTPUT:
        if not is_readable(process.stdout.fileno(), limit.left):
            return None
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            # It has closed its output: it is about to exit.
            try:
                process.wait(max(limit.left, 0.1))
            except subprocess.TimeoutExpired:
                return None
            return output
        output += part
    return output
