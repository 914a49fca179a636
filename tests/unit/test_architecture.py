"""Rules R1 to R7 of the design. Oracles: the source text of every module, and what a fresh interpreter has imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from gptctl.jobs.freeze import ENGINE
from tests.conftest import ROOT

TORCH_FREE = tuple(f"trainer.{name}" for name in "errors layout config estimate logline durable rank_log".split())
HEAVY = ("torch", "numpy", "rich", "jinja2", "submitit", "paramiko", "yaml")
ONE_FILE_EACH = ("rich", "jinja2", "submitit", "paramiko")
UNWANTED_NAMES = ("utils.py", "helpers.py", "common.py")


def modules(package: str) -> dict[str, Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(file: Path) -> set[str]:
    """Every module named by an import statement, wherever it stands."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module}
    return named


def is_torch_free(module: str) -> bool:
    return (
        module.startswith("gptctl")
        or module == "trainer"
        or any((module + ".").startswith(name + ".") for name in TORCH_FREE)
    )


def test_hosts_get_all_that_their_agents_import() -> None:
    """However deep inside a function: gptctl is not installed there."""
    sent = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in ENGINE}
    for file in ENGINE:
        ours = {module for module in imports(ROOT / file) if module.split(".")[0] in ("gptctl", "trainer")}
        assert ours <= sent, file


def test_r1_trainer_never_imports_gptctl() -> None:
    for name, file in modules("trainer").items():
        assert not {module for module in imports(file) if module.split(".")[0] == "gptctl"}, name


def test_r2_gptctl_imports_only_the_torch_free_half() -> None:
    for name, file in modules("gptctl").items():
        of_trainer = {module for module in imports(file) if module.split(".")[0] == "trainer"}
        assert all(is_torch_free(module) for module in of_trainer), name


def test_r3_the_torch_free_half_imports_neither_torch_nor_numpy() -> None:
    for name, file in {**modules("gptctl"), **modules("trainer")}.items():
        if is_torch_free(name):
            assert not {module for module in imports(file) if module.split(".")[0] in ("torch", "numpy")}, name


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return {module.split(".")[0] for module in result.stdout.split()}


def test_r4_the_cli_loads_nothing_heavy() -> None:
    assert not loaded_by("import gptctl.cli") & set(HEAVY)


def test_r4_a_piped_validate_loads_yaml_and_nothing_else_heavy() -> None:
    program = "import gptctl.spec.summary\nfrom gptctl.spec.check import *\ncheck_config(Path('templates/configs/dp8.yaml'), [])"
    assert loaded_by(program) & set(HEAVY) == {"yaml"}


def test_r5_backends_do_not_import_each_other() -> None:
    for name, file in modules("gptctl").items():
        if name.startswith("gptctl.backends."):
            others = {module.split(".")[2] for module in imports(file) if module.startswith("gptctl.backends.")}
            assert not others - {name.split(".")[2]}, name


@pytest.mark.parametrize("package", ONE_FILE_EACH)
def test_r6_one_file_for_each_big_package(package: str) -> None:
    users = [name for name, file in modules("gptctl").items() if any(m.split(".")[0] == package for m in imports(file))]
    assert len(users) <= 1


def test_r7_only_mesh_makes_process_groups() -> None:
    makers = ("init_process_group", "new_group", "init_device_mesh")
    for name, file in modules("trainer").items():
        if name != "trainer.mesh":
            assert not any(maker in file.read_text(encoding="utf-8") for maker in makers), name


def test_the_only_reader_of_yaml_is_the_tree() -> None:
    users = [name for name, file in {**modules("gptctl"), **modules("trainer")}.items() if "yaml" in imports(file)]
    assert users == ["trainer.config.tree"]


def test_no_drawer_for_odds_and_ends() -> None:
    for file in [*modules("gptctl").values(), *modules("trainer").values()]:
        assert file.name not in UNWANTED_NAMES


def test_functions_are_short() -> None:
    """At most 40 statements a function, as the house style says."""
    for name, file in {**modules("gptctl"), **modules("trainer")}.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
                assert statements <= 40, f"{name}.{node.name} has {statements} statements"
