"""The layers around attention: what our kernels take equals SGLang's own, and everything else goes to SGLang's own."""

from __future__ import annotations

import pytest
import torch
from kvdrive_kernels import native

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def layers():
    from sglang_kvdrive.adapter import cpu_layers

    return cpu_layers


def never(*_args, **_kwargs):
    raise AssertionError("SGLang's own method ran")


def remembered(*_args, **_kwargs):
    return "SGLang's own"


def near(ours, theirs, dtype):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.allclose(ours.float(), theirs.float(), rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("n_rows", [1, 7, 300])
def test_norm_equals_sglangs(layers, dtype, n_rows):
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(576, eps=1e-5)
    norm.weight.data.uniform_(0.5, 2)
    x, residual = torch.randn(n_rows, 576), torch.randn(n_rows, 576)
    near(layers._norm(never, norm, x), norm.forward_native(x), dtype)
    for ours, theirs in zip(layers._norm(never, norm, x, residual), norm.forward_native(x, residual), strict=True):
        near(ours, theirs, dtype)


@pytest.mark.parametrize("change", ["cast_x_before_out_mul", "fp32_residual", "variance_size_override"])
def test_a_norm_of_another_kind_stays_sglangs(layers, change):
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(64)
    setattr(norm, change, 32 if change == "variance_size_override" else True)
    assert layers._norm(remembered, norm, torch.randn(2, 64)) == "SGLang's own"
    assert layers._norm(remembered, RMSNorm(64), torch.randn(2, 64, dtype=torch.float64)) == "SGLang's own"


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [64, 32])
def test_rotary_embedding_equals_sglangs(layers, dtype, neox, rotary):
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    rope = RotaryEmbedding(64, rotary, 512, 10000, neox, dtype)
    positions = torch.randint(0, 512, (9,))
    q, k, _v = torch.randn(9, 15 * 64).split([9 * 64, 3 * 64, 3 * 64], dim=-1)
    for ours, theirs in zip(layers._rotate(never, rope, positions, q, k), rope.forward_native(positions, q, k), strict=True):
        near(ours, theirs, dtype)
    assert layers._rotate(remembered, rope, positions, q, k, offsets=torch.ones_like(positions)) == "SGLang's own"


def test_gate_equals_sglangs(layers, dtype):
    from sglang.srt.layers.activation import SiluAndMul

    act = SiluAndMul()
    x = torch.randn(5, 3072) * 5
    near(layers._gate(never, act, x), act.forward_native(x), dtype)
    assert layers._gate(remembered, act, torch.randn(5, 30)) == "SGLang's own"


@pytest.mark.parametrize("n_rows", [1, 4, 8, 32])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_through_a_linear_equal_sglangs(layers, dtype, n_rows, bias):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    layer = torch.nn.Linear(576, 960, bias=bias)
    x = torch.randn(n_rows, 576)
    arguments = (x, layer.weight, layer.bias)
    exact = torch.nn.functional.linear(*(None if a is None else a.double() for a in arguments))
    with torch.no_grad():
        ours = layers._linear(UnquantizedLinearMethod.apply, UnquantizedLinearMethod(), layer, x, layer.bias)
        theirs = torch.nn.functional.linear(*arguments)
    assert ours.dtype == dtype
    errors = [float((out.double() - exact).abs().max()) for out in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]


def test_many_rows_in_bf16_use_fp32_products_only_where_the_cpu_has_no_bf16(layers, monkeypatch):
    layer, x = torch.nn.Linear(64, 64, bias=False).bfloat16(), torch.randn(500, 64).bfloat16()
    for flags, expected in ((frozenset(), torch.Tensor), (frozenset({"avx512_bf16"}), str)):
        layers._emulated.cache_clear()
        monkeypatch.setattr(native, "cpu_flags", lambda flags=flags: flags)
        with torch.no_grad():
            assert isinstance(layers._linear(remembered, None, layer, x), expected)
    layers._emulated.cache_clear()


def test_quantised_and_fp64_weights_stay_sglangs(layers):
    for weight in (torch.zeros(64, 64, dtype=torch.int8), torch.zeros(64, 64, dtype=torch.float64)):
        layer = torch.nn.Module()
        layer.weight = weight
        assert layers._linear(remembered, None, layer, torch.randn(2, 64)) == "SGLang's own"


def test_without_native_kernels_nothing_is_installed(layers, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(native, "library", lambda: None)
    before = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
    assert layers.install().startswith("PyTorch")
    assert {target: len(hooks) for target, hooks in HookRegistry._hooks.items()} == before
