"""Matrix products on CPUs where oneDNN computes them faster than MKL, torch's choice for fp32.

On processors other than Intel's, MKL does not use AVX-512. On an AMD EPYC 9005 with two threads,
oneDNN computes 430 GFLOP/s, MKL 205: a step of 8 layers × 512 takes 0.54 of its time.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Multiplications below which a call of oneDNN takes longer than the product.
SMALL = 1 << 21


@lru_cache(maxsize=1)
def use_onednn() -> bool:
    """Let torch compute products of fp32 matrices by oneDNN, where that is faster.

    In torch itself, so that it holds for forward and backward passes in every layout. It depends
    only on the processor, not on a measurement: the same run must give the same bits again.
    """
    if not _is_faster():
        return False
    for name in ("mm", "mm.out", "addmm", "addmm.out"):
        kernel = _replacement(torch.library.get_kernel(f"aten::{name}", "CPU"))
        with warnings.catch_warnings():  # about replacing a kernel
            warnings.simplefilter("ignore")
            _library().impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return True


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    """Kernels are replaced for as long as this exists."""
    return torch.library.Library("aten", "IMPL")


def _is_faster() -> bool:
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _maker() != "GenuineIntel"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.library, "get_kernel")
    )


def _maker() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line.split()[-1] for line in file if line.startswith("vendor_id")), "")
    except OSError:
        return ""


def _replacement(before: Any) -> Any:
    def kernel(keys: Any, *operands: Tensor, **options: Any) -> Tensor:
        if not _suits_onednn(*operands, **options):
            return before.call_boxed(keys, *operands, **options)
        result, out = _product(*operands), options.get("out")
        return result if out is None else out.copy_(result)

    return kernel


def _suits_onednn(
    *operands: Tensor, out: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> bool:
    """Whether oneDNN computes this, and faster. Not shapes that torch has a message for."""
    *bias, a, b = operands
    return (
        a.dim() == b.dim() == 2
        and a.shape[1] == b.shape[0]
        and a.numel() * b.shape[1] >= SMALL
        and all(tensor.dtype == torch.float32 for tensor in operands)
        and not (_overlaps(a) or _overlaps(b))
        # oneDNN ignores the strides of a bias.
        and all(row.shape == b.shape[1:] and row.is_contiguous() for row in bias)
        and beta == alpha == 1
        and (out is None or (out.dtype == a.dtype and out.shape == (len(a), b.shape[1])))
    )


def _overlaps(matrix: Tensor) -> bool:
    """Whether elements share memory, as in sliding windows: oneDNN refuses such a matrix."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return 0 not in (down, across) and down < columns * across and across < rows * down


def _product(*operands: Tensor) -> Tensor:
    """a · b, or bias + a · b."""
    *biases, a, b = operands
    bias, linear = next(iter(biases), None), torch.ops.mkldnn._linear_pointwise.default
    # oneDNN copies `a` if it is transposed, as in the gradient of a weight: copy the smaller one.
    if bias is None and a.stride(0) == 1 and a.numel() > b.numel() + len(a) * b.shape[1]:
        return linear(b.t(), a, None, "none", [], "").t().contiguous()
    return linear(a, b.t(), bias, "none", [], "")
