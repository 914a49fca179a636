"""A small trained model for tests of the tasks, and the programs that run it as ranks."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import trainer.tasks.evaluation
import trainer.tasks.serving
import trainer.tasks.texts  # noqa: F401 - imported once, for all forks
from tests.gpt2 import gpt2_of
from tests.ranks import Ended, Ranks, run, tiny
from trainer.config import Override, read_run, resolve
from trainer.config.task_config import task_tree
from trainer.inference.network import load_network
from trainer.layout import Layout, Machines
from trainer.mesh import Mesh
from trainer.tasks import evaluate, generate, serve
from trainer.tasks.arguments import open_checkpoint

MAINS = {"evaluate": evaluate.main, "generate": generate.main, "serve": serve.main}
# 4 layers and heads: mp and pp up to 4. After 240 steps the model can count.
KEYS: dict[str, Any] = {
    "layers": 4,
    "heads": 4,
    "max_steps": 240,
    "max_lr": 1e-2,
    "save_steps": 120,
    "decay_steps": 240,
}
COUNTING = "one two three four five six seven eight nine ten " * 40


@functools.cache
def _trained() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gptctl-trained-"))
    (folder / "counting.txt").write_text(COUNTING)
    ended = run(folder, *tiny(**KEYS, path="counting.txt"))
    assert ended.ok, ended.text
    return folder / "output"


def trained(folder: Path) -> Path:
    """A copy of the output folder of a run of 240 steps, with the checkpoints of steps 120 and 240."""
    shutil.copytree(_trained(), folder / "output")
    return folder / "output"


def start_task(name: str, folder: Path, *arguments: object, world: int = 1, **environ: str) -> Ranks:
    folder.mkdir(parents=True, exist_ok=True)
    return Ranks([str(word) for word in arguments], world, folder, environ, MAINS[name])


def task(name: str, folder: Path, *arguments: object, world: int = 1, **environ: str) -> Ended:
    return start_task(name, folder, *arguments, world=world, **environ).wait()


def json_of(ended: Ended) -> list[dict[str, Any]]:
    assert ended.ok, ended.text
    return [json.loads(line) for line in ended.out[0].splitlines()]


@functools.cache
def theirs() -> tuple[Any, str]:
    """transformers' model with the weights of step 240, and the characters that its tokens mean."""
    opened = open_checkpoint(str(_trained()))
    tree = task_tree(opened.facts["config"], "manifest", None, [Override.parse("Global.device=cpu")], [])
    assert tree is not None
    config = resolve(read_run(tree, []), Machines(1, 1)).run
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    network = load_network(opened.folder, opened.facts, config, mesh)
    return gpt2_of(network.part, config.Model), opened.facts["vocabulary"]


def layout_flags(**degrees: int) -> list[str]:
    """`-o` arguments for a layout."""
    paths = {"sharding": "sharding.sharding_degree", "stage": "sharding.sharding_stage"}
    words = [f"Distributed.{paths.get(axis, f'{axis}_degree')}={degree}" for axis, degree in degrees.items()]
    return [flag for word in words for flag in ("-o", word)]
