"""Accepted means: it fits. The oracle is written from the rules in words, by brute force, without the code it judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gptctl.spec.check import check_config


@dataclass
class Case:
    nodes: int
    per_node: int
    dp: int | None
    pp: int
    sharding: int
    mp: int
    global_batch: int | None
    local_batch: int | None
    micro_batch: int
    layers: int
    hidden: int
    heads: int
    ffn: int | None
    vocab: int
    vocab_unit: int
    virtual_pp: int
    seq_len: int
    positions: int
    sequence_parallel: bool
    stage: int

    def text(self) -> str:
        def line(name: str, value: object) -> str:
            return f"  {name}: {'' if value is None else value}\n"

        sections = {
            "Global": {"global_batch_size": self.global_batch, "local_batch_size": self.local_batch, "micro_batch_size": self.micro_batch},
            "Model": {
                "name": "GPT", "num_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads,
                "ffn_hidden_size": self.ffn, "vocab_size": self.vocab, "vocab_size_divisible_unit": self.vocab_unit,
                "virtual_pp_degree": self.virtual_pp, "max_position_embeddings": self.positions, "sequence_parallel": self.sequence_parallel,
            },
            "Distributed": {
                "dp_degree": self.dp, "pp_degree": self.pp, "mp_degree": self.mp,
                "sharding": f"{{sharding_degree: {self.sharding}, sharding_stage: {self.stage}}}",
            },
            "Data": {"Train": f"{{dataset: {{max_seq_len: {self.seq_len}}}}}"},
            "Launch": {"nodes": self.nodes, "gpus_per_node": self.per_node},
        }  # fmt: skip
        return "".join(
            f"{name}:\n" + "".join(line(key, value) for key, value in keys.items()) for name, keys in sections.items()
        )


def multiples(step: int, up_to: int) -> set[int]:
    return set(range(0, up_to + 1, step))


def splits_evenly(number: int, parts: int) -> bool:
    return number in multiples(parts, number)


def fits(case: Case) -> bool:
    """Every rule of the specification, one sentence a line."""
    world = case.nodes * case.per_node
    some_dp = [case.dp] if case.dp is not None else range(1, world + 1)
    dp = next((dp for dp in some_dp if case.mp * case.sharding * case.pp * dp == world), None)
    if dp is None:
        return False
    replicas = dp * case.sharding
    local_sizes = [case.local_batch] if case.local_batch else range(1, (case.global_batch or 0) + 1)
    if not case.local_batch and not case.global_batch:
        local_sizes = [case.micro_batch]
    local = next((size for size in local_sizes if case.global_batch in (None, size * replicas)), None)
    if local is None or not splits_evenly(local, case.micro_batch):
        return False
    micro_batches = local // case.micro_batch
    ffn = case.ffn or 4 * case.hidden
    padded = next(
        size for size in range(case.vocab, case.vocab + case.vocab_unit) if splits_evenly(size, case.vocab_unit)
    )
    tensor_parallel = (
        splits_evenly(case.heads, case.mp) and splits_evenly(ffn, case.mp) and splits_evenly(padded, case.mp)
    )
    pipeline = case.pp == 1 or (case.layers >= case.pp * case.virtual_pp)
    if case.pp > 1 and case.virtual_pp > 1:
        pipeline = (
            pipeline
            and micro_batches >= case.pp
            and splits_evenly(case.layers, case.pp * case.virtual_pp)
            and splits_evenly(micro_batches, case.pp)
        )
    return (
        tensor_parallel
        and pipeline
        and splits_evenly(case.hidden, case.heads)
        and case.seq_len <= case.positions
        and (not case.sequence_parallel or case.mp == 1 or splits_evenly(case.seq_len, case.mp))
        and (case.sharding == 1 or case.stage > 0)
    )


degree = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8])
cases = st.builds(
    Case,
    nodes=st.sampled_from([1, 1, 2, 3]),
    per_node=st.sampled_from([1, 2, 4, 7, 8]),
    dp=st.none() | degree,
    pp=degree,
    sharding=degree,
    mp=degree,
    global_batch=st.none() | st.sampled_from([8, 16, 24, 30, 64]),
    local_batch=st.none() | st.sampled_from([1, 4, 6, 8, 16]),
    micro_batch=st.sampled_from([1, 1, 2, 3, 4]),
    layers=st.integers(1, 16),
    hidden=st.sampled_from([48, 64, 96, 100]),
    heads=st.sampled_from([1, 3, 4, 8, 12]),
    ffn=st.none() | st.sampled_from([100, 256, 301]),
    vocab=st.integers(1, 600),
    vocab_unit=st.sampled_from([1, 2, 8, 128]),
    virtual_pp=st.sampled_from([1, 1, 1, 2]),
    seq_len=st.sampled_from([16, 32, 63]),
    positions=st.sampled_from([32, 64, 64]),
    sequence_parallel=st.booleans(),
    stage=st.sampled_from([0, 1, 2, 3, 3]),
)


def agree(file: Path, case: Case) -> bool:
    file.write_text(case.text())
    checked = check_config(file, [])
    assert checked.is_valid == fits(case), [str(finding) for finding in checked.findings]
    return checked.is_valid


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases)
def test_accepted_agrees_with_brute_force(tmp_path: Path, case: Case) -> None:
    event("accepted" if agree(tmp_path / "run.yaml", case) else "refused")


@st.composite
def fitting_worlds(draw: st.DrawFn) -> Case:
    """Cases whose world fits, so that the other rules decide: random worlds are nearly all refused by the product alone."""
    case = draw(cases)
    case.dp = draw(st.none() | st.just(draw(degree)))
    case.nodes, case.per_node = case.pp * case.sharding, case.mp * (case.dp or draw(degree))
    case.heads = draw(st.sampled_from([case.heads, case.mp * 2]))
    case.hidden = draw(st.sampled_from([case.hidden, case.heads * 8]))
    case.local_batch = draw(st.sampled_from([case.local_batch, case.micro_batch * case.pp]))
    case.global_batch = draw(st.sampled_from([case.global_batch, None]))
    return case


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fitting_worlds())
def test_accepted_agrees_where_the_world_fits(tmp_path: Path, case: Case) -> None:
    event("accepted" if agree(tmp_path / "run.yaml", case) else "refused")


@pytest.mark.long
def test_many_layouts(tmp_path: Path) -> None:
    counts = {True: 0, False: 0}

    @settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases | fitting_worlds())
    def examine(case: Case) -> None:
        counts[agree(tmp_path / "run.yaml", case)] += 1

    examine()
    print(f"\n{sum(counts.values())} layouts agree with brute force: {counts[True]} accepted, {counts[False]} refused")
    assert counts[True] > 500
