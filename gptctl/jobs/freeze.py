"""Write the folder of a job: config, profile, plan, scripts, code and the state of git.

The folder is complete before the job starts. A job runs from these copies, so later edits of the
user's files do not change it.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import trainer
from gptctl import engine
from gptctl.engine.contract import ENGINE_FILE, STARTUP_FOLDER
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.module_source import module_source
from gptctl.jobs.written_config import WRITTEN
from gptctl.jobs.written_config import as_json as written_json
from gptctl.planning.build import Site, cluster_as_json
from gptctl.spec.check import NO_PATH, Checked
from gptctl.spec.summary import as_json
from trainer.config.kinds import FilePath, Section, keys_of
from trainer.config.resolve import NOT_BUILT_YET
from trainer.config.sections import RunConfig
from trainer.errors import UserError

MAX_CODE = 200 << 20  # bytes of a user's script and files: more is data by mistake
MAX_DIFF = 1 << 20  # characters of `git diff` that are kept
# Without the user's diff tools and colours: the diff must apply again.
PLAIN_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary")
# The engine runs on hosts where gptctl is not installed.
ENGINE = (
    "gptctl/__init__.py",
    *(f"gptctl/engine/{file.name}" for file in sorted(Path(engine.__file__).parent.glob("*.py"))),
)
_NOT_CODE = shutil.ignore_patterns("__pycache__", ".git", ".venv*", "*.pyc")


def freeze(
    folder: Path,
    plan: LaunchPlan,
    checked: Checked,
    site: Site,
    scripts: dict[str, str],
    templates: Sequence[Path],
    git: Mapping[str, Any],
) -> None:
    """Write everything into a new folder; the caller's umask sets the modes."""
    folder.mkdir(parents=True)
    _write(
        folder / "config.json",
        json.dumps(frozen_config(checked, site), indent=1, ensure_ascii=False) + "\n",
    )
    if checked.tree is not None:
        written = written_json(checked.tree, site.folder)
        _write(folder / WRITTEN, json.dumps(written, ensure_ascii=False) + "\n")
    _write(
        folder / "cluster.json",
        json.dumps(cluster_as_json(checked.cluster), indent=1, ensure_ascii=False) + "\n",
    )
    _write(folder / "plan.json", json.dumps(plan.as_json(), indent=1) + "\n")
    for name, text in scripts.items():
        _write(folder / name, text)
        (folder / name).chmod(0o700)
    # Copies keep the modes of their sources, so these are fixed afterwards.
    _copy_code(folder / "code", checked, site)
    pack_engine(folder / ENGINE_FILE)
    _copy_templates(folder / "templates", templates)
    _make_private(folder)
    _write(folder / "git.json", json.dumps(git, indent=1) + "\n")


def frozen_config(checked: Checked, site: Site) -> dict[str, Any]:
    """The resolved config with absolute paths, and with the origin of every value."""
    # The job may run in another folder than the one where gptctl was started.
    frozen = as_json(checked, with_config=True)
    resolved, launch = frozen["resolved"], frozen["resolved"]["Launch"]
    _make_absolute(RunConfig, resolved, site)
    launch["log_dir"] = launch["log_dir"] and site.absolute(launch["log_dir"])
    launch["files"] = [site.absolute(file) for file in launch["files"]]
    if launch["entrypoint"] != "trainer" and not checked.launch.module:
        launch["entrypoint"] = site.absolute(launch["entrypoint"])
    return frozen


def _make_absolute(cls: type, values: dict[str, Any], site: Site) -> None:
    for name, key in keys_of(cls).items():
        value = values[name]
        # Sections that nothing uses yet are left as they are.
        if isinstance(key.kind, Section) and name not in NOT_BUILT_YET:
            _make_absolute(key.kind.cls, value, site)
        elif isinstance(key.kind, FilePath) and value and value not in NO_PATH:
            values[name] = site.absolute(value)


def pack_engine(archive: Path) -> None:
    """The engine in one file: hosts get it for each job, and gptctl need not be installed there.

    With compiled modules where there are any: a host with the same Python starts in half the time.
    """
    import zipfile  # here, because a dry run packs nothing

    root = Path(__file__).parents[2]
    with zipfile.ZipFile(archive, "w", strict_timestamps=False) as packed:
        packed.write(root / "gptctl/engine/__main__.py", "__main__.py")
        for name in ENGINE:
            packed.write(root / name, name)
            compiled = cache_from_source(str(root / name))
            if os.path.exists(compiled):
                packed.write(compiled, f"{name}c")


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _make_private(folder: Path) -> None:
    """Make everything accessible to the owner only; executable files stay executable."""
    for entry in [folder, *folder.rglob("*")]:
        # chmod would follow the link and change the user's own file.
        if not entry.is_symlink():
            entry.chmod(0o700 if entry.is_dir() or entry.stat().st_mode & 0o100 else 0o600)


