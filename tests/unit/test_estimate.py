"""Estimates. Oracles: the sizes published for the presets, a second way to count, and memory measured by FleetX on GPUs."""

from __future__ import annotations

import pytest

from trainer.config import Override, load
from trainer.estimate import (
    FRAGMENTATION,
    GIB,
    assumptions,
    count_parameters,
    estimate,
    flops_per_token,
    stage_memory,
    state_bytes,
)
from trainer.layout import Machines
from trainer.logit_chunks import CHUNK_LOGITS
from trainer.savings import advice, changes, savings

MILLIONS = {
    "gpt2-small-en": 102.9,
    "gpt2-en": 124.4,
    "gpt2-medium-en": 354.9,
    "345M": 354.9,
    "gpt2-large-en": 774.0,
    "gpt2-xl-en": 1557.6,
    "1.3B": 1313.7,
    "6.7B": 6654.4,
    "13B": 12848.4,
    "175B": 174603.3,
    "gpt-cpm-large-cn": 2597.1,
    "gpt-cpm-small-cn-distill": 108.9,
}


def resolved(world: Machines, *overrides: str):
    return load(None, [Override.parse(override) for override in overrides], world)


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_presets_have_their_published_number_of_parameters(name: str, millions: float) -> None:
    assert count_parameters(resolved(Machines(1, 1), f"Model.name={name}").run.Model) / 1e6 == pytest.approx(
        millions, abs=0.05
    )


def test_parameters_equal_a_list_of_all_tensors() -> None:
    """The second way: every weight and bias of a GPT-2 block written out."""
    run = resolved(Machines(1, 1), "Model.name=gpt2-en", "Model.ffn_hidden_size=1000").run
    h, f, layers = 768, 1000, 12
    block = [(h, 1), (h, 1), (3 * h, h), (3 * h, 1), (h, h), (h, 1), (h, 1), (h, 1), (f, h), (f, 1), (h, f), (h, 1)]
    tensors = [(50257, h), (1024, h), *block * layers, (h, 1), (h, 1)]
    assert count_parameters(run.Model) == sum(rows * columns for rows, columns in tensors)


def test_flops_of_a_model_worked_out_by_hand() -> None:
    """25.25 M weights in products × 6, plus 12 · 8 · 512 · 128 for the scores: 157.8 MFLOP."""
    sizes = [
        "Model.name=GPT",
        "Model.num_layers=8",
        "Model.hidden_size=512",
        "Model.num_attention_heads=8",
        "Model.vocab_size=65",
    ]
    run = resolved(Machines(1, 1), *sizes, "Data.Train.dataset.max_seq_len=128").run
    assert flops_per_token(run) == 6 * (8 * (12 * 512**2 + 13 * 512) + 65 * 512 + 2 * 512) + 12 * 8 * 512 * 128
    assert flops_per_token(run) / 1e6 == pytest.approx(157.8, abs=0.1)


HALF = ("Engine.mix_precision.enable=True", "Engine.mix_precision.level=O2")
MEASURED_MIB = [  # FleetX 2.4 on A100-40G; its documentation for V100-32G (1.3B)
    (31919, Machines(1, 8), ["Model.name=345M", "Global.local_batch_size=8", "Global.micro_batch_size=8"]),
    (26 * 1024, Machines(1, 1), ["Model.name=1.3B", "Global.micro_batch_size=8", "Model.use_recompute=True"]),
    (
        35442,
        Machines(2, 8),
        ["Model.name=6.7B", "Global.micro_batch_size=8", "Model.use_recompute=True", "sharding_degree=16"],
    ),
    (
        34912,
        Machines(16, 8),
        ["Model.name=175B", "Global.local_batch_size=1536", "Model.use_recompute=True", "mp_degree=8", "pp_degree=16"],
    ),
]


