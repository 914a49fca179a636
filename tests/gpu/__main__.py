"""Count the GPUs before the tests: python -m tests.gpu. Without one every test would be skipped, which looks like a success."""

from __future__ import annotations

import sys

from tests.gpu.devices import num_gpus

print(f"== tests on GPUs: torch sees {num_gpus()}")
if not num_gpus():
    sys.exit("error: torch sees no GPU on this machine, so nothing was tested; check nvidia-smi and torch.version.cuda")
