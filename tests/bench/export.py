"""What an export costs: `python tests/bench/export.py [345M 1.3B]` (or `make bench`), about two minutes and 11 GB of disk.

Checkpoints are synthetic, cut for four tensor-parallel ranks. Measured in a process of its own, after torch is imported: the
peak of its memory above that, as a multiple of the largest tensor, and the time. The peer is what conversion scripts do:
load the whole model, then `safetensors.torch.save_file`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench.recorder import record

MIB, RANKS = 1 << 20, 4
LIMIT = 3.0  # times the largest tensor


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS now, VmHWM its highest value."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measured(work: Any) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the highest value starts again
    before, began = memory("VmRSS"), time.perf_counter()
    work()
    return {"peak": memory("VmHWM") - before, "seconds": time.perf_counter() - began}


def ours(checkpoint: str, output: str) -> dict[str, float]:
    import trainer.tasks.arguments
    import trainer.weights.export  # noqa: F401
    from trainer.tasks.export_weights import main

    return measured(lambda: main([checkpoint, "--output", output]))


def back(source: str, output: str) -> dict[str, float]:
    """Import what was exported."""
    import trainer.weights.importing
    import trainer.weights.sources  # noqa: F401
    from trainer.tasks.import_weights import main

    return measured(lambda: main([source, "--output", output]))


def everything_at_once(checkpoint: str, output: str) -> dict[str, float]:
    import torch
    from safetensors.torch import save_file

    from trainer.layout import Machines
    from trainer.tasks.arguments import open_checkpoint, task_config
    from trainer.weights.checkpoint_weights import CheckpointWeights
    from trainer.weights.families import hugging_face_name
    from trainer.weights.orders import to_hugging_face

    def convert() -> None:
        opened = open_checkpoint(checkpoint)
        model = task_config(opened, None, [], Machines(1, 1)).run.Model
        weights = CheckpointWeights(opened.folder, opened.facts, model)
        heads = model.num_attention_heads
        tensors = {name: weights.read(name) for name in weights.shapes}
        theirs = {hugging_face_name(name): to_hugging_face(name)(tensors[name], heads) for name in tensors}
        Path(output).mkdir()
        save_file(theirs, Path(output) / "model.safetensors", {"format": "pt"})
        with open(Path(output) / "model.safetensors", "rb+") as stream:
            os.fsync(stream.fileno())

    torch.set_num_threads(1)
    return measured(convert)


def make_checkpoint(folder: Path, preset: str, **changes: object) -> int:
    """Write a checkpoint with a file per rank. Returns the bytes of the largest tensor."""
    import torch

    from tests.weight_checkpoints import _cut
    from trainer.checkpoint.manifest import write_manifest
    from trainer.checkpoint.tensor_files import file_name, tensor_index, write_pieces
    from trainer.config import Override, load
    from trainer.layout import Machines
    from trainer.weights.checkpoint_weights import weight_shapes
    from trainer.weights.families import HUGGING_FACE
    from trainer.weights.importing import facts_of

    keys = {"Model.name": preset, **changes}
    run = load(None, [Override(key, str(value), "bench") for key, value in keys.items()], Machines(1, 1)).run
    shapes = weight_shapes(run.Model)
    folder.mkdir(parents=True)
    written = {}
    for rank in range(RANKS):
        pieces = {}
        for name, shape in shapes.items():
            piece = _cut(name, torch.full(shape, 0.01), RANKS, rank)
            if piece.at.numel:
                pieces[f"model.{name}"] = piece
        written[file_name(rank)] = write_pieces(folder / file_name(rank), pieces)
        del pieces
    facts = facts_of(run, Path("bench"), HUGGING_FACE, None)
    facts["tensors"] = tensor_index({name: each.tensors for name, each in written.items()})
    write_manifest(folder, facts, {name: each.facts for name, each in written.items()})
    return max(4 * torch.Size(shape).numel() for shape in shapes.values())


def in_a_process(function: str, checkpoint: Path, output: Path) -> dict[str, float]:
    words = [sys.executable, __file__, function, str(checkpoint), str(output)]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if result.returncode:
        sys.exit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def report(preset: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_DIR")))
    try:
        largest = make_checkpoint(folder / "step_0", preset)
        mine = in_a_process("ours", folder / "step_0", folder / "export")
        returned = in_a_process("back", folder / "export", folder / "back")
        for name in ("back", "export"):
            shutil.rmtree(folder / name)
        peer = in_a_process("everything_at_once", folder / "step_0", folder / "peer")
    finally:
        shutil.rmtree(folder)
    for name, cost in (("export", mine), ("import", returned), ("export, all at once", peer)):
        times = f"{cost['peak'] / MIB:.0f} MiB = {cost['peak'] / largest:.2f} × the largest tensor"
        print(f"{preset}: {name}: peak {times}, {cost['seconds']:.1f} s", flush=True)
    record(f"export of {preset}, seconds", ours=[mine["seconds"]], peer=[peer["seconds"]])
    record(f"export of {preset}, memory", ours=[mine["peak"] / largest], goal=LIMIT, unit="of the largest tensor")
    verdict = "ok" if mine["peak"] <= LIMIT * largest else f"OVER {LIMIT:g}"
    print(f"{preset}: limit of the export: {LIMIT:g} × {largest / MIB:.0f} MiB: {verdict}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["back"], ["everything_at_once"]):
        print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
    else:
        for preset in sys.argv[1:] or ["345M", "1.3B"]:
            report(preset)