@pytest.mark.parametrize(("mib", "world", "overrides"), MEASURED_MIB, ids=["345M", "1.3B", "6.7B", "175B"])
def test_memory_of_another_program_is_explained(
    mib: int, world: Machines, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FleetX computes all logits at once and keeps attention scores; with both, the estimate is within 25 %.

    Scores: 5 bytes per score of layers that are not recomputed (Korthikanti et al. 2022).
    """
    monkeypatch.setitem(CHUNK_LOGITS, "cuda", 1 << 40)
    known = resolved(world, *HALF, *overrides)
    model, length = known.run.Model, known.run.Data.Train.dataset.max_seq_len
    layers = 0 if model.use_recompute else model.num_layers
    scores = 5 * layers * known.run.Global.micro_batch_size * model.num_attention_heads * length**2
    total = estimate(known.run, known.layout).memory.total + (1 + FRAGMENTATION) * scores
    assert total / 2**20 == pytest.approx(mib, rel=0.25)


def memory_of(*overrides: str, world: Machines | None = None):
    known = resolved(world or Machines(1, 8), "Model.name=1.3B", "Global.micro_batch_size=4", *overrides)
    return estimate(known.run, known.layout).memory


def states_of(*overrides: str):
    known = resolved(Machines(1, 8), "Model.name=1.3B", "Global.micro_batch_size=4", *overrides)
    return state_bytes(known.run, known.layout, 0)


def test_states_shrink_with_the_sharding_stage() -> None:
    accumulated = "Global.local_batch_size=8"
    plain = states_of("dp_degree=8", accumulated)
    stages = [states_of("sharding_degree=8", f"sharding_stage={stage}", accumulated) for stage in (1, 2, 3)]
    assert [stage.optimizer for stage in stages] == [plain.optimizer / 8] * 3
    assert [stage.gradients for stage in stages] == [plain.gradients, plain.gradients / 8, plain.gradients / 8]
    assert [stage.parameters for stage in stages] == [plain.parameters * share for share in (9 / 8, 9 / 8, 1 / 8)]
    gathered = memory_of("sharding_degree=8", "sharding_stage=3", accumulated).gathered
    assert 0 < gathered < plain.parameters / 4
    assert memory_of("sharding_degree=8", "sharding_offload=True").optimizer == 0
    assert memory_of("sharding_degree=8", "sharding_offload=True", "Global.device=cpu").optimizer > 0


def test_a_single_micro_batch_leaves_no_whole_gradient() -> None:
    """It is reduced while the backward pass runs: nothing accumulates."""
    once = states_of("sharding_degree=8", "sharding_stage=1")
    assert once.gradients == states_of("dp_degree=8").gradients / 8


def test_activations_shrink_with_recomputation_in_the_documented_order() -> None:
    """core_attn keeps more than full_attn, which keeps more than full."""
    peaks = [
        memory_of("Model.use_recompute=True", f"Model.recompute_granularity={granularity}").total
        for granularity in ("core_attn", "full_attn", "full")
    ]
    assert memory_of().total >= peaks[0] > peaks[1] > peaks[2]


def test_precision_and_splitting_change_what_they_should() -> None:
    assert memory_of(*HALF).parameters == memory_of().parameters / 2
    assert memory_of("mp_degree=2").activations < memory_of().activations
    assert memory_of("mp_degree=8", "Model.sequence_parallel=True").activations < memory_of("mp_degree=8").activations
    assert memory_of("Model.use_flash_attn=True") == memory_of()
    assert memory_of("Global.device=cpu").overhead == 0


def test_what_would_help_is_found_by_trying_it() -> None:
    known = resolved(Machines(1, 8), "Model.name=1.3B", "Global.micro_batch_size=8", *HALF)
    total = estimate(known.run, known.layout).memory.total
    assert "Model.use_recompute: True" in savings(known.run, known.layout, 40 * GIB)
    assert savings(known.run, known.layout, 0.5 * GIB) == []
    assert total > 40 * GIB


def test_what_is_proposed_to_save_memory_stays_valid(check) -> None:
    """9 samples per replica: half of a micro-batch of 9 would not divide them, 3 does."""
    known = resolved(Machines(1, 1), "Model.name=1.3B", "Global.local_batch_size=9", "Global.micro_batch_size=9", *HALF)
    assert "Global.micro_batch_size: 3" in savings(known.run, known.layout, 60 * GIB)


PIPELINE = ("Model.name=1.3B", "pp_degree=4", "Global.local_batch_size=8", *HALF)


def in_flight(stage: int, *overrides: str) -> float:
    """Kept activations of one stage in units of what it keeps of one micro-batch."""
    known, one = (
        resolved(Machines(1, 4), *PIPELINE, *overrides, *more)
        for more in ((), ("Global.local_batch_size=1", "Model.virtual_pp_degree=1"))
    )
    kept = [stage_memory(each.run, each.layout, stage).activations for each in (known, one)]
    return kept[0] / kept[1]


def test_1f1b_keeps_fewer_micro_batches_towards_the_end() -> None:
    """Stage i of 4 runs 4 - i forward passes before its first backward pass."""
    assert [round(in_flight(stage)) for stage in range(3)] == [4, 3, 2]


def test_gpipe_keeps_every_micro_batch_on_every_stage() -> None:
    """It is what runs with fewer micro-batches than stages."""
    assert [round(in_flight(stage, "Global.local_batch_size=2")) for stage in range(3)] == [2, 2, 2]


def test_the_interleaved_schedule_keeps_more() -> None:
    """2 · (4 - 0 - 1) + (2 - 1) · 4 + 1 = 11 chunks of 3 layers on the first stage: 5.5 times 6 layers."""
    assert in_flight(0, "Model.virtual_pp_degree=2") == pytest.approx(5.5, abs=0.3)


def test_memory_does_not_grow_with_micro_batches() -> None:
    few, many = (resolved(Machines(1, 4), *PIPELINE, f"Global.local_batch_size={count}") for count in (8, 512))
    assert estimate(few.run, few.layout) == estimate(many.run, many.layout)


def test_with_a_pipeline_gradients_stay_whole_through_the_accumulation() -> None:
    sharded = ("Model.name=1.3B", "sharding_degree=2", "Global.local_batch_size=4", "Model.num_layers=24")
    plain = resolved(Machines(1, 2), *sharded)
    piped = resolved(Machines(1, 4), *sharded, "pp_degree=2")
    one, two = (state_bytes(each.run, each.layout, 0) for each in (plain, piped))
    assert one.gradients == pytest.approx(one.optimizer / 2)  # 4 bytes to 8, both over 2 ranks
    assert two.gradients == pytest.approx(two.optimizer)  # 4 bytes whole, 8 over 2 ranks
    single = resolved(Machines(1, 4), *sharded, "pp_degree=2", "Global.micro_batch_size=4")
    three = state_bytes(single.run, single.layout, 0)
    assert three.gradients == pytest.approx(three.optimizer)  # even with one micro-batch: measured in tests/distributed


def test_the_heaviest_stage_counts_also_when_layers_are_uneven() -> None:
    """10 layers over 8 stages: the stages with two layers come after those with one."""
    sizes = [
        "Model.name=1.3B",
        "Model.num_layers=10",
        "pp_degree=8",
        "Global.local_batch_size=32",
        "Global.micro_batch_size=4",
    ]
    known = resolved(Machines(1, 8), *sizes)
    totals = [stage_memory(known.run, known.layout, stage).total for stage in range(8)]
    assert estimate(known.run, known.layout).memory.total == max(totals) > totals[0]


@pytest.mark.parametrize(("recompute", "phase", "stage"), [(True, "forward", 4), (False, "backward", 1)])
def test_the_phase_and_the_heaviest_stage_are_named(recompute: bool, phase: str, stage: int) -> None:
    """The first stage keeps most activations; if they are recomputed, the logits of the last one count. Oracle: all stages."""
    known = resolved(Machines(1, 4), *PIPELINE, f"Model.use_recompute={recompute}")
    totals = [stage_memory(known.run, known.layout, number).total for number in range(4)]
    assert totals.index(max(totals)) + 1 == stage
    assert assumptions(known.run, known.layout)[0] == f"the peak is in the {phase} pass of pipeline stage {stage}"


def test_layers_that_are_not_recomputed_keep_everything() -> None:
    common = ("Model.name=1.3B", "pp_degree=2", "Global.local_batch_size=2", "Model.use_recompute=True")
    every = "Model.no_recompute_layers=[" + ",".join(str(layer) for layer in range(24)) + "]"
    whole = resolved(Machines(1, 2), *common, every)
    grouped = resolved(Machines(1, 2), *common, every, "Distributed.pp_recompute_interval=2")
    kept = [estimate(each.run, each.layout).memory.activations for each in (whole, grouped)]
    assert kept[0] <= kept[1]


def test_layers_recomputed_together_keep_one_input() -> None:
    """12 layers, 2 micro-batches in flight: half of 24 inputs are not kept, but two layers are at work."""
    batch = ("Global.local_batch_size=32", "Global.micro_batch_size=16")
    common = ("Model.name=1.3B", "pp_degree=2", *batch, "Model.use_recompute=True", *HALF)
    one, two = (
        resolved(Machines(1, 2), *common, f"Distributed.pp_recompute_interval={together}") for together in (1, 2)
    )
    kept = [stage_memory(each.run, each.layout, 0) for each in (one, two)]
    layer_input = 16 * 1024 * 2048 * 2
    assert kept[0].activations - kept[1].activations == pytest.approx(12 * layer_input, rel=0.1)
    assert kept[0].temporary < kept[1].temporary


def test_three_changes_that_fit_are_valid_configs_with_less_memory() -> None:
    """Oracle: the config checker, given the same keys, and its own estimate."""
    known = resolved(
        Machines(1, 8), "Model.name=1.3B", "Global.micro_batch_size=8", "Global.global_batch_size=64", *HALF
    )
    total = estimate(known.run, known.layout).memory.total
    found = savings(known.run, known.layout, 0.9 * total)
    assert len(found) == 3
    for change in changes(known.run, known.layout):
        keys = [f"{key}={value}" for key, value in change.values.items()]
        machines = Machines(1, change.layout.world)
        again = resolved(
            machines, "Model.name=1.3B", "Global.micro_batch_size=8", "Global.global_batch_size=64", *HALF, *keys
        )
        assert not [finding for finding in again.findings if finding.level == "error"], keys
        assert (again.run, again.layout) == (change.run, change.layout), keys


def test_if_no_change_is_enough_several_are_named_together() -> None:
    known = resolved(
        Machines(1, 8), "Model.name=6.7B", "Global.micro_batch_size=8", "Global.global_batch_size=64", *HALF
    )
    assert advice(known.run, known.layout, 30 * GIB).startswith("these changes together are enough: ")
    assert advice(known.run, known.layout, 1 * GIB) == "raise sharding_degree, mp_degree or pp_degree"


def test_a_hint_names_each_key_once() -> None:
    """mp grows twice, and only its last value counts; of micro-batches of 4 and 1, 4 is enough."""
    sharded = ("Model.name=1.3B", "sharding_degree=8", "Global.micro_batch_size=8", *HALF)
    known = resolved(Machines(1, 8), *sharded, "Model.use_recompute=True")
    hint = advice(known.run, known.layout, 4e9)
    assert [hint.count(word) for word in ("together", "mp_degree", "batch_size", " on 32 ranks")] == [1] * 4
    known = resolved(Machines(1, 8), *sharded)
    total = estimate(known.run, known.layout).memory.total
    assert savings(known.run, known.layout, total - 1)[:2] == [
        "Model.use_recompute: True",
        "Global.micro_batch_size: 4",
    ]
