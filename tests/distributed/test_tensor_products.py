"""The products and messages of tensor parallelism on two ranks. Oracles: torch's autograd on whole products, formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import Ranks
from trainer.config.sections import Model
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.model import GPT, Block, Components, initial_value
from trainer.parallel.tensor import ColumnLinear, Group, RowLinear, TensorComponents, split_dim
from trainer.slices import Slice

B, T, C, MP, VOCAB = 3, 8, 16, 2, 32
MODEL = Model(
    name="GPT",
    vocab_size=VOCAB,
    vocab_size_divisible_unit=1,
    hidden_size=C,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=4 * C,
    max_position_embeddings=T,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
HALF = torch.bfloat16


def on_two_ranks(folder: Path, check: Callable[[Group], None], sequence: bool) -> None:
    """Run a check on both ranks. It fails with the traceback of the rank that failed."""

    def entry(_: Sequence[str]) -> int:
        dist.init_process_group("gloo")
        layout = Layout(mp=MP)
        mesh = Mesh(layout, dist.get_rank(), 0, torch.device("cpu"), None, {"mp": dist.group.WORLD})  # type: ignore
        check(Group(mesh, sequence))
        dist.destroy_process_group()
        return 0

    ended = Ranks([], MP, folder, {}, entry).wait(60)
    assert ended.ok, ended.text


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def own_part(x: Tensor, mp: Group) -> Tensor:
    return x.chunk(MP, 1)[mp.rank] if mp.sequence_parallel else x


def close(here: Tensor | None, there: Tensor | None) -> bool:
    assert here is not None
    assert there is not None
    return torch.allclose(here, there, rtol=1e-5, atol=1e-5)


def check_products(mp: Group) -> None:
    """A column-parallel product, GELU and a row-parallel one: outputs and gradients are those of whole products."""
    x, into, bias, out = drawn(B, T, C), drawn(4 * C, C, seed=1), drawn(4 * C, seed=2), drawn(C, 4 * C, seed=3)
    whole = [tensor.requires_grad_() for tensor in (x, into, bias, out)]
    target = F.linear(F.gelu(F.linear(x, into, bias)), out)
    upstream = drawn(B, T, C, seed=4)
    (target * upstream).sum().backward()
    for by_samples in (False, True):
        one, other = ColumnLinear(C, 4 * C, mp, by_samples), RowLinear(4 * C, C, mp, by_samples)
        with torch.no_grad():
            one.weight.copy_(into.chunk(MP)[mp.rank])
            one.bias.copy_(bias.chunk(MP)[mp.rank])
            other.weight.copy_(out.chunk(MP, 1)[mp.rank])
            other.bias.zero_()
        own = own_part(x.detach(), mp).clone().requires_grad_()
        middle = one(own)
        assert middle.shape[:2] == (B, T) if by_samples else True
        y = other(F.gelu(middle))
        assert close(y, own_part(target, mp))
        (y * own_part(upstream, mp)).sum().backward()
        dx, d_into, d_bias, d_out = (tensor.grad for tensor in whole if tensor.grad is not None)
        assert close(own.grad, own_part(dx, mp))
        assert close(one.weight.grad, d_into.chunk(MP)[mp.rank])
        assert close(one.bias.grad, d_bias.chunk(MP)[mp.rank])
        assert close(other.weight.grad, d_out.chunk(MP, 1)[mp.rank])


@pytest.mark.parametrize("sequence", [False, True])
def test_products_are_those_of_one_rank(tmp_path: Path, sequence: bool) -> None:
    on_two_ranks(tmp_path, check_products, sequence)


class Operations(TorchDispatchMode):
    """Notes products and messages in their order, with the dtype and the number of elements of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.messages: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.names.append(name.removeprefix("c10d::"))
            self.messages.append((tensor.dtype, tensor.numel()))
        elif name in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.names.append("product")
        return func(*args, **(kwargs or {}))


def check_order(mp: Group) -> None:
    """The exchanges of a backward pass are started before a product that does not need them."""
    one = ColumnLinear(C, 4 * C, mp)
    nn.init.zeros_(one.weight)
    nn.init.zeros_(one.bias)
    y = one(own_part(drawn(B, T, C), mp).requires_grad_())
    with Operations() as done:
        y.sum().backward()
    total = ["alltoall_base_", "product"] if mp.sequence_parallel else ["allreduce_", "product"]
    gather = ["_allgather_base_"] if mp.sequence_parallel else []
    assert done.names == [*gather, "product", *total], done.names


