"""What one rank holds and does in an update: its chunks, parameters and order of passes.

Computed from the config alone. The table of collectives (`collectives.py`) and the memory estimate
(`memory.py`) both start from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from trainer.config.sections import Model, RunConfig
from trainer.layout import UNKNOWN_VOCAB, Layout, own_chunks, padded_vocab
from trainer.logit_chunks import chunk_length
from trainer.named_tuple import NamedTuple

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Matrix(NamedTuple):
    """A parameter as an mp rank holds it."""

    rows: int
    columns: int = 1
    is_split: bool = False  # over the mp ranks
    is_position: bool = False


class Chunk(NamedTuple):
    """The layers of a pipeline chunk; without a pipeline, all of them."""

    number: int
    layers: range
    is_first: bool
    is_last: bool


class RankPlan(NamedTuple):
    """One rank, with everything that its messages and its memory depend on."""

    run: RunConfig
    layout: Layout
    rank: int

    @property
    def micro_batches(self) -> int:
        return self.run.Engine.accumulate_steps or 1

    @property
    def tokens(self) -> int:
        return self.run.Data.Train.dataset.max_seq_len * self.run.Global.micro_batch_size

    @property
    def dtype(self) -> str:
        """Of hidden states and gathered parameters."""
        amp = self.run.Engine.mix_precision
        return amp.dtype if amp.enable else "float32"

    @property
    def hidden_bytes(self) -> int:
        return self.tokens * self.run.Model.hidden_size * SIZES[self.dtype]

    @property
    def vocab_rows(self) -> int:
        model = self.run.Model
        vocab = padded_vocab(model.vocab_size or UNKNOWN_VOCAB, model.vocab_size_divisible_unit)
        return vocab // self.layout.mp

    @property
    def device(self) -> str:
        """The type of device, by torch's name."""
        return "cuda" if self.run.Global.device == "gpu" else "cpu"

    @property
    def logit_tokens(self) -> int:
        """Tokens whose logits exist at a time, if the loss is computed in chunks."""
        return chunk_length(self.device, self.vocab_rows)

    @property
    def chunks(self) -> list[Chunk]:
        model = self.run.Model
        total = self.layout.pp * model.virtual_pp_degree
        own = own_chunks(self.layout, model.num_layers, model.virtual_pp_degree, self.rank)
        return [Chunk(number, layers, number == 0, number == total - 1) for number, layers in own]


def passes(plan: RankPlan) -> list[tuple[int, str]]:
    """This rank's forward and backward passes in order: the index of the chunk, and when."""
    layout, m = plan.layout, plan.micro_batches
    virtual, stage = plan.run.Model.virtual_pp_degree, layout.coordinates(plan.rank).pp
    if virtual > 1:
        return list(_interleaved(m, virtual, layout.pp, stage))
    if layout.pp == 1:
        return [(0, FORWARD), (0, BACKWARD)] * m
    is_gpipe = plan.run.Distributed.pp_schedule == "GPipe"
    ahead = m if is_gpipe else min(m, layout.pp - stage)
    steady = [(0, BACKWARD), (0, FORWARD)] * (m - ahead)
    return [(0, FORWARD)] * ahead + steady + [(0, BACKWARD)] * ahead


def _interleaved(m: int, virtual: int, pp: int, stage: int) -> Iterator[tuple[int, str]]:
    """torch's order: rounds of micro-batches through every chunk, backward passes in reverse."""
    per_round = m // max(1, m // pp)
    ahead = min((virtual - 1) * per_round + 2 * (pp - 1 - stage), m * virtual)
    for step in range(m * virtual + ahead):
        if step < m * virtual:
            yield step // per_round % virtual, FORWARD
        if step >= ahead:
            yield virtual - 1 - (step - ahead) // per_round % virtual, BACKWARD


def matrices(model: Model, mp: int) -> list[Matrix]:
    """The parameters of a layer, in the order of the modules."""
    h, f = model.hidden_size, model.ffn_hidden_size
    norm = [Matrix(h), Matrix(h)]
    attention = [
        Matrix(3 * h // mp, h, True),
        Matrix(3 * h // mp, 1, True),
        Matrix(h, h // mp, True),
        Matrix(h),
    ]
    feed_forward = [
        Matrix(f // mp, h, True),
        Matrix(f // mp, 1, True),
        Matrix(h, f // mp, True),
        Matrix(h),
    ]
    return [*norm, *attention, *norm, *feed_forward]


def embeddings(plan: RankPlan, chunk: Chunk) -> list[Matrix]:
    """Parameters before the layers."""
    model, found = plan.run.Model, []
    if chunk.is_first or chunk.is_last:
        found.append(Matrix(plan.vocab_rows, model.hidden_size, True))
    if chunk.is_first:
        found.append(Matrix(model.max_position_embeddings, model.hidden_size, is_position=True))
    return found


def final_norm(plan: RankPlan, chunk: Chunk) -> list[Matrix]:
    return [Matrix(plan.run.Model.hidden_size)] * 2 if chunk.is_last else []


def all_matrices(plan: RankPlan) -> list[Matrix]:
    layer, found = matrices(plan.run.Model, plan.layout.mp), list[Matrix]()
    for chunk in plan.chunks:
        layers = layer * len(chunk.layers)
        found += [*embeddings(plan, chunk), *layers, *final_norm(plan, chunk)]
    return found


def elements(found: Iterable[Matrix]) -> int:
    return sum(matrix.rows * matrix.columns for matrix in found)


def shard_elements(found: Iterable[Matrix], ranks: int, index: int = 0) -> int:
    """Elements of a rank's shards. FSDP splits rows: the first rank has most of them."""
    own = 0
    for matrix in found:
        length = -(-matrix.rows // ranks)
        rows = min(matrix.rows, (index + 1) * length) - index * length
        own += matrix.columns * max(0, rows)
    return own


def layer_groups(plan: RankPlan, layers: range) -> Iterator[tuple[str, range]]:
    """The layers as the model runs them, and what is recomputed: its granularity, or nothing.

    Fully recomputed layers of a pipeline stage may form groups. All others are alone.
    """
    model, interval = plan.run.Model, 1
    granularity = model.recompute_granularity if model.use_recompute else ""
    if plan.layout.pp > 1 and granularity == "full":
        interval = plan.run.Distributed.pp_recompute_interval
    exempt = frozenset(model.no_recompute_layers)
    while layers:
        together = len(list(takewhile(lambda layer: layer not in exempt, layers[:interval])))
        yield (granularity if together else ""), layers[: max(1, together)]
        layers = layers[max(1, together) :]
