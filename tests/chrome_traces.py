"""The chrome trace format, checked by hand, and small traces whose times can be added up on paper.

The fields are those of the document "Trace Event Format" (Google, 2016): an object with `traceEvents`; every event has
`ph`, `pid` and `tid`; all but metadata have a time `ts` in microseconds; complete events (`X`) have `name` and `dur`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PHASES = set("BEXbneiIstfCPNODMVvRc()")  # all that the document defines
OFFSET = 4_000_000_000.0  # as in torch's traces: times count from a moment long before


def assert_is_chrome_trace(text: str) -> dict[str, Any]:
    """Fails unless the text is a chrome trace; strict JSON, too: no NaN, nothing twice."""
    trace = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    assert isinstance(trace, dict)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert events
    for event in events:
        assert isinstance(event["ph"], str)
        assert event["ph"] in PHASES, event
        assert isinstance(event["pid"], (int, str)), event
        assert isinstance(event["tid"], (int, str)), event
        if event["ph"] != "M":
            assert isinstance(event["ts"], (int, float)), event
        if event["ph"] == "X":
            assert isinstance(event["dur"], (int, float)), event
            assert event["dur"] >= 0, event
            assert isinstance(event["name"], str), event
            assert isinstance(event.get("args", {}), dict), event
        if event["ph"] in "sft":  # arrows have an id, and the last one says where it binds
            assert "id" in event, event
    return trace


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), [name for name, _ in pairs]
    return found


def event(name: str, start: float, took: float, cat: str = "cpu_op", tid: int = 1, **fields: Any) -> dict[str, Any]:
    """A complete event; times in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": OFFSET + start, "dur": took, **fields}


def step(number: int, start: float, took: float) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", start, took, "user_annotation")


def write(file: Path, events: Iterable[dict[str, Any]], **facts: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    name = {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}
    trace = {"schemaVersion": 1, "baseTimeNanoseconds": 10**18, **facts, "traceEvents": [name, *events]}
    file.write_text(json.dumps(trace, indent=2), encoding="utf-8")
    return file


# Two steps of 1000 µs each on a CPU, by hand:
#   attention      100..300                                200
#   products       300..500, 1000..1300                    500   (what is inside attention is not counted again)
#   other          500..600, 550..650 -> 500..650          150
#   communication  c10d call 700..720; gloo 600..900       720 - 700 = 20 and of the rest 650..700, 720..900 = 230 -> 250
#   gaps           0..100, 900..1000, 1300..2000           900
ON_CPU = [
    step(3, 0, 1000),
    step(4, 1000, 1000),
    event("aten::scaled_dot_product_attention", 100, 200),
    event("aten::bmm", 150, 50),
    event("aten::addmm", 300, 200),
    event("aten::copy_", 310, 20),
    event("autograd::engine::evaluate_function: AddmmBackward0", 500, 500),
    event("AddmmBackward0", 500, 480),
    event("aten::add_", 500, 100),
    event("aten::gelu", 550, 100),
    event("c10d::allreduce_", 700, 20),
    event("gloo:all_reduce", 600, 300, "user_annotation", tid=2),
    event("aten::mm", 1000, 300),
    event("aten::mm", 5000, 100),  # after the last step
    event("DistributedDataParallel.forward", 0, 2000, "user_annotation"),
]
CPU_PARTS = {"matrix_products": 500, "attention": 200, "other_operators": 150, "communication": 250, "host_gaps": 900}

# One step of 1000 µs on a GPU, by hand. What the host does is not counted.
#   attention 0..100 | products 100..400 | other 400..500 and 900..950 | NCCL 300..800, alone 500..800 = 300 | gaps 800..900, 950..1000
ON_GPU = [
    step(9, 0, 1000),
    event("aten::mm", 0, 900),
    event("void flash::flash_bwd_kernel<...>", 0, 100, "kernel", tid=20),
    event("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_nn", 100, 300, "kernel", tid=20),
    event("void at::native::vectorized_elementwise_kernel<4, ...>", 400, 100, "kernel", tid=20),
    event("Memcpy DtoD (Device -> Device)", 900, 50, "gpu_memcpy", tid=20),
    event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 300, 500, "kernel", tid=24),
]
GPU_PARTS = {"matrix_products": 300, "attention": 100, "other_operators": 150, "communication": 300, "host_gaps": 150}
