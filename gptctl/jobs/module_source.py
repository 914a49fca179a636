"""Find the files of a module that the ranks run with `-m`, as Python would, but without importing.

Importing a parent package would run the user's code on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path


def module_source(module: str, listed: Sequence[Path], folder: Path) -> Path | None:
    """The file or folder of the module's top package: a listed one, or one in the folder.

    None: it is not the user's file, so it must be installed where the ranks run.
    """
    top = module.partition(".")[0]
    names = (top, f"{top}.py")
    for path in listed:
        if path.name in names and path.exists():
            return path
    package, file = folder / top, folder / f"{top}.py"
    # Python's order: a package, a file, then a folder without __init__.py.
    for found in (package / "__init__.py", file):
        if found.is_file():
            return package if found.parent == package else file
    return package if package.is_dir() and is_runnable(module, package) else None


def is_runnable(module: str, source: Path) -> bool:
    """Whether `python -m MODULE` finds something to run below its top package."""
    parts = module.split(".")[1:]
    if source.is_file():
        return not parts
    inside = source.joinpath(*parts)
    as_file = bool(parts) and inside.with_name(f"{inside.name}.py").is_file()
    return as_file or (inside / "__main__.py").is_file()


def is_installed(module: str) -> bool:
    """Whether this interpreter could run the module, from wherever it is installed."""
    top, *rest = module.split(".")
    try:
        found = find_spec(top)
        for at, _ in enumerate(rest):
            places = found.submodule_search_locations if found else None
            found = PathFinder.find_spec(".".join([top, *rest[: at + 1]]), places or [])
        if found is None or found.submodule_search_locations is None:
            return found is not None
        main = PathFinder.find_spec(f"{module}.__main__", found.submodule_search_locations)
        return main is not None
    except (ImportError, ValueError, AttributeError):  # a name that no module can have
        return False
