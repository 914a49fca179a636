"""Utilisation and memory of this rank's GPU, where nvidia-ml-py is installed.

Nothing here may stop a training: what cannot be read is left out.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


class GpuMonitor:
    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> dict[str, float]:
        """The percentage of time in which a kernel ran, and used bytes; without what is unknown."""
        found: dict[str, float] = {}
        # Each for itself: a part of a GPU (MIG) has no utilisation, and some GPUs share the memory
        # of their host.
        with suppress(Exception):
            rates = self._library.nvmlDeviceGetUtilizationRates(self._handle)
            found["gpu_utilization"] = int(rates.gpu)
        with suppress(Exception):
            memory = self._library.nvmlDeviceGetMemoryInfo(self._handle)
            found["gpu_memory"] = int(memory.used)
        return found


def gpu_monitor(device: torch.device) -> GpuMonitor | None:
    """The monitor of a GPU; None on a CPU, and without the package (the extra gpu) or a driver."""
    if device.type != "cuda":
        return None
    # Any exception: other packages of this name raise others, and so do drivers that fail.
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES numbers the GPUs of a process in its own way.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return GpuMonitor(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return None
