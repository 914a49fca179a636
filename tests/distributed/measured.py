"""Trains a layout with the trainer's own entry point, and notes on every rank what it holds and sends in an update."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import profile

from tests.distributed.layouts import Case
from tests.ranks import Ended, Ranks, tiny
from trainer import train as loop
from trainer.__main__ import main
from trainer.collectives import collectives
from trainer.counting import Call, Collectives
from trainer.data import LocalBatch
from trainer.estimate import state_bytes
from trainer.layout import Layout
from trainer.shared_memory import SWITCH
from trainer.state import Training

PROFILED = (Layout(pp=4), Layout(dp=2, sharding=2))  # beside those of two ranks: profiling takes its time
EVALUATION = {"eval_freq": 5, "eval_iters": 2, "test_iters": 1}


class Held(NamedTuple):
    """Bytes on a rank in its second update: after a forward pass, after every backward pass, and always."""

    parameters: int
    gradients: list[int]
    optimizer: int
    estimated: list[float]
    collectives: dict[str, int]  # of its third update, by name; only of few layouts


class Sent(NamedTuple):
    """The collectives of a rank from the gradients of its third update to those of its fourth."""

    counted: Counter[Call]
    computed: Counter[Call]


class Trained(NamedTuple):
    case: Case
    ended: Ended
    held: list[Held]
    sent: list[Sent]


def train(
    folder: Path,
    case: Case,
    accumulate: int = 1,
    recompute: bool = False,
    entry: Callable[[Sequence[str]], int] | None = None,
    **more: Any,
) -> Trained:
    keys = {**case.keys(accumulate, recompute), **EVALUATION, **more}
    folder.mkdir(exist_ok=True)
    # Over gloo, as between nodes: calls are counted where torch passes them on.
    ended = Ranks(tiny(**keys), case.world, folder, {SWITCH: "0"}, entry or measuring_main).wait(300)
    assert ended.ok, ended.text
    noted = [json.loads((folder / f"noted.{rank}").read_text()) for rank in range(case.world)]
    files = [folder / f"sent.{rank}" for rank in range(case.world)]
    sent = [json.loads(file.read_text()) for file in files if file.exists()]  # a short run has no fourth update
    return Trained(case, ended, [Held(**each) for each in noted], [Sent(*map(_calls, each)) for each in sent])


def measuring_main(arguments: Sequence[str]) -> int:
    """The trainer, whose second and third updates are watched."""
    compute_gradients, noted = loop.compute_gradients, {"collectives": {}}
    counting: list[Collectives] = []

    def watched(t: Training, batch: LocalBatch) -> Any:
        if t.progress.step == 2:
            counting.append(Collectives(t.mesh).__enter__())
        if t.progress.step == 3:
            counting[0].__exit__(None, None, None)
            rows = collectives(t.run, t.mesh.layout, t.mesh.rank)
            computed = Counter[Call]()
            for row in rows:
                computed[Call(row.operation, row.axis, row.dtype, row.nbytes)] += row.calls
            Path(f"sent.{t.mesh.rank}").write_text(json.dumps([[*x.items()] for x in (counting[0].calls, computed)]))
        if t.progress.step == 1:
            with _Bytes(t) as held:
                result = compute_gradients(t, batch)
            estimated = state_bytes(t.run, t.mesh.layout, t.mesh.at.pp)
            noted.update(parameters=held.parameters, gradients=held.gradients)
            noted["optimizer"] = sum(weight.optimizer_bytes for weight in t.optimizer.weights)
            noted["estimated"] = [estimated.parameters, estimated.gradients, estimated.optimizer]
            return result
        if t.progress.step != 2:
            return compute_gradients(t, batch)
        if t.mesh.world > 2 and t.mesh.layout not in PROFILED:
            Path(f"noted.{t.mesh.rank}").write_text(json.dumps(noted))
            return compute_gradients(t, batch)
        with profile() as profiled:
            result = compute_gradients(t, batch)
        names = [event.name for event in profiled.events() if event.name.startswith("gloo:")]
        noted["collectives"] = Counter(name.removeprefix("gloo:") for name in names)
        Path(f"noted.{t.mesh.rank}").write_text(json.dumps(noted))
        return result

    loop.compute_gradients = watched
    return main(arguments)


def _calls(items: list[Any]) -> Counter[Call]:
    return Counter({Call(*call): count for call, count in items})


class _Bytes:
    """Counts what is alive around every backward pass, FSDP's gathered parameters included."""

    def __init__(self, t: Training) -> None:
        self.t = t

    def __enter__(self) -> _Bytes:
        self.parameters, self.gradients = 0, []
        self.backward = torch.autograd.backward
        torch.autograd.backward = self._noted
        return self

    def __exit__(self, *_: object) -> None:
        torch.autograd.backward = self.backward

    def _alive(self) -> list[nn.Parameter]:
        """Those that updates change, and those that the layers have now: with sharding, others while they are gathered."""
        updated = [weight.parameter for weight in self.t.optimizer.weights]
        present = [parameter for part in self.t.parallel.parts for parameter in part.parameters()]
        return list({id(parameter): parameter for parameter in updated + present}.values())

    def _noted(self, *args: Any, **kwargs: Any) -> None:
        there = [parameter for parameter in self._alive() if _local(parameter).untyped_storage().size()]
        self.parameters = self.parameters or _bytes_of(there)
        self.backward(*args, **kwargs)
        gradients = [weight.main_gradient for weight in self.t.optimizer.weights]
        gradients += [parameter.grad for parameter in self._alive()]
        gradients += [gradient for part in self.t.parallel.parts for gradient in _accumulated(part)]
        self.gradients.append(_bytes_of(gradients))


def _accumulated(part: nn.Module) -> Iterator[Tensor | None]:
    """What FSDP keeps of half-precision gradients that it has not reduced yet, or not over all replicas."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield group._partial_reduce_output
                yield from (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes_of(tensors: Sequence[Tensor | None]) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors if tensor is not None)
