"""Utilisation and memory of this rank's GPU, where nvidia-ml-py is installed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


class GpuMonitor:
    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> dict[str, float]:
        """The percentage of time in which a kernel ran, and used bytes; empty if unknown."""
        with suppress(self._library.NVMLError):
            rates = self._library.nvmlDeviceGetUtilizationRates(self._handle)
            memory = self._library.nvmlDeviceGetMemoryInfo(self._handle)
            return {"gpu_utilization": rates.gpu, "gpu_memory": memory.used}
        return {}


def gpu_monitor(device: torch.device) -> GpuMonitor | None:
    """The monitor of a GPU; None on a CPU, and without the package (the extra gpu)."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES numbers the GPUs of a process in its own way.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return GpuMonitor(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return None
