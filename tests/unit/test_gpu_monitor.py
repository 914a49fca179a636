"""Utilisation and memory of a GPU. The package is the real one, nvidia-ml-py. Made-up is the library of the driver that it
loads, which needs a GPU: its functions and structures are those of nvml.h. Oracles: the numbers that the library gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIBRARY = r"""
#include <stdlib.h>
#include <string.h>

static int result(const char *function) {
    const char *failing = getenv("NVML_FAILS");
    return failing && !strcmp(failing, function) ? atoi(getenv("NVML_CODE")) : 0;
}

int nvmlInitWithFlags(unsigned flags) { return result("init"); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)1;
    return strcmp(uuid, "GPU-8f6f-11") ? 6 : result("handle");
}

int nvmlDeviceGetUtilizationRates(void *device, struct { unsigned gpu, memory; } *rates) {
    rates->gpu = 87;
    rates->memory = 40;
    return device == (void *)1 ? result("rates") : 2;
}

int nvmlDeviceGetMemoryInfo(void *device, struct { unsigned long long total, free, used; } *memory) {
    memory->total = 80ULL << 30;
    memory->free = 20ULL << 30;
    memory->used = 60ULL << 30;
    return device == (void *)1 ? result("memory") : 2;
}

const char *nvmlErrorString(int code) { return "made up"; }
"""

# torch, which needs a GPU, too, is asked for the UUID only: one stands in for it that is there at once.
PROGRAM = """
import json, os, sys, types

class Device:
    def __init__(self, name):
        self.type = name.partition(":")[0]

torch = sys.modules["torch"] = types.SimpleNamespace(device=Device, cuda=types.SimpleNamespace())
from trainer.gpu_monitor import gpu_monitor

def read(uuid="8f6f-11", device="cuda:0"):
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuid)
    monitor = gpu_monitor(torch.device(device))
    return monitor and monitor.read()

found = {"good": read(), "cpu": read(device="cpu"), "another GPU": read("8f6f-22")}
monitor = gpu_monitor(torch.device("cuda:0"))
for function in ("init", "handle", "rates", "memory"):
    for code in (1, 2, 3, 9, 15, 16, 999):
        os.environ["NVML_FAILS"], os.environ["NVML_CODE"] = function, str(code)
        found[f"{function} {code}"] = read()
os.environ["NVML_FAILS"] = ""

def fails(device):
    raise RuntimeError("CUDA error: unknown error")

torch.cuda.get_device_properties = fails
found["torch"] = gpu_monitor(torch.device("cuda:0"))
sys.modules["pynvml"] = types.ModuleType("pynvml")
found["another package"] = read()
sys.modules["pynvml"] = None
found["no package"] = read()
print(json.dumps(found))
"""
ALL = {"gpu_utilization": 87, "gpu_memory": 60 << 30}


def readings(**env: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **env}, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_what_the_driver_tells_and_each_of_its_errors(tmp_path: Path) -> None:
    """Percent and bytes; an error leaves out what it is about, and stops nothing."""
    pytest.importorskip("pynvml")
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("not installed: cc (a C compiler), which makes the library of a driver")
    (tmp_path / "nvml.c").write_text(LIBRARY)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, tmp_path / "nvml.c"], check=True)
    found = readings(LD_LIBRARY_PATH=str(tmp_path))
    assert found.pop("good") == ALL
    for name in [name for name in found if name.startswith(("rates", "memory"))]:
        kept = "gpu_memory" if name.startswith("rates") else "gpu_utilization"
        assert found.pop(name) == {kept: ALL[kept]}, name
    assert len(found) == 2 + 2 * 7 + 3
    assert set(found.values()) == {None}


def test_without_a_driver_there_is_no_monitor() -> None:
    """The real package, and no library: it raises NVMLError_LibraryNotFound. Skipped where there is a driver."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        pytest.skip("this machine has a driver")
    except pynvml.NVMLError_LibraryNotFound:
        pass
    assert set(readings().values()) == {None}
