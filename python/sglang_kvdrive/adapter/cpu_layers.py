"""What surrounds attention on the cpu: norms, rotary embedding, gate and thin matrix products through our kernels.

Without AMX, SGLang computes these in plain PyTorch: a dozen small operations per layer, and bf16 products that PyTorch emulates
where the CPU has no instruction for them. Together they took two thirds of a decode step. Same formulas, same roundings; what a
kernel does not take goes to SGLang's own method. Installed in a scheduler that serves with kvdrive on the cpu, nowhere else.
"""

from __future__ import annotations

from functools import cache

import torch
from kvdrive_kernels import native
from kvdrive_kernels.dispatch import NATIVE_DIM
from kvdrive_kernels.gate_rows import gate_rows
from kvdrive_kernels.norm_rows import norm_rows
from kvdrive_kernels.project_rows import project_rows
from kvdrive_kernels.rotate_heads import rotate_heads

from sglang_kvdrive.adapter import plugin

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS, FEW_ROWS_EMULATED = 16, 32
"""Up to this many rows a matrix product is bound by reading the matrix, and ours is faster than PyTorch's: measured with AVX2 and
AVX-512, 2.1 times at one row (`benchmark/kernels/bench_project_rows.py`)."""
HALF_INSTRUCTIONS = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""Where the CPU has them, PyTorch's own products are fast."""


def install() -> str:
    """Hang the kernels onto SGLang's layers, if there are native ones. Says in words what computes from now on."""
    if native.library() is None:
        return "PyTorch (KVDRIVE_KERNELS=torch, or no compiler was found)"
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in (
        ("sglang.srt.layers.layernorm.RMSNorm.forward_native", _norm),
        ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native", _rotate),
        ("sglang.srt.layers.activation.SiluAndMul.forward_native", _gate),
        ("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", _linear),
        ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", _head),
    ):
        plugin.hook(target, function, HookType.AROUND)
    HookRegistry.apply_hooks()
    return f"C++ ({native.in_use()}), also for norms, rotary embedding, gate and matrix products of few rows"


def _norm(original, norm, x, residual=None, post_residual_addition=None, quant_linear=None):
    plain = (
        post_residual_addition is None
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )
    if not plain or not _fits(x, norm.weight, residual) or x.shape[-1] != norm.hidden_size:
        return original(norm, x, residual, post_residual_addition, quant_linear)
    normed, total = norm_rows(x, residual, norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, total)


def _rotate(original, rope, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    turns = rope.cos_sin_cache
    plain = offsets is None and fused_set_kv_buffer_arg is None and not hasattr(rope, "sin_cos_cache")
    fits = (
        turns.dtype == query.dtype == key.dtype
        and query.dtype in FLOATS
        and query.dim() == key.dim() == 2
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and query.stride(1) == key.stride(1) == 1
        and turns.is_contiguous()
        and turns.shape[1] == rope.rotary_dim
    )
    if not plain or not fits:
        return original(rope, positions, query, key, offsets, fused_set_kv_buffer_arg)
    return rotate_heads(query, key, positions, turns, rope.head_size, rope.is_neox_style)


def _gate(original, act, x):
    if x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] % (2 * NATIVE_DIM):
        return original(act, x)
    return gate_rows(x)


def _linear(original, method, layer, x, bias=None):
    out = _product(x, layer.weight)
    if out is None:
        return original(method, layer, x, bias)
    return out if bias is None else out.add_(bias)


def _head(original, processor, hidden_states, lm_head, embedding_bias=None, *, out=None):
    weight = getattr(lm_head, "weight", None)
    adapted = hasattr(lm_head, "set_lora") or processor.use_fp32_lm_head or processor.rl_on_policy_target is not None
    plain = weight is not None and embedding_bias is None and out is None and not adapted
    logits = _product(hidden_states, weight) if plain else None
    if logits is None:
        return original(processor, hidden_states, lm_head, embedding_bias, out=out)
    return logits


def _product(x: torch.Tensor, weight) -> torch.Tensor | None:
    """`x @ weight.T`, or None where PyTorch's own is as good."""
    if not _fits(x, weight):
        return None
    emulated = _emulated(x.dtype)
    if 0 < x.shape[0] <= (FEW_ROWS_EMULATED if emulated else FEW_ROWS):
        return project_rows(x, weight)
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype) if emulated else None


@cache
def _emulated(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of this dtype without an instruction for it."""
    return dtype in HALF_INSTRUCTIONS and HALF_INSTRUCTIONS[dtype] not in native.cpu_flags()


def _fits(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor | None = None) -> bool:
    """Rows of whole vectors in the dtype of the weight."""
    return (
        x.dtype in FLOATS
        and x.dtype == weight.dtype
        and x.dim() == 2
        and x.shape[1] % NATIVE_DIM == 0
        and weight.is_contiguous()
        and (other is None or (other.dtype == x.dtype and other.shape == x.shape))
    )
