"""Which changes of a config save enough memory, by the estimate. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.config.resolve import batch_of, shape_of
from trainer.config.rules import value_at
from trainer.config.sections import RunConfig
from trainer.estimate import estimate
from trainer.layout import DEGREE_KEYS, Layout, divisors
from trainer.layout_rules import check_model
from trainer.named_tuple import NamedTuple

MOST = 3  # changes that a hint names
_AXES = [DEGREE_KEYS[axis] for axis in ("sharding", "mp", "pp", "dp")]


class Change(NamedTuple):
    values: dict[str, object]  # by config key
    run: RunConfig
    layout: Layout


def savings(run: RunConfig, layout: Layout, limit: float, most: int = MOST) -> list[str]:
    """Valid changes, each of which alone brings the estimate below a limit; the easiest first."""
    fitting: dict[tuple[str, ...], str] = {}
    for change in changes(run, layout):
        # Of the same keys, the first and smallest change that fits is enough.
        keys = tuple(change.values)
        if keys not in fitting and estimate(change.run, change.layout).memory.total <= limit:
            fitting[keys] = text_of(change, layout)
        if len(fitting) == most:
            break
    return list(fitting.values())


def advice(run: RunConfig, layout: Layout, limit: float) -> str:
    """A hint for a run that needs more memory than there is."""
    if enough := savings(run, layout, limit):
        first = "this change" if len(enough) == 1 else "any one of these changes"
        return f"{first} is enough: {'; '.join(enough)}"
    together = Change({}, run, layout)
    for _ in range(MOST):
        if not (best := _best(together.run, together.layout)):
            break
        # A later change of the same key replaces the earlier one.
        together = best._replace(values=together.values | best.values)
        if estimate(best.run, best.layout).memory.total <= limit:
            return f"these changes together are enough: {text_of(together, layout)}"
    return "raise sharding_degree, mp_degree or pp_degree"


def text_of(change: Change, layout: Layout) -> str:
    """`Distributed.mp_degree: 4, dp_degree: 2`, with the number of ranks if there must be more."""
    lines = [f"{key}: {value}" for key, value in change.values.items() if key not in _AXES]
    degrees = [f"{key}: {change.values[key]}" for key in _AXES if key in change.values]
    degrees[1:] = [degree.removeprefix("Distributed.") for degree in degrees[1:]]
    world = change.layout.world
    more = f" on {world} ranks" if world != layout.world else ""
    return "; ".join([*lines, *([", ".join(degrees) + more] if degrees else [])])


def changes(run: RunConfig, layout: Layout) -> Iterator[Change]:
    """Single changes that save memory: on the same ranks first, then on more of them."""
    model, sharding = run.Model, run.Distributed.sharding
    if not model.use_recompute:
        yield Change(
            {"Model.use_recompute": True},
            replace(run, Model=replace(model, use_recompute=True)),
            layout,
        )
    elif model.recompute_granularity != "full":
        whole = replace(run, Model=replace(model, recompute_granularity="full"))
        yield Change({"Model.recompute_granularity": "full"}, whole, layout)
    yield from _smaller_micro_batches(run, layout)
    if layout.sharding > 1 and sharding.sharding_stage < 3:
        stage3 = replace(run.Distributed, sharding=replace(sharding, sharding_stage=3))
        yield Change(
            {"Distributed.sharding.sharding_stage": 3}, replace(run, Distributed=stage3), layout
        )
    # Ranks that hold copies of the same state can share it, or the layers, instead.
    for axis in ("sharding", "mp", "pp"):
        for factor in divisors(layout.dp)[1:]:
            degrees = {"dp": layout.dp // factor, axis: getattr(layout, axis) * factor}
            yield from _relayout(run, layout._replace(**degrees))
    for axis in ("sharding", "mp", "pp") if layout.dp == 1 else ():
        yield from _relayout(run, layout._replace(**{axis: 2 * getattr(layout, axis)}))


def _best(run: RunConfig, layout: Layout) -> Change | None:
    """The change that saves most, if any saves something."""
    now = estimate(run, layout).memory.total
    sizes = [
        (estimate(change.run, change.layout).memory.total, number, change)
        for number, change in enumerate(changes(run, layout))
    ]
    size, _, best = min(sizes, default=(now, 0, None), key=lambda entry: entry[:2])
    return best if size < now else None


def _smaller_micro_batches(run: RunConfig, layout: Layout) -> Iterator[Change]:
    """Divisors, the largest first: local_batch_size stays a multiple of micro_batch_size."""
    batch = run.Global
    smaller = [size for size in divisors(batch.local_batch_size) if size < batch.micro_batch_size]
    # The next one, and the smallest: those between say nothing new.
    for size in dict.fromkeys(reversed([*smaller[:1], *smaller[-1:]])):
        engine = replace(run.Engine, accumulate_steps=batch.local_batch_size // size)
        changed = replace(run, Global=replace(batch, micro_batch_size=size), Engine=engine)
        yield Change({"Global.micro_batch_size": size}, changed, layout)


def _relayout(run: RunConfig, layout: Layout) -> Iterator[Change]:
    """The same global batch in another layout, if the model and the batch can be split so."""
    batch, degrees = run.Global, run.Distributed
    local, rest = divmod(batch.global_batch_size, layout.data_ranks)
    if rest or local % batch.micro_batch_size:
        return
    sharding = replace(degrees.sharding, sharding_degree=layout.sharding)
    if layout.sharding > 1 and sharding.sharding_stage == 0:
        return
    changed = replace(
        run,
        Global=replace(batch, local_batch_size=local),
        Engine=replace(run.Engine, accumulate_steps=local // batch.micro_batch_size),
        Distributed=replace(
            degrees,
            dp_degree=layout.dp,
            mp_degree=layout.mp,
            pp_degree=layout.pp,
            sharding=sharding,
        ),
    )
    if not any(check_model(shape_of(changed), layout, batch_of(changed))):
        after = {key: value_at(changed, key) for key in _AXES}
        yield Change({k: v for k, v in after.items() if v != value_at(run, k)}, changed, layout)
