"""Errors of gloo and NCCL: what a rank sees if another one has failed, or the network between them.

It does not know whose fault it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.distributed import DistBackendError

from trainer.errors import causes

# Errors of gloo and the store: the connection to another rank is lost, or another rank is late.
LOST = re.compile(r"(closed|reset) by peer|Broken pipe|pair closure")
TIMED_OUT = re.compile(r"Timed out waiting|collective operation timeout")
_PLACE = re.compile(r"^NCCL error in: \S+, ")  # a line of torch's source code, of no use to users


def network_error(error: BaseException | None) -> str:
    """The text of an error of gloo, also if another exception wraps it, as the pipeline does."""
    for text in _texts(error, RuntimeError):
        if LOST.search(text) or TIMED_OUT.search(text):
            return text
    return ""


def nccl_error(error: BaseException | None) -> str:
    """The first line of an error of NCCL, and its last, which names the reason."""
    for text in _texts(error, DistBackendError):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        first = _PLACE.sub("", lines[0]) if lines else "NCCL failed"
        return first if len(lines) < 2 else f"{first}: {lines[-1]}"
    return ""


def _texts(error: BaseException | None, kind: type[BaseException]) -> Iterator[str]:
    return (str(each) for each in causes(error) if isinstance(each, kind))