@pytest.mark.parametrize("sequence", [False, True])
def test_messages_of_the_backward_pass_overlap_products(tmp_path: Path, sequence: bool) -> None:
    """Their order: (gather the input) product (sum its result) product."""
    on_two_ranks(tmp_path, check_order, sequence)


def built(components: Components, mp: Group) -> GPT:
    gpt = GPT(MODEL, components=components)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            dim, shape = split_dim(name), list(parameter.shape)
            if dim is not None and isinstance(components, TensorComponents):
                shape[dim] *= MP
                piece = Slice.of(tuple(shape)).chunk(dim, MP, mp.rank)
            else:
                piece = Slice.of(tuple(shape))
            parameter.copy_(initial_value(name, piece, MODEL, 1))
    return gpt


def check_dtypes(level: str, mp: Group) -> None:
    gpt, plain = built(TensorComponents(mp), mp), built(Components(), mp)
    if level == "O2":
        gpt, plain = gpt.to(HALF), plain.to(HALF)
    tokens = torch.arange(B * T).view(B, T) % VOCAB
    autocast = torch.autocast("cpu", HALF, enabled=level == "O1")
    with Operations() as done:
        with autocast:
            loss = gpt(tokens, tokens.roll(1))
        loss.backward()
    hidden = {dtype for dtype, numel in done.messages if numel % C == 0 and numel > 2 * B * T}
    assert hidden == {torch.float32 if level == "O0" else HALF}
    # The maximum, and the sums: fp32, and as small as B · T numbers.
    assert [each for each in done.messages if each[0] == torch.float32 and each[1] <= 2 * B * T] == [
        (torch.float32, B * T),
        (torch.float32, 2 * B * T),
    ]
    with autocast:
        expected = plain(tokens, tokens.roll(1))
    expected.backward()
    assert abs(loss / expected - 1) < (1e-6 if level == "O0" else 2e-3)
    names = dict(plain.named_parameters())
    for name, parameter in gpt.named_parameters():
        dim, whole = split_dim(name), names[name].grad
        assert whole is not None
        assert parameter.grad is not None
        wanted = (whole if dim is None else whole.chunk(MP, dim)[mp.rank]).float()
        found = parameter.grad.float()
        if dim is None and mp.sequence_parallel:  # the trainer sums these once per update
            dist.all_reduce(found)
        error = (found - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert error < (1e-5 if level == "O0" else 0.05), (name, error)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_hidden_states_travel_in_half_precision(tmp_path: Path, level: str, sequence: bool) -> None:
    """In both passes; only two small messages of the loss are fp32. Loss and gradients are near those of one rank."""
    on_two_ranks(tmp_path, partial(check_dtypes, level), sequence)


def saved_bytes(module: nn.Module, act: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass, without parameters; a shared storage counts once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # holds the tensors too, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        act()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def check_saved(dtype: torch.dtype, mp: Group) -> None:
    block = Block(MODEL, 0, TensorComponents(mp)).to(dtype)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = own_part(drawn(B, T, C), mp).to(dtype).clone().requires_grad_()
    shared = 1 / MP if mp.sequence_parallel else 1
    states = B * T * C * (4 * shared + 12 / MP) * dtype.itemsize
    statistics = 2 * 2 * B * T * shared * (4 if dtype == torch.float32 else 2)  # mean, 1 / deviation; of two norms
    logsumexp = B * T * MODEL.num_attention_heads / MP * 4
    assert saved_bytes(block, lambda: block(x)) == states + statistics + logsumexp


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_layer_keeps_only_its_part(tmp_path: Path, dtype: torch.dtype, sequence: bool) -> None:
    """Elements by arXiv 2205.05198, without dropout: b·s·h · (4 + 12 / t), with sequence parallelism b·s·h · 16 / t."""
    on_two_ranks(tmp_path, partial(check_saved, dtype), sequence)


def check_saved_head(mp: Group) -> None:
    """The gradient is made in the forward pass, so it stays until the backward pass: of this rank's part only."""
    gpt = built(TensorComponents(mp), mp)
    x = own_part(drawn(B, T, C), mp).clone().requires_grad_()
    labels = torch.arange(B * T).view(B, T) % VOCAB
    loss = gpt.head(x, gpt.word_embeddings.weight, labels, 1.0)
    assert loss.grad_fn.dx.shape == x.shape
    assert saved_bytes(gpt, lambda: gpt.head(x, gpt.word_embeddings.weight, labels, 1.0)) == 0


def test_the_head_keeps_only_its_part(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, check_saved_head, True)
