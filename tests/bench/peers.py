"""The same models in nanoGPT's loop, Hugging Face's Trainer and Lightning, in turns with ours: `make bench-peers`.

All run in one environment, with torch's own settings of threads and memory; ours sets its own. nanoGPT also runs with
fused AdamW, with glibc told to keep its memory, and compiled. The others train Hugging Face's own GPT-2 of the same sizes,
as fast as they go: SDPA, fused AdamW, no logging, no progress bar; ours logs every step. Each turn is a process of its
own that reports the median of its steps; the order of the turns rotates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

Runner = Callable[[tuple[int, ...], int, "Stopwatch", str], None]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.recorder import record

# Layers, hidden, heads, block, batch. Nothing is tuned to the first two only.
SIZES = {"4x128": (4, 128, 4, 64, 12), "8x512": (8, 512, 8, 128, 16), "6x384": (6, 384, 6, 256, 8)}
VOCAB = 96
ROUNDS = 3
STEPS = {"4x128": (30, 100), "8x512": (2, 6), "6x384": (3, 8)}  # to warm up, to measure
# glibc neither returns memory to the kernel nor maps large blocks, whose pages are cleared at each use.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_MMAP_MAX_": "0", "MALLOC_TOP_PAD_": str(64 << 20)}


class Stopwatch:
    """Takes the time at the end of every step."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.walls: list[float] = []
        self.cpus: list[float] = []

    def step(self) -> None:
        self.walls.append(time.perf_counter())
        self.cpus.append(time.process_time())

    def report(self) -> dict[str, float]:
        def each(times: list[float]) -> list[float]:
            return [b - a for a, b in pairwise(times)][self.warm_up :]

        return {"wall": median(each(self.walls)), "cpu": sum(each(self.cpus)) / len(each(self.cpus))}


def gpt2(size: tuple[int, ...]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, hidden, heads, block, _ = size
    config = GPT2Config(vocab_size=VOCAB, n_positions=block, n_embd=hidden, n_layer=layers, n_head=heads, use_cache=False, attn_implementation="sdpa", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config)


def samples(block: int) -> Any:
    import torch

    class Samples(torch.utils.data.Dataset[Any]):
        tokens = torch.randint(0, VOCAB, (100_000,))

        def __len__(self) -> int:
            return 90_000

        def __getitem__(self, number: int) -> dict[str, Any]:
            window = self.tokens[number : number + block]
            return {"input_ids": window, "labels": window}

    return Samples()


def hugging_face(size: tuple[int, ...], steps: int, watch: Stopwatch, folder: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step()

    arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=size[4], max_steps=steps, optim="adamw_torch_fused", use_cpu=True, save_strategy="no", logging_strategy="no", report_to=[], max_grad_norm=1.0, lr_scheduler_type="cosine", disable_tqdm=True, dataloader_pin_memory=False)  # fmt: skip
    Trainer(gpt2(size), arguments, train_dataset=samples(size[3]), callbacks=[Watch()]).train()


def lightning(size: tuple[int, ...], steps: int, watch: Stopwatch, folder: str) -> None:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2(size)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def on_train_batch_end(self, *args: Any) -> None:
            watch.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    loader = torch.utils.data.DataLoader(samples(size[3]), batch_size=size[4], shuffle=True)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder)  # fmt: skip
    trainer.fit(Module(), loader)


def ours(size: tuple[int, ...], steps: int, watch: Stopwatch, folder: str) -> None:
    from trainer import train
    from trainer.__main__ import main

    log_step = train.log_step

    def logged(*arguments: Any) -> None:
        log_step(*arguments)
        watch.step()

    train.log_step = logged
    layers, hidden, heads, block, batch = size
    keys = {
        "Global.device": "cpu",
        "Global.global_batch_size": batch,
        "Global.micro_batch_size": batch,
        "Engine.max_steps": steps,
        "Engine.check_accuracy": True,
        "Engine.save_load.output_dir": folder,
        "Model.name": "GPT",
        "Model.num_layers": layers,
        "Model.hidden_size": hidden,
        "Model.num_attention_heads": heads,
        "Data.Train.dataset.name": "CharDataset",
        "Data.Train.dataset.path": "builtin",
        "Data.Train.dataset.max_seq_len": block,
    }
    assert main([f"{key}={value}" for key, value in keys.items()]) == 0


def nano_gpt(is_fused: bool = False, is_compiled: bool = False) -> Runner:
    def run(size: tuple[int, ...], steps: int, watch: Stopwatch, folder: str) -> None:
        from tests.bench.nano_gpt import train

        train(VOCAB, size, steps, watch.step, is_fused, is_compiled)

    return run


class Contender(NamedTuple):
    run: Runner
    environ: Mapping[str, str] = MappingProxyType({})


RUNNERS = {
    "ours": Contender(ours),
    "nanoGPT": Contender(nano_gpt()),
    "nanoGPT, fused AdamW": Contender(nano_gpt(is_fused=True)),
    "nanoGPT, fused, memory kept": Contender(nano_gpt(is_fused=True), KEPT),
    "nanoGPT, compiled": Contender(nano_gpt(is_fused=True, is_compiled=True)),
    "Hugging Face Trainer": Contender(hugging_face),
    "Lightning": Contender(lightning),
}


def one_turn(name: str, size: str) -> dict[str, float]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **RUNNERS[name].environ}
    command = [sys.executable, __file__, name, size]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> int:
    if len(sys.argv) == 3:
        name, size = sys.argv[1:]
        warnings.filterwarnings("ignore")
        watch = Stopwatch(STEPS[size][0])
        with tempfile.TemporaryDirectory() as folder:
            RUNNERS[name].run(SIZES[size], sum(STEPS[size]) + 1, watch, folder)
        print(json.dumps(watch.report()))
        return 0
    rounds, chosen = int(os.environ.get("ROUNDS", ROUNDS)), os.environ.get("SIZES", "").split() or SIZES
    first_everywhere = True
    for size in chosen:
        *_, block, batch = SIZES[size]
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in RUNNERS}
        names = list(RUNNERS)
        for number in range(rounds):
            for name in names[number:] + names[:number]:
                turns[name].append(one_turn(name, size))
        load = os.getloadavg()[0]
        print(f"{size}, block {block}, batch {batch}: median of {rounds} turns, load average {load:.1f}")
        walls = {name: median(turn["wall"] for turn in each) for name, each in turns.items()}
        cpus = {name: median(turn["cpu"] for turn in each) for name, each in turns.items()}
        for name in RUNNERS:
            if name != "ours":
                mine, theirs = ([turn["wall"] for turn in turns[each]] for each in ("ours", name))
                record(f"step of {size} against {name}", ours=mine, peer=theirs, goal=1.0)
            rate, wall, cpu = batch * block / walls[name], walls[name] / walls["ours"], cpus[name] / cpus["ours"]
            print(
                f"  {name:<28} {walls[name] * 1e3:8.1f} ms  {rate:7.0f} tokens/s  {wall:.2f} × our time, {cpu:.2f} × our CPU seconds"
            )
        first_everywhere &= min(walls, key=lambda name: walls[name]) == "ours"
    return 0 if first_everywhere else 1


if __name__ == "__main__":
    sys.exit(main())
