"""Chrome traces are read and summarised. Oracles: the json module, sums on paper (tests/chrome_traces.py), sets of integers."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptctl.engine.file_reading import DamagedFile
from gptctl.traces import intervals, rank_profile, trace_reader
from gptctl.traces.intervals import Union, length, merge, without
from gptctl.traces.merged_trace import write_merged
from gptctl.traces.rank_profile import KINDS, device_kind, host_kind, read_profile
from gptctl.traces.trace_reader import TraceReader
from gptctl.traces.trace_search import find_traces
from tests.chrome_traces import (
    CPU_PARTS,
    GPU_PARTS,
    OFFSET,
    ON_CPU,
    ON_GPU,
    assert_is_chrome_trace,
    event,
    step,
    write,
)
from trainer.trace_files import MEMORY, TraceName, attempt_folder, parse_trace_name, profiler_folder

SPAN = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def moments(spans) -> set[int]:
    return {moment for start, end in spans for moment in range(int(start), int(end))}


@given(st.lists(SPAN), st.lists(SPAN), st.integers(1, 5))
def test_intervals_are_sets(one, other, compact_at: int) -> None:
    intervals.COMPACT_AT, before = compact_at, intervals.COMPACT_AT
    try:
        union = Union()
        for span in one:
            union.add(*span)
    finally:
        intervals.COMPACT_AT = before
    left, right = union.spans(), merge(other)
    assert moments(left) == moments(one)
    assert length(left) == len(moments(one))
    assert moments(without(left, right)) == moments(one) - moments(other)
    assert length(without(left, right)) == len(moments(one) - moments(other))


def test_shares_of_a_cpu_trace_add_up_to_the_sums_on_paper(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path / "t.json", ON_CPU), 3)
    assert profile.steps == {3: pytest.approx(1e-3), 4: pytest.approx(1e-3)}
    assert {kind: profile.parts[kind] * 1e6 for kind in KINDS} == pytest.approx(CPU_PARTS)
    assert sum(profile.shares().values()) == pytest.approx(1)
    assert profile.shares()["host_gaps"] == pytest.approx(0.45)
    assert profile.all_communication * 1e6 == pytest.approx(300)
    assert profile.step_time == pytest.approx(1e-3)
    assert profile.own_time == pytest.approx((2000 - 250) / 2 * 1e-6)
    assert not profile.on_gpu


def test_shares_of_a_gpu_trace_are_those_of_the_gpu(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path / "t.json", ON_GPU), 0)
    assert {kind: profile.parts[kind] * 1e6 for kind in KINDS} == pytest.approx(GPU_PARTS)
    assert profile.all_communication * 1e6 == pytest.approx(500)
    assert profile.on_gpu


def test_a_trace_without_steps_is_summarised_as_a_whole(tmp_path: Path) -> None:
    events = [event("aten::mm", 100, 300), event("aten::add", 800, 100)]
    profile = read_profile(write(tmp_path / "t.json", events), 0)
    assert profile.seconds == pytest.approx(800e-6)
    assert profile.parts["host_gaps"] == pytest.approx(400e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix_products"),
        ("aten::_addmm_activation", "matrix_products"),
        ("mkldnn::_linear_pointwise", "matrix_products"),
        ("aten::add", "other_operators"),
        ("aten::_fused_adamw_", "other_operators"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("c10d::_allgather_base_", "communication call"),
        ("gloo:all_gather", "communication"),
        ("shared:all_gather", "communication call"),
        ("nccl:all_reduce", "communication"),
        ("ProfilerStep", None),
        ("ScaledDotProductFlashAttentionForCpuBackward0", None),
        ("torch::autograd::AccumulateGrad", None),
        ("## Call CompiledFxGraph fx7 ##", "other_operators"),
    ],
)
def test_events_of_the_host(name: str, kind: str | None) -> None:
    assert host_kind(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "communication"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix_products"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "matrix_products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_nn>", "matrix_products"),
        ("triton_tem_fused_mm_4", "matrix_products"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("triton_poi_fused_gelu_3", "other_operators"),
        ("Memset (Device)", "other_operators"),
    ],
)
def test_kernels_of_gpus(name: str, kind: str) -> None:
    assert device_kind(name) == kind


EVENT = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.integers(), st.text(max_size=9), st.lists(st.none()), st.floats(allow_nan=False, allow_infinity=False)
    ),
)
FACTS = st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.booleans(), EVENT), max_size=3)


@settings(max_examples=60)
@given(
    st.lists(EVENT, max_size=6),
    FACTS,
    FACTS,
    st.sampled_from([None, 1, "\t"]),
    st.sampled_from([1, 2, 3, 7, 1 << 20]),
    st.booleans(),
    st.booleans(),
)
def test_events_are_those_that_json_reads(tmp_path_factory, events, before, after, indent, chunk, packed, bare) -> None:
    """Whatever the window is that moves over the text, also in the middle of a number, an escape or a UTF-8 sequence."""
    value = events if bare else {**before, "traceEvents": events, **{f"{key}'": fact for key, fact in after.items()}}
    text = json.dumps(value, indent=indent, ensure_ascii=chunk % 2 == 0).encode("utf-8", "surrogatepass")
    file = tmp_path_factory.mktemp("traces") / "t.json"
    file.write_bytes(gzip.compress(text) if packed else text)
    trace_reader.CHUNK, size = chunk, trace_reader.CHUNK
    came: list[int] = []
    try:
        reader = TraceReader(file, came.append)
        found = list(reader.events())
    finally:
        trace_reader.CHUNK = size
    assert found == json.loads(text.decode("utf-8", "replace"))["traceEvents"] if not bare else found == events
    assert sum(came) == file.stat().st_size
    if not bare:
        assert {key for key in value if key != "traceEvents"} == set(reader.facts)


DAMAGE = {
    "empty": b"",
    "another object": b"{}",
    "a number": b"17",
    "a text": b'"traceEvents"',
    "events are no list": b'{"traceEvents": {"ph": "X"}}',
    "an event that is not an object": b'{"traceEvents": [1, 2]}',
    "an event is a list": b'{"traceEvents": [[]]}',
    "a key that is not a text": b'{1: 2, "traceEvents": []}',
    "deep": b'{"a": ' + b"[" * 200_000,
    "deep in an event": b'{"traceEvents": [{"a": ' + b'{"a":' * 100_000 + b"1",
    "a number of a million digits": b'{"traceEvents": [{"ph": "X", "ts": ' + b"9" * 1_100_000 + b"}]}",
    "an endless text": b'{"traceEvents": [{"name": "' + b"a" * 3_000_000,
    "binary": bytes(range(256)) * 10,
    "half of a gzip": gzip.compress(json.dumps({"traceEvents": ON_CPU}).encode())[:-40],
    "no gzip after all": b"\x1f\x8b" + b"x" * 100,
    "many keys": b"{" + b",".join(b'"%d": 1' % number for number in range(2000)) + b"}",
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_trace_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "t.json").write_bytes(text)
    with pytest.raises(DamagedFile):
        read_profile(tmp_path / "t.json", 0)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_half_a_trace_is_not_taken_for_a_whole_one(tmp_path: Path, share: float) -> None:
    file = write(tmp_path / "t.json", ON_CPU)
    text = file.read_bytes().rstrip()
    file.write_bytes(text[: int(share * len(text))])
    with pytest.raises(DamagedFile):
        read_profile(file, 0)


@settings(max_examples=100)
@given(st.integers(0, 5000), st.binary(max_size=6))
def test_changed_bytes_end_in_a_profile_or_in_damage(tmp_path_factory, at: int, new: bytes) -> None:
    file = write(tmp_path_factory.mktemp("traces") / "t.json", ON_CPU)
    text = bytearray(file.read_bytes())
    text[at % len(text) : at % len(text) + len(new)] = new
    file.write_bytes(text)
    try:
        profile = read_profile(file, 0)
    except DamagedFile:
        return
    assert sum(profile.shares().values()) == pytest.approx(1)


def test_a_fifo_in_the_place_of_a_trace_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.json")
    with pytest.raises(OSError, match="not a regular file"):
        read_profile(tmp_path / "t.json", 0)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reader, "LARGEST_TRACE", 4 << 20)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b"[" + b" " * (32 << 20)))
    with pytest.raises(DamagedFile, match="larger than"):
        read_profile(tmp_path / "t.json.gz", 0)


def test_too_many_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_profile, "MOST_EVENTS", 5)
    with pytest.raises(DamagedFile, match="record fewer steps"):
        read_profile(write(tmp_path / "t.json", ON_CPU), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"ts": None},
        {"ts": "1"},
        {"ts": True},
        {"ts": 1e300},
        {"ts": 10**400},
        {"dur": -1},
        {"dur": []},
        {"dur": 1e300},
        {"name": 7},
        {"name": None},
    ],
)
def test_events_with_wrong_fields_are_counted_and_left_out(tmp_path: Path, fields: dict) -> None:
    wrong = {**event("aten::mm", 0, 100), **fields}
    profile = read_profile(write(tmp_path / "t.json", [*ON_CPU, wrong]), 0)
    assert profile.invalid == 1
    assert {kind: profile.parts[kind] * 1e6 for kind in KINDS} == pytest.approx(CPU_PARTS)


def test_merged_ranks_are_one_chrome_trace(tmp_path: Path) -> None:
    """Every event of every rank is in it; processes and arrows of ranks stay apart; times are of one clock."""
    arrows = [{"ph": phase, "id": 5, "pid": 7, "tid": 1, "ts": OFFSET + 1, "cat": "c", "name": "n"} for phase in "sf"]
    odd = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": OFFSET}
    one = write(tmp_path / "0.json", [*ON_CPU, *arrows, odd])
    other = write(tmp_path / "1.json", [*ON_CPU, *arrows, odd], baseTimeNanoseconds=10**18 + 2_000_000)
    num_events = write_merged({0: one, 12: other}, tmp_path / "all.json")
    events = assert_is_chrome_trace((tmp_path / "all.json").read_text())["traceEvents"]
    assert len(events) == num_events == 2 * (len(ON_CPU) + 4)
    half = num_events // 2
    assert {each["pid"] for each in events[:half]}.isdisjoint({each["pid"] for each in events[half:]})
    assert {each["id"] for each in events[:half] if "id" in each} == {5}
    assert {each["id"] for each in events[half:] if "id" in each} == {12 * 2**32 + 5}
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["rank 0: python", "rank 12: python"]
    steps = [each["ts"] for each in events if each["name"] == "ProfilerStep#3"]
    assert steps[1] - steps[0] == pytest.approx(2000)


def test_half_a_trace_leaves_no_merged_file(tmp_path: Path) -> None:
    file = write(tmp_path / "0.json", ON_CPU)
    (tmp_path / "1.json").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DamagedFile):
        write_merged({0: file, 1: tmp_path / "1.json"}, tmp_path / "all.json")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0.json", "1.json"]


@given(st.integers(0, 9_999_999), st.integers(0, 10**11), st.integers(0, 10**11), st.sampled_from([".json", MEMORY]))
def test_names_are_read_as_written(rank: int, first: int, last: int, kind: str) -> None:
    assert parse_trace_name(str(TraceName(rank, first, last, kind))) == (rank, first, last, kind)


@pytest.mark.parametrize(
    "name",
    [
        "rank_0.json",
        "rank_.steps_1-2.json",
        "rank_01.steps_1-2.json",
        "rank_1.steps_1-2.json.part",
        "rank_1.steps_1-2.json\n",
        "../rank_1.steps_1-2.json",
        "rank_12345678.steps_1-2.json",
        "rank_١.steps_1-2.json",
    ],
)
def test_other_names_are_not_traces(name: str) -> None:
    assert parse_trace_name(name) is None


def test_where_traces_are() -> None:
    assert profiler_folder("out", "profiler_log") == "out/profiler_log"
    assert profiler_folder("/a/out", "../b") == "/a/b"
    assert profiler_folder("/a/out", "/c/d/") == "/c/d"
    job = {"GPTCTL_JOB": "gpt-3f9a2c", "GPTCTL_ATTEMPT": "2"}
    assert attempt_folder(Path("p"), job) == Path("p/gpt-3f9a2c/attempt-2")
    assert attempt_folder(Path("p"), {"TORCHELASTIC_RESTART_COUNT": "1"}) == Path("p/attempt-1")
    assert attempt_folder(Path("p"), {"GPTCTL_JOB": "../x", "GPTCTL_ATTEMPT": "1"}) == Path("p/attempt-0")


def test_traces_are_found_by_attempt_and_steps(tmp_path: Path) -> None:
    """The tenth attempt after the second; memory snapshots with their traces; nothing behind a link."""
    for attempt, name in [
        (2, "rank_0.steps_1-4.json"),
        (10, "rank_1.steps_1-2.json"),
        (10, "rank_0.steps_1-2.json"),
        (10, "rank_0.steps_1-2.memory.pickle"),
        (10, "rank_0.steps_3-4.json.gz"),
        (10, "rank_0.steps_3-4.json.part"),
        (11, "rank_0.steps_1-2.memory.pickle"),
    ]:
        folder = tmp_path / "output" / "profiler_log" / "gpt-1" / f"attempt-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "output")
    found = find_traces(tmp_path)
    assert [(each.attempt, each.first, list(each.files), list(each.memory)) for each in found] == [
        (2, 1, [0], []),
        (10, 1, [0, 1], [0]),
        (10, 3, [0], []),
    ]
    assert find_traces(tmp_path / "nowhere") == []


@pytest.mark.long
def test_reading_a_large_trace_takes_little_memory(tmp_path: Path) -> None:
    """Oracle: the allocator of Python. 230 MB, and the same peak within 8 MB for a sixth of it."""
    import tracemalloc

    def peak(events: int) -> int:
        file = tmp_path / f"{events}.json"
        with open(file, "w") as stream:
            stream.write('{"traceEvents": [' + json.dumps(step(1, 0, events)))
            for number in range(events):
                padded = event("aten::add", number, 2, args={"shape": "x" * 400})
                stream.write(",\n" + json.dumps(padded))
            stream.write("]}")
        tracemalloc.start()
        profile = read_profile(file, 0)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert profile.parts["other_operators"] == pytest.approx(events * 1e-6)
        return found

    small, large = peak(70_000), peak(400_000)
    assert large < 32 << 20
    assert large - small < 8 << 20


def test_a_large_value_is_parsed_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as much text for each attempt. Oracle: the number of attempts, a logarithm of the chunks."""
    (tmp_path / "t.json").write_text(
        json.dumps({"ranks": list(range(100_000)), "traceEvents": [event("aten::mm", 0, 1)]})
    )
    monkeypatch.setattr(trace_reader, "CHUNK", 1000)
    parse, attempts = json.JSONDecoder.raw_decode, []

    def counted(self: json.JSONDecoder, text: str, at: int = 0) -> tuple[object, int]:
        attempts.append(len(text) - at)
        return parse(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    reader = TraceReader(tmp_path / "t.json")
    assert len([*reader.events()]) == 1
    assert len(reader.facts["ranks"]) == 100_000
    assert len(attempts) < 30


def test_a_number_of_too_many_digits_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"x": ' + "9" * 5000 + ', "traceEvents": []}')
    with pytest.raises(DamagedFile, match="a number has too many digits"):
        read_profile(tmp_path / "t.json", 0)


def test_merged_traces_have_no_infinity(tmp_path: Path) -> None:
    """Oracle: JSON as RFC 8259 defines it."""
    text = '[{"ph": "X", "ts": 1e999, "args": {"a": [-1e999, 1.5]}, "pid": 1}]'
    (tmp_path / "t.json").write_text(text)
    write_merged({0: tmp_path / "t.json"}, tmp_path / "merged.json")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (found,) = json.loads((tmp_path / "merged.json").read_text(), parse_constant=refuse)["traceEvents"]
    assert (found["ts"], found["args"]) == (None, {"a": [None, 1.5]})
