"""Rules R1 to R9 of the design, and its layers. Oracles: the source text of every module, and what a fresh interpreter
has imported."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptctl.jobs.freeze import ENGINE
from tests.conftest import ROOT

TORCH_FREE = tuple(
    f"trainer.{name}"
    for name in "errors layout layout_rules config estimate memory tape rank_plan logit_chunks collectives logline durable checksums input_files rank_log cache_folder savings checkpoint_names corpus trace_files secret_names event_names trackers named_tuple".split()
)
HEAVY = ("torch", "numpy", "rich", "jinja2", "submitit", "paramiko", "yaml", "plotext", "textual")
ONE_FILE_EACH = ("rich", "jinja2", "submitit", "paramiko", "plotext", "textual")
UNWANTED_NAMES = ("utils.py", "helpers.py", "common.py")

# From the command line down to what runs on nodes: a module imports only from its own layer and from those below.
# The store of records is all that backends know of jobs.
LAYERS = (
    ("gptctl.__main__",),
    ("gptctl.cli",),
    ("gptctl.pages",),
    ("gptctl.doctor", "gptctl.jobs"),
    ("gptctl.backends",),
    ("gptctl.remote", "gptctl.logs"),
    ("gptctl.jobs.store", "gptctl.jobs.submission_order", "gptctl.jobs.last_state"),
    ("gptctl.planning",),
    ("gptctl.spec",),
    ("gptctl.engine", "gptctl.text", "gptctl.reporting", "gptctl.thinning", "gptctl"),
)


def modules(package: str) -> dict[str, Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


GPTCTL, TRAINER = modules("gptctl"), modules("trainer")


def imports(file: Path) -> set[str]:
    """Every module named by an import statement, wherever it stands; `from package import module` names the module."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found = {name for name in inner if name in GPTCTL or name in TRAINER}
            named |= found or {node.module}
    return named


def is_torch_free(module: str) -> bool:
    return (
        module.startswith("gptctl")
        or module == "trainer"
        or any((module + ".").startswith(name + ".") for name in TORCH_FREE)
    )


def layer_of(module: str) -> int:
    """The layer with the longest name that fits."""
    fitting = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if (module + ".").startswith(name + ".")
    ]
    return max(fitting)[1]


def test_hosts_get_all_that_their_agents_import() -> None:
    """However deep inside a function: gptctl is not installed there."""
    sent = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in ENGINE}
    for file in ENGINE:
        ours = {module for module in imports(ROOT / file) if module.split(".")[0] in ("gptctl", "trainer")}
        assert ours <= sent, file


def test_r1_trainer_never_imports_gptctl() -> None:
    for name, file in TRAINER.items():
        assert not {module for module in imports(file) if module.split(".")[0] == "gptctl"}, name


def test_r2_gptctl_imports_only_the_torch_free_half() -> None:
    for name, file in GPTCTL.items():
        of_trainer = {module for module in imports(file) if module.split(".")[0] == "trainer"}
        assert all(is_torch_free(module) for module in of_trainer), name


def test_r3_the_torch_free_half_imports_neither_torch_nor_numpy() -> None:
    """Except that the data tools import numpy, but only inside functions."""
    for name, file in {**GPTCTL, **TRAINER}.items():
        if is_torch_free(name):
            refused = ("torch",) if name.startswith("trainer.corpus") else ("torch", "numpy")
            assert not {module for module in imports(file) if module.split(".")[0] in refused}, name


def test_r3_importing_the_data_tools_loads_no_numpy() -> None:
    names = [name for name in TRAINER if name.startswith("trainer.corpus")]
    heavy = {"torch", "numpy", "tokenizers", "sentencepiece", "pyarrow", "zstandard"}
    program = "\n".join(f"import {name}" for name in [*names, "gptctl.cli.data"])
    assert not {module.split(".")[0] for module in loaded_by(program)} & heavy


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


def test_r4_the_cli_loads_nothing_heavy() -> None:
    assert not {module.split(".")[0] for module in loaded_by("import gptctl.cli")} & set(HEAVY)


