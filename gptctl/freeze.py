"""Makes the folder of a job: config, plan, scripts, code and the state of git, all of it before the job exists.

Nothing that is edited later can change a job that was submitted.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gptctl.check import Checked
from gptctl.plan import LaunchPlan, Site, cluster_as_json
from gptctl.report import absolute, frozen_config
from trainer.errors import UserError

MAX_CODE = 200 << 20
MAX_DIFF = 1 << 20
_NOT_CODE = shutil.ignore_patterns("__pycache__", ".git", ".venv*", "*.pyc")


def freeze(folder: Path, plan: LaunchPlan, checked: Checked, site: Site, scripts: dict[str, str]) -> None:
    """Writes everything into a new folder; its modes are the caller's umask."""
    folder.mkdir(parents=True)
    _write(folder / "config.json", json.dumps(frozen_config(checked, site.folder), indent=1, ensure_ascii=False) + "\n")
    _write(folder / "cluster.json", json.dumps(cluster_as_json(checked.cluster), indent=1) + "\n")
    _write(folder / "plan.json", json.dumps(plan.as_json(), indent=1) + "\n")
    for name, text in scripts.items():
        _write(folder / name, text)
        (folder / name).chmod(0o700)
    _copy_code(folder / "code", checked, site)
    _write(folder / "git.json", json.dumps(git_state(site.folder), indent=1) + "\n")


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _copy_code(code: Path, checked: Checked, site: Site) -> None:
    code.mkdir()
    shutil.copyfile(os.path.join(site.trainer, "rank_log.py"), code / "rank_log.py")
    if checked.launch.entrypoint == "trainer":
        shutil.copytree(site.trainer, code / "trainer", ignore=_NOT_CODE)
        return
    script = Path(absolute(checked.launch.entrypoint, site.folder))
    listed = [Path(absolute(file, site.folder)) for file in checked.launch.files]
    wanted = dict.fromkeys([script, *listed, *imported_beside(script)])
    _check_size(wanted)
    for source in wanted:
        target = code / source.name
        if target.exists():
            raise UserError(f"{source} and another file have the same name", "rename one of them: they share a folder")
        if source.is_dir():
            shutil.copytree(source, target, ignore=_NOT_CODE)
        else:
            shutil.copyfile(source, target)


def _check_size(sources: Iterable[Path]) -> None:
    size = 0
    for source in sources:
        for file in source.rglob("*") if source.is_dir() else [source]:
            size += file.stat().st_size if file.is_file() else 0
            if size > MAX_CODE:
                hint = "Launch.files is for code; name data by its path"
                raise UserError(f"{source} makes the shipped code larger than {MAX_CODE >> 20} MiB", hint)


def imported_beside(script: Path) -> Iterator[Path]:
    """The modules beside a script that it imports, and those that they import: without them it would not start."""
    pending, seen = [script], {script}
    while pending:
        file = pending.pop()
        for name in _imports(file):
            for found in (script.parent / f"{name}.py", script.parent / name):
                if found not in seen and (found.is_file() or (found / "__init__.py").is_file()):
                    seen.add(found)
                    pending += [found] if found.is_file() else found.rglob("*.py")
                    yield found


def _imports(file: Path) -> set[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names}


def git_state(folder: str) -> dict[str, Any]:
    """Commit, branch and what is not committed; empty outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain").splitlines()
    return {
        "commit": commit,
        "branch": _git(folder, "branch", "--show-current").strip(),
        "changed": changed,
        "diff": _git(folder, "diff", "HEAD")[:MAX_DIFF] if changed else "",
    }


def _git(folder: str, *arguments: str) -> str:
    command = ["git", "-C", folder, "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode(errors="replace") if result.returncode == 0 else ""
