"""The kernels around attention (norm, rotary embedding, gate, thin products) against their twins and float64."""

from __future__ import annotations

import pytest
import torch
from kvdrive_kernels import gate_rows, norm_rows, project_rows, rotate_heads
from kvsupport.poison import poison

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 3, 8, 65)


def close(ours, twin, dtype, scale=1.0):
    """Equal up to `scale` steps of the dtype at the size of the numbers; fp32 has other sums and fused products."""
    step = torch.finfo(dtype).eps * (max(scale, 8) if dtype == torch.float32 else scale)
    assert ours.dtype == twin.dtype
    assert ours.shape == twin.shape
    assert ((ours.double() - twin.double()).abs() <= step * twin.double().abs().clamp_min(1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("dim", [16, 576, 2048])
def test_norm_adds_the_residual_and_is_as_exact_as_its_twin(dtype, n_rows, dim):
    x, residual = (torch.randn(n_rows, dim).mul(3).to(dtype) for _ in range(2))
    weight = torch.rand(dim).add(0.5).to(dtype)
    for other in (None, residual):
        ours, total = norm_rows.norm_rows(x, other, weight, 1e-5)
        twin, twin_total = norm_rows.reference(x, other, weight, 1e-5)
        close(ours, twin, dtype)
        assert (total is None) == (other is None)
        if other is not None:
            assert torch.equal(total, twin_total)
            exact = x.double() + residual.double()
            exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            close(ours, exact.to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (96, 96), (128, 64), (64, 20), (256, 256)])
@pytest.mark.parametrize("halves", [True, False])
def test_heads_turn_as_in_the_twin_whatever_lies_between_their_rows(dtype, n_rows, dim, rotary, halves):
    qkv = poison(torch.zeros(n_rows, 7 * dim, dtype=dtype))
    qkv[:, : 5 * dim] = torch.randn(n_rows, 5 * dim).to(dtype)
    q, k = qkv[:, : 3 * dim], qkv[:, 3 * dim : 5 * dim]
    cos_sin = torch.randn(50, rotary).to(dtype)
    positions = torch.randint(0, 50, (n_rows,))
    ours = rotate_heads.rotate_heads(q, k, positions, cos_sin, dim, halves)
    for mine, twin in zip(ours, rotate_heads.reference(q, k, positions, cos_sin, dim, halves), strict=True):
        assert mine.is_contiguous()
        close(mine, twin, dtype, scale=0)


def test_a_position_outside_the_table_is_an_error():
    q = torch.zeros(2, 16)
    with pytest.raises(IndexError):
        rotate_heads.rotate_heads(q, q, torch.tensor([0, 5]), torch.zeros(5, 16), 16, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", ROWS)
def test_gate_is_silu_times_the_other_half_at_any_size_of_number(dtype, n_rows):
    x = torch.randn(n_rows, 2 * 1536).mul(20).to(dtype)
    x[0, :6] = torch.tensor([0.0, -0.0, 60000.0, -60000.0, 89.0, -89.0]).to(dtype)
    x[0, 1536:1542] = 1
    ours, twin = gate_rows.gate_rows(x), gate_rows.reference(x)
    close(ours, twin, dtype, scale=2)  # two roundings


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 16, 33])
@pytest.mark.parametrize(("n_out", "depth"), [(2, 16), (1, 80), (7, 64), (960, 576), (1027, 1536)])
def test_products_of_few_rows_are_as_exact_as_fp32_sums(dtype, n_rows, n_out, depth):
    x, weight = torch.randn(n_rows, depth).to(dtype), torch.randn(n_out, depth).to(dtype)
    ours = project_rows.project_rows(x, weight)
    exact = x.double() @ weight.double().T
    step = torch.finfo(dtype).eps * exact.abs() + 2e-6 * depth
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= step).all()
