"""torch.compile for the layers of a model: `Engine.compile`.

Each layer is compiled apart: one graph serves all of them, and sharding, dropout seeds and
recomputation stay outside of it. Imports torch's compiler only if it is used.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.sections import RunConfig
from trainer.errors import UserError
from trainer.model import Compiler

# Devices on which `auto` compiles. Not the CPU: there, compiled layers took 1.03 of the time of a
# small model and 0.98 of a larger one (`tests/bench/compiling.py`), after seconds of compiling.
AUTO = ("cuda",)
BACKEND = "inductor"


class TorchCompiler(Compiler):
    def __init__(self, has_dropout: bool) -> None:
        # The dropout of eager code: otherwise what is dropped would depend on how code is compiled,
        # and so on the layout.
        self.options: dict[str, Any] = {}
        if has_dropout and BACKEND == "inductor":
            self.options["options"] = {"fallback_random": True}

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        # Few shapes occur, and code for any shape is slower.
        return torch.compile(function, backend=BACKEND, dynamic=False, **self.options)

    def eager(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        return torch.compiler.disable(function)


def compiler(run: RunConfig, device: str) -> Compiler:
    """The compiler for the layers, or one that leaves them as they are."""
    if not is_on(run.Engine.compile, device):
        return Compiler()
    model = run.Model
    return TorchCompiler(bool(model.hidden_dropout_prob or model.attention_probs_dropout_prob))


def is_on(wanted: str, device: str) -> bool:
    if wanted == "false" or (wanted == "auto" and device not in AUTO):
        return False
    missing = missing_tools(device)
    if wanted == "true" and missing:
        raise UserError(
            f"Engine.compile is true, but this machine has no {' and no '.join(missing)}",
            "install what is missing, or use Engine.compile: auto, which then does not compile",
        )
    return not missing


def missing_tools(device: str) -> list[str]:
    """What torch's compiler needs and this machine does not have."""
    compilers = [os.environ.get("CXX", "g++")]
    if device != "cpu":  # Triton compiles its launcher with a C compiler
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found = {
        f"{'C++' if device == 'cpu' else 'C'} compiler ({' or '.join(compilers)})": any(
            map(shutil.which, compilers)
        ),
        f"Python headers ({header})": header.exists(),
        "triton package": device == "cpu" or find_spec("triton") is not None,
    }
    return [name for name, is_found in found.items() if not is_found]
