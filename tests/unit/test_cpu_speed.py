"""What makes CPUs faster. Oracles: products in double precision, and the kernel's count of page faults."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import fork
from trainer import matrix_products

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(64, 32, 16), (1, 7, 5), (5, 1, 7), (7, 5, 1), (33, 65, 17), (0, 3, 4), (3, 0, 4), (128, 16, 16)]


def in_a_process(check: Callable[[], None], folder: Path, **environ: str) -> None:
    """Kernels of torch and settings of the C library hold for a whole process."""

    def run() -> int:
        check()
        return 0

    pid = fork(run, folder, environ, folder / "out", folder / "err")
    assert os.waitpid(pid, 0)[1] == 0, (folder / "err").read_text()


def use_onednn_for_everything() -> None:
    matrix_products.SMALL = 1  # type: ignore[misc]
    matrix_products._is_faster = lambda: True
    assert matrix_products.use_onednn()
    assert matrix_products.use_onednn()  # once more changes nothing


def layouts(rows: int, columns: int) -> Iterator[Tensor]:
    """Random matrices of one shape, ordered in memory in all ways that torch has."""
    yield torch.randn(rows, columns)
    yield torch.randn(columns, rows).t()
    yield torch.randn(rows + 3, columns + 5)[2 : 2 + rows, 3 : 3 + columns]
    yield torch.randn(columns + 5, rows + 3)[3 : 3 + columns, 2 : 2 + rows].t()
    yield torch.randn(rows, 2 * columns)[:, ::2]
    yield torch.randn(1, columns).expand(rows, columns)
    yield torch.randn(rows, 1).expand(rows, columns)


def biases(size: int) -> Iterator[Tensor]:
    yield torch.randn(size)
    yield torch.randn(2 * size)[::2]
    yield torch.randn(1).expand(size)
    yield torch.randn(1, size)


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN")
def test_products_by_onednn_are_right_for_every_shape_and_order_in_memory(tmp_path: Path) -> None:
    def check() -> None:
        use_onednn_for_everything()
        for rows, inner, columns in SHAPES:
            for a in layouts(rows, inner):
                for b in layouts(inner, columns):
                    whole = a.double() @ b.double()
                    torch.testing.assert_close((a @ b).double(), whole, rtol=1e-5, atol=3e-4)
                    for bias in biases(columns):
                        result = torch.addmm(bias, a, b)
                        torch.testing.assert_close(result.double(), whole + bias, rtol=1e-5, atol=3e-4)
                        torch.testing.assert_close(
                            torch.addmm(bias, a, b, beta=2, alpha=-1).double(), 2 * bias - whole, rtol=1e-5, atol=3e-4
                        )
                        assert result.is_contiguous()
                    out = torch.empty(columns, rows).t()
                    torch.mm(a, b, out=out)
                    torch.testing.assert_close(out.double(), whole, rtol=1e-5, atol=3e-4)
                    torch.addmm(bias, a, b, out=out)
                    torch.testing.assert_close(out.double(), whole + bias, rtol=1e-5, atol=3e-4)

    in_a_process(check, tmp_path)


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN")
def test_gradients_of_a_layer_are_right_and_other_types_are_left_to_torch(tmp_path: Path) -> None:
    def check() -> None:
        use_onednn_for_everything()
        x, weight, bias = torch.randn(2, 24, 16), torch.randn(48, 16), torch.randn(48)
        assert_same_gradients(F.linear, x, weight, bias)
        assert_same_gradients(lambda *both: F.linear(*both).relu(), x, weight)
        for other in (torch.float64, torch.bfloat16, torch.int64):
            ones = torch.ones(8, 8).to(other)
            assert ((ones @ ones) == 8).all()
            assert (ones @ ones).dtype == other
        with torch.no_grad(), warnings.catch_warnings(record=True):  # torch warns of the new size
            assert torch.mm(ones.float(), ones.float(), out=torch.empty(1)).shape == (8, 8)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)

    in_a_process(check, tmp_path)


def assert_same_gradients(layer: Callable[..., Tensor], *inputs: Tensor) -> None:
    """As in double precision."""
    single = [value.clone().requires_grad_() for value in inputs]
    double = [value.double().requires_grad_() for value in inputs]
    layer(*single).square().sum().backward()
    layer(*double).square().sum().backward()
    for a, b in zip(single, double):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-3)


def overlapping() -> None:
    use_onednn_for_everything()
    windows, b = torch.randn(600).unfold(0, 64, 1), torch.randn(64, 32)
    torch.testing.assert_close(windows @ b, windows.clone() @ b)
    torch.testing.assert_close(b.t() @ windows[:64], b.t() @ windows[:64].clone())


def test_windows_that_overlap_in_memory_are_left_to_torch(tmp_path: Path) -> None:
    """Oracle: the product of a copy."""
    in_a_process(overlapping, tmp_path)


@pytest.mark.skipif(
    not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.library, "get_kernel")),
    reason="this torch has no oneDNN, or keeps its kernels",
)
def test_products_stay_with_mkl_on_processors_of_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(matrix_products, "_maker", lambda: "GenuineIntel")
    assert not matrix_products._is_faster()
    monkeypatch.setattr(matrix_products, "_maker", lambda: "AuthenticAMD")
    assert matrix_products._is_faster()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not matrix_products._is_faster()


@pytest.mark.parametrize(("environ", "is_kept"), [({}, True), ({"MALLOC_TOP_PAD_": "131072"}, False)])
def test_freed_memory_is_used_again_unless_the_user_configured_the_c_library(
    environ: dict[str, str], is_kept: bool
) -> None:
    """Ten times 64 MB, which are 16,384 pages."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from resource import RUSAGE_SELF, getrusage
from trainer.malloc import keep_memory
keep_memory()
for _ in range(10):
    before = getrusage(RUSAGE_SELF).ru_minflt
    b"x" * (64 << 20)
    print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    fewest = min(map(int, ended.stdout.split()))
    assert fewest < 100 if is_kept else fewest > 10_000, ended.stdout
