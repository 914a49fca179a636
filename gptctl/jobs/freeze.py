"""Write the folder of a job: config, profile, plan, scripts, code and the state of git.

The folder is complete before the job starts. A job runs from these copies, so later edits of the
user's files do not change it.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import cache_from_source
from itertools import chain
from pathlib import Path
from typing import Any

import trainer
from gptctl import engine
from gptctl.engine.contract import ENGINE_FILE, STARTUP_FOLDER
from gptctl.engine.file_reading import load_bytes
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.code_files import NOT_CODE, CodeCopy, CodeFiles
from gptctl.jobs.module_source import module_source
from gptctl.jobs.preflight import SCRIPT
from gptctl.jobs.written_config import WRITTEN
from gptctl.jobs.written_config import as_json as written_json
from gptctl.planning.build import Site, cluster_as_json
from gptctl.planning.user_templates import UserTemplate, effective
from gptctl.spec.check import NO_PATH, Checked
from gptctl.spec.summary import as_json
from trainer.config.corpora import Corpora
from trainer.config.kinds import FilePath, OutputPath, Section, keys_of
from trainer.config.sections import RunConfig
from trainer.errors import UserError

# The engine runs on hosts where gptctl is not installed.
ENGINE = (
    "gptctl/__init__.py",
    *(f"gptctl/engine/{file.name}" for file in sorted(Path(engine.__file__).parent.glob("*.py"))),
)
LARGEST_SOURCE = 1 << 20  # bytes of a Python file whose imports are followed


def freeze(
    folder: Path,
    plan: LaunchPlan,
    checked: Checked,
    site: Site,
    scripts: dict[str, str],
    templates: Sequence[UserTemplate],
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
        if isinstance(key.kind, Section):
            _make_absolute(key.kind.cls, value, site)
        elif value and _is_of_this_machine(key.kind, value) and value not in NO_PATH:
            values[name] = site.absolute(value)
        elif isinstance(key.kind, Corpora):
            values[name] = (
                site.absolute(value)
                if isinstance(value, str)
                else {site.absolute(path): weight for path, weight in value.items()}
            )


def _is_of_this_machine(kind: Any, path: str) -> bool:
    """Whether a key has a path that depends on where gptctl was started."""
    # A relative `OutputPath` is below the output folder, wherever that is.
    return isinstance(kind, FilePath) or (isinstance(kind, OutputPath) and path.startswith("~"))


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


def _copy_templates(target: Path, templates: Sequence[UserTemplate]) -> None:
    """Write the user's own templates, so that a rerun has them."""
    target.mkdir()
    for name, template in effective(templates).items():
        (target / name).write_bytes(template.file.data)


def _copy_code(code: Path, checked: Checked, site: Site) -> None:
    """Copy the trainer, or the user's script or module with what it needs."""
    code.mkdir()
    # Every rank starts through rank_log.py, which writes its log.
    shutil.copyfile(os.path.join(site.trainer, "rank_log.py"), code / "rank_log.py")
    _copy_startup(code.parent / STARTUP_FOLDER)
    if checked.launch.entrypoint == "trainer":
        shutil.copytree(site.trainer, code / "trainer", ignore=NOT_CODE)
        return
    launch = checked.launch
    listed = [Path(site.absolute(file)) for file in launch.files]
    program: Path | None = Path(site.absolute(launch.entrypoint))
    if launch.module:
        program = module_source(launch.module, listed, Path(site.folder))
    # A file may be both listed and imported: copy it once. An installed module has no files here.
    own = chain([program], imported_beside(program)) if program else []
    wanted = list(_checked(chain(own, listed), code.parent.parent))
    copier = CodeCopy()
    for source in wanted:
        _copy(source, code, copier)


def _copy_startup(folder: Path) -> None:
    """launch.sh and rank_log.py put this folder first: Python runs its sitecustomize.py."""
    folder.mkdir()
    # Ours, not the one of the job's own code, which may be older: it belongs to the engine.
    source = Path(trainer.__file__).parent / "startup.py"
    shutil.copyfile(source, folder / "sitecustomize.py")


def _copy(source: Path, code: Path, copier: CodeCopy) -> None:
    try:
        if source.is_dir():
            ignored = _ignored(code)
            target = code / source.name
            shutil.copytree(source, target, True, ignored, copy_function=copier.copy)
        else:
            copier.copy(str(source), str(code / source.name))
    except (shutil.Error, shutil.SpecialFileError) as error:
        hint = "remove it from Launch.files, or fix it"
        raise _refusal(source, f"cannot copy {source}: {_first_fault(error)}", hint) from None


def _ignored(code: Path) -> Callable[[str, list[str]], set[str]]:
    """Ignore what is not code, and the folder of runs itself."""
    # A listed folder may contain run_root: copying it would copy the copy, without end.
    runs = code.parent.parent

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {*NOT_CODE(folder, names), *(name for name in names if Path(folder, name) == runs)}

    return ignored


def _first_fault(error: OSError) -> str:
    """The first of the faults (source, target, reason) that copytree has collected."""
    listed = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return f"{listed[0][0]}: {listed[0][2]}" if listed else str(error)


def _refusal(source: Path, message: str, hint: str) -> UserError:
    found = SCRIPT.found("Launch.files", str(source), message, hint)
    return UserError("the job was not submitted", findings=[found])


def _checked(sources: Iterable[Path], runs: Path) -> Iterator[Path]:
    """Each source once; raise UserError before gigabytes, or something endless, are copied."""
    # `preflight` has checked what is listed; here are the modules that the program imports, too.
    # One by one: a program is checked before its imports are read.
    files, seen = CodeFiles([str(runs)]), set()
    for source in sources:
        if source in seen:
            continue
        seen.add(source)
        for problem in files.problems(str(source)):
            raise _refusal(source, problem.message, problem.hint)
        yield source


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
    # A file that does not parse fails when it runs, with Python's own message. Imports of a huge
    # one are not followed: it is data, and parsing takes seconds per MiB.
    try:
        tree = ast.parse(load_bytes(file, LARGEST_SOURCE))
    # Deep nesting is a MemoryError of the parser, or a RecursionError when the tree is built.
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
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