def test_r4_a_piped_validate_loads_yaml_and_nothing_else_heavy() -> None:
    program = "import gptctl.spec.summary\nfrom gptctl.spec.check import *\ncheck_config(Path('templates/configs/dp8.yaml'), [])"
    assert {module.split(".")[0] for module in loaded_by(program)} & set(HEAVY) == {"yaml"}


def test_the_first_help_page_imports_no_verb() -> None:
    """One more verb costs nothing at start-up."""
    program = "from gptctl.cli import cli\ntry: cli(['--help'])\nexcept SystemExit: pass"
    verbs = {"gptctl.cli.config", "gptctl.cli.submit", "gptctl.cli.jobs", "gptctl.cli.logs", "gptctl.cli.clusters"}
    assert not loaded_by(program) & verbs


def test_r5_backends_do_not_import_each_other() -> None:
    for name, file in GPTCTL.items():
        if name.startswith("gptctl.backends."):
            others = {module.split(".")[2] for module in imports(file) if module.startswith("gptctl.backends.")}
            assert not others - {name.split(".")[2]}, name


@pytest.mark.parametrize("package", ONE_FILE_EACH)
def test_r6_one_file_for_each_big_package(package: str) -> None:
    users = [name for name, file in GPTCTL.items() if any(m.split(".")[0] == package for m in imports(file))]
    assert len(users) == 1


def test_r7_only_mesh_makes_process_groups() -> None:
    makers = ("init_process_group", "new_group", "init_device_mesh")
    for name, file in TRAINER.items():
        if name != "trainer.mesh":
            assert not any(maker in file.read_text(encoding="utf-8") for maker in makers), name


def comparisons_of_a_kind(file: Path) -> Iterator[int]:
    """Lines that compare something with the name of a kind of cluster, or look one up by it."""
    kinds = {"local", "slurm", "ssh"}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            operands = [key for key in node.keys if key]
        elif isinstance(node, ast.match_case):
            operands = [inner for inner in ast.walk(node.pattern) if isinstance(inner, ast.expr)]
        words = {inner.value for each in operands for inner in ast.walk(each) if isinstance(inner, ast.Constant)}
        is_kind = any(isinstance(each, ast.Attribute) and each.attr == "kind" for each in operands)
        if words & kinds and (is_kind or not isinstance(node, ast.Dict) or len(words & kinds) > 1):
            yield node.lineno


def test_r8_no_module_outside_the_backends_asks_for_a_kind() -> None:
    """Nor does a template. What is true of a kind is data, in one table."""
    allowed = ("gptctl.backends", "gptctl.doctor", "gptctl.spec.cluster_kinds")
    found = {
        name: lines
        for name, file in GPTCTL.items()
        if not name.startswith(allowed) and (lines := list(comparisons_of_a_kind(file)))
    }
    assert found == {}
    for template in (ROOT / "templates").rglob("*.j2"):
        assert not re.search(r"\bkind\b", template.read_text(encoding="utf-8")), template


def test_r9_the_engine_imports_itself_and_the_standard_library() -> None:
    for name, file in GPTCTL.items():
        if name.startswith("gptctl.engine"):
            for module in imports(file):
                is_own = module.startswith("gptctl.engine")
                assert is_own or module.split(".")[0] in sys.stdlib_module_names, (name, module)


def test_layers() -> None:
    for name, file in GPTCTL.items():
        for module in imports(file):
            if module.split(".")[0] == "gptctl":
                assert layer_of(module) >= layer_of(name), f"{name} imports {module}, which lies above it"