def _copy_templates(target: Path, templates: Sequence[Path]) -> None:
    """Copy the user's own templates, so that a rerun has them."""
    target.mkdir()
    # Of two templates with one name the first counts, so it is copied last.
    for place in reversed(templates):
        for file in sorted(place.glob("*.j2")) if place.is_dir() else [place]:
            shutil.copyfile(file, target / file.name)


def _copy_code(code: Path, checked: Checked, site: Site) -> None:
    """Copy the trainer, or the user's script or module with what it needs."""
    code.mkdir()
    # Every rank starts through rank_log.py, which writes its log.
    shutil.copyfile(os.path.join(site.trainer, "rank_log.py"), code / "rank_log.py")
    _copy_startup(code.parent / STARTUP_FOLDER)
    if checked.launch.entrypoint == "trainer":
        shutil.copytree(site.trainer, code / "trainer", ignore=_NOT_CODE)
        return
    launch = checked.launch
    listed = [Path(site.absolute(file)) for file in launch.files]
    program: Path | None = Path(site.absolute(launch.entrypoint))
    if launch.module:
        program = module_source(launch.module, listed, Path(site.folder))
    # A file may be both listed and imported: copy it once. An installed module has no files here.
    own = [program, *imported_beside(program)] if program else []
    wanted = dict.fromkeys([*own, *listed])
    _check_size(wanted)
    for source in wanted:
        _copy(source, code)


def _copy_startup(folder: Path) -> None:
    """rank_log.py adds this folder to the search path: Python runs sitecustomize.py first."""
    folder.mkdir()
    # Ours, not the one of the job's own code, which may be older: it belongs to the engine.
    source = Path(trainer.__file__).parent / "stack_dumps.py"
    shutil.copyfile(source, folder / "sitecustomize.py")


def _copy(source: Path, code: Path) -> None:
    try:
        if source.is_dir():
            shutil.copytree(source, code / source.name, symlinks=True, ignore=_ignored(code))
        else:
            shutil.copy(source, code / source.name)
    except (shutil.Error, shutil.SpecialFileError) as error:
        hint = "remove it from Launch.files, or fix it"
        raise UserError(f"cannot copy {source}: {_first_fault(error)}", hint) from None


def _ignored(code: Path) -> Callable[[str, list[str]], set[str]]:
    """Ignore what is not code, and the folder of runs itself."""
    # A listed folder may contain run_root: copying it would copy the copy, without end.
    runs = code.parent.parent

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {*_NOT_CODE(folder, names), *(name for name in names if Path(folder, name) == runs)}

    return ignored


def _first_fault(error: OSError) -> str:
    """The first of the faults (source, target, reason) that copytree has collected."""
    listed = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return f"{listed[0][0]}: {listed[0][2]}" if listed else str(error)


def _check_size(sources: Iterable[Path]) -> None:
    """Raise UserError before gigabytes of data are copied as code."""
    size = 0
    for source in sources:
        for file in source.rglob("*") if source.is_dir() else [source]:
            size += file.stat().st_size if file.is_file() else 0
            if size > MAX_CODE:
                hint = "list only code in Launch.files; give data as a path in args"
                raise UserError(
                    f"with {source}, the code to copy is larger than {MAX_CODE >> 20} MiB", hint
                )


def imported_beside(program: Path) -> Iterator[Path]:
    """The modules beside a script or package that it imports, directly or through others."""
    # Without them the program would not start from the folder of copies.
    pending = [program] if program.is_file() else list(program.rglob("*.py"))
    seen = {program}
    while pending:
        file = pending.pop()
        for name in _imports(file):
            for found in (program.parent / f"{name}.py", program.parent / name):
                if found not in seen and (found.is_file() or (found / "__init__.py").is_file()):
                    seen.add(found)
                    pending += [found] if found.is_file() else found.rglob("*.py")
                    yield found


def _imports(file: Path) -> set[str]:
    # A file that does not parse fails when it runs, with Python's own message.
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    return {name.partition(".")[0] for name in names}


def git_state(folder: str) -> dict[str, Any]:
    """Commit, branch and uncommitted changes; empty outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed, diff = _git(folder, "status", "--porcelain"), _git(folder, "diff", *PLAIN_DIFF, "HEAD")
    return {
        "commit": commit.strip(),
        "branch": (_git(folder, "branch", "--show-current") or "").strip(),
        "changed": None if changed is None else changed.splitlines(),
        "diff": diff and diff[:MAX_DIFF],
        "diff_is_complete": diff is not None and len(diff) <= MAX_DIFF,
    }


def _git(folder: str, *arguments: str) -> str | None:
    """The output of git, or None if it failed."""
    # No locks: a submit must not disturb git commands that run at the same time.
    command = ["git", "-C", folder, "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None
