"""One rank as the table of collectives sees it: its chunks, parameters and order of passes.

Computed from the config alone, like the table itself (`trainer/collectives.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainer.config.sections import Model, RunConfig
from trainer.layout import UNKNOWN_VOCAB, Layout, own_chunks, padded_vocab

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Row(NamedTuple):
    """Calls of one kind in an update. `nbytes`: of the whole message, before it is split."""

    what: str
    operation: str
    axis: str
    ranks: int  # of the group
    dtype: str
    nbytes: int
    when: str
    calls: int
    needed: int  # bytes that a rank sends per update, at least
    reason: str = ""  # why it sends more

    @property
    def sent(self) -> int:
        """Bytes that a rank sends per update, with a ring algorithm."""
        return on_the_wire(self.operation, self.ranks, self.nbytes * self.calls)


def on_the_wire(operation: str, ranks: int, nbytes: int) -> int:
    """The bytes that each rank of a group sends. Those it receives are counted by the sender."""
    rounds = {"all_reduce": 2 * (ranks - 1), "send": ranks, "recv": 0}
    return nbytes * rounds.get(operation, ranks - 1) // ranks


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


class Sender(NamedTuple):
    """One rank, with everything that its messages depend on."""

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
    def chunks(self) -> list[Chunk]:
        model = self.run.Model
        total = self.layout.pp * model.virtual_pp_degree
        own = own_chunks(self.layout, model.num_layers, model.virtual_pp_degree, self.rank)
        return [Chunk(number, layers, number == 0, number == total - 1) for number, layers in own]

    def row(
        self,
        what: str,
        operation: str,
        axis: str,
        dtype: str,
        nbytes: int,
        when: str,
        calls: int,
        needed: int | None = None,
        reason: str = "",
    ) -> Row:
        """A row; `needed`: bytes on the wire, if they are fewer than ours."""
        ranks = {"world": self.layout.world, "tied": 2, **self.layout._asdict()}[axis]
        row = Row(what, operation, axis, ranks, dtype, nbytes, when, calls, 0)
        least = row.sent if needed is None else min(needed, row.sent)
        return row._replace(needed=least, reason=reason if least < row.sent else "")


def passes(sender: Sender) -> list[tuple[int, str]]:
    """This rank's forward and backward passes in order: the index of the chunk, and when."""
    layout, m = sender.layout, sender.micro_batches
    virtual, stage = sender.run.Model.virtual_pp_degree, layout.coordinates(sender.rank).pp
    if virtual > 1:
        return list(_interleaved(m, virtual, layout.pp, stage))
    if layout.pp == 1:
        return [(0, FORWARD), (0, BACKWARD)] * m
    is_gpipe = sender.run.Distributed.pp_schedule == "GPipe"
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


def embeddings(sender: Sender, chunk: Chunk) -> list[Matrix]:
    """Parameters before the layers."""
    model, found = sender.run.Model, []
    if chunk.is_first or chunk.is_last:
        found.append(Matrix(sender.vocab_rows, model.hidden_size, True))
    if chunk.is_first:
        found.append(Matrix(model.max_position_embeddings, model.hidden_size, is_position=True))
    return found


def final_norm(sender: Sender, chunk: Chunk) -> list[Matrix]:
    return [Matrix(sender.run.Model.hidden_size)] * 2 if chunk.is_last else []


def all_matrices(sender: Sender) -> list[Matrix]:
    layer, found = matrices(sender.run.Model, sender.layout.mp), list[Matrix]()
    for chunk in sender.chunks:
        layers = layer * len(chunk.layers)
        found += [*embeddings(sender, chunk), *layers, *final_norm(sender, chunk)]
    return found
