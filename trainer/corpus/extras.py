"""Imports the libraries of the extra `data`, with one clear line if one is missing. Torch-free."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trainer.errors import UserError, install_line


def require(module: str, purpose: str) -> Any:
    """Import a library, or say what it is needed for and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # A broken installation is another problem than a missing one: say what Python says.
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        message = f"{purpose} needs {package}" + ("" if missing else f", which fails: {error}")
        raise UserError(message, f"install it: {install_line('data')}") from None