def test_no_cycle_of_imports() -> None:
    """Lazy ones and those for types included. A package's own __init__ is no reason: every import of a module runs it."""
    graph = {name: {module for module in imports(file) if module in GPTCTL} for name, file in GPTCTL.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for module in sorted(graph[name] - {name}):
                visit(module, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_one_name_one_class() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in GPTCTL.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_one_name_one_module() -> None:
    """Except a module of cli/ named after what it calls, and the same part of each backend."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in GPTCTL.items():
        is_exempt = name.startswith("gptctl.cli.") or file.stem in ("__init__", "__main__", "backend")
        if not is_exempt:
            places[file.stem].append(name)
    assert {stem: names for stem, names in places.items() if len(names) > 1} == {}


def test_no_module_holds_state() -> None:
    """Objects that change are passed in: no instance of a class of ours is made when a module is imported."""
    own = {
        node.name
        for file in GPTCTL.values()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and not any("NamedTuple" in ast.unparse(base) or "Protocol" in ast.unparse(base) for base in node.bases)
        and any(isinstance(inner, ast.FunctionDef) and inner.name == "__init__" for inner in node.body)
    }
    for name, file in GPTCTL.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                assert value.func.id not in own, f"{name}:{node.lineno}"


def test_the_only_reader_of_yaml_is_the_tree() -> None:
    users = [name for name, file in {**GPTCTL, **TRAINER}.items() if "yaml" in imports(file)]
    assert users == ["trainer.config.tree"]


def test_no_drawer_for_odds_and_ends() -> None:
    for file in [*GPTCTL.values(), *TRAINER.values()]:
        assert file.name not in UNWANTED_NAMES


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, file in {**GPTCTL, **TRAINER}.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield name, node


def test_functions_are_short() -> None:
    """At most 40 statements each; half of them have at most 8 lines, nine of ten at most 20."""
    for name, node in functions():
        statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
        assert statements <= 40, f"{name}.{node.name} has {statements} statements"
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for _, node in functions()]
    assert statistics.median(lengths) <= 8
    assert statistics.quantiles(lengths, n=10)[8] <= 20


def test_comments_say_why() -> None:
    """Enough of them to be worth reading: of all lines that are not empty, one in twenty has one."""
    lines = [line for file in [*GPTCTL.values(), *TRAINER.values()] for line in file.read_text("utf-8").splitlines()]
    written = [line for line in lines if line.strip()]
    commented = [line for line in written if re.search(r"(^|\s)# ", line)]
    assert len(commented) / len(written) >= 0.05


# Who reads files without `engine/file_reading.py`, and why that is safe.
OTHER_READERS = {
    "gptctl.engine.file_reading": "the reader itself",
    "gptctl.engine.processes": "the kernel writes /proc",
    "gptctl.engine.ranks_here": "the kernel writes /proc",
    "gptctl.engine.stacks": "the kernel writes /proc",
    "gptctl.engine.srun_node": "a descriptor that the job script opened",
    "gptctl.engine.atomic_files": "opens a folder to flush it",
    "gptctl.engine.agent": "/dev/null",
    "gptctl.engine.guard": "/dev/null",
    "gptctl.spec.rule_pages": "bundled files",
    "gptctl.spec.trust": "compares with bundled files",
    "gptctl.cli.config": "bundled files",
    "gptctl.remote.scripts": "bundled files",
}


def reads_by_itself(node: ast.AST) -> bool:
    """Whether this calls what reads a file or parses JSON without limits."""
    if not isinstance(node, ast.Call):
        return False
    words = ast.unparse(node.func).split(".")
    text = ast.unparse(node)
    if words[-2:] in (["json", "loads"], ["json", "load"]):
        return True
    if len(words) > 1 or isinstance(node.func, ast.Attribute):
        opens = words[-2:] == ["os", "open"] and "O_WRONLY" not in text
        return opens or words[-1] in ("read_text", "read_bytes")
    mode = next((ast.literal_eval(word) for word in node.args[1:2] if isinstance(word, ast.Constant)), "r")
    is_reading = isinstance(mode, str) and not {"w", "a", "x"} & set(mode)
    return words == ["open"] and is_reading and "opener=" not in text


def test_files_of_others_are_read_by_one_reader() -> None:
    """A FIFO, an endless or deeply nested file must not stop gptctl: see `engine/file_reading.py`."""
    found = {
        name
        for name, file in GPTCTL.items()
        if any(map(reads_by_itself, ast.walk(ast.parse(file.read_text(encoding="utf-8")))))
    }
    assert found - set(OTHER_READERS) == set()
    assert set(OTHER_READERS) - found == set(), "these need no exception any more"
