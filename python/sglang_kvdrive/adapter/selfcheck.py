"""Stop a server that kvdrive cannot serve, or that got only half of its hooks, with every reason at once.

SGLang logs a plugin or hook that fails and goes on without it. A server started with `--kv-manager kvdrive` must never
run natively because of that, so the main process checks before any child starts, every child that loads plugins checks
again, and the attention backend calls `assert_hooked` when pools and allocator exist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_kvdrive.errors import ConfigError
from sglang_kvdrive.layout import BLOCK_TOKENS

DEVICES = ("cpu", "cuda")
FINE_POLICIES = ("fcfs", "lof", "random", "routing-key")
KV_DTYPES = ("auto", "bf16", "bfloat16")


class Setting(NamedTuple):
    """A stock setting we cannot serve with: refused when `refused(value)`."""

    field: str
    refused: Callable[[Any], bool]
    why: str
    flag: str | None = None

    def reason(self, value: object) -> str:
        name = self.flag or "--" + self.field.replace("_", "-")
        return f"{name} is {value}: {self.why}" if not isinstance(value, bool) else f"{name} is set: {self.why}"


def _other_than(*allowed: object) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


def _above(limit: int) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def _set(value: object) -> bool:
    return value not in (None, False, "", [], {})


_OURS = "kvdrive sets it itself, remove the flag"
_EAGER = "kvdrive's decode runs eagerly, without graphs or compilation; remove the flag"
_LATER = "not built yet, use 1"
_PREFIX = "it keeps finished prefixes and kvdrive keeps none; remove the flag"
_WORKS_ON_STOCK_KV = "it works on SGLang's own KV buffers, which kvdrive replaces; remove the flag"

SETTINGS = (
    # What kvdrive decides itself. An explicit other choice is refused, never silently replaced.
    Setting("attention_backend", _other_than(None, "kvdrive"), _OURS),
    Setting("prefill_attention_backend", _other_than(None, "kvdrive"), _OURS),
    Setting("decode_attention_backend", _other_than(None, "kvdrive"), _OURS),
    Setting("page_size", _other_than(None, BLOCK_TOKENS), f"kvdrive allocates pages of {BLOCK_TOKENS} tokens; remove the flag"),
    Setting("radix_cache_backend", _other_than(None, "kvdrive"), _OURS),
    Setting("max_total_tokens", _set, "kvdrive's capacity is set by --kvdrive-dram and --kvdrive-hbm; remove the flag"),
    Setting("cuda_graph_config", _set, _EAGER),
    Setting("cuda_graph_backend_decode", _other_than(None, "disabled"), _EAGER),
    Setting("cuda_graph_backend_prefill", _other_than(None, "disabled"), _EAGER),
    Setting("enable_torch_compile", _set, _EAGER),
    Setting("schedule_policy", _other_than(*FINE_POLICIES), f"it orders by cached prefixes; use {', '.join(FINE_POLICIES)}"),
    Setting(
        "chunked_prefill_size",
        lambda value: value is not None and (value <= 0 or value % BLOCK_TOKENS != 0),
        f"it must be a multiple of {BLOCK_TOKENS} above 0; prompts longer than HBM need pieces",
    ),
    # Features that read or write the KV cache behind our back, or that no test covers yet.
    Setting("kv_cache_dtype", _other_than(*KV_DTYPES), f"not built yet, use {' or '.join(KV_DTYPES)}"),
    Setting("speculative_algorithm", _set, "speculative decoding is not supported; remove the flag"),
    Setting("disaggregation_mode", _other_than("null"), "PD disaggregation is not supported; use null"),
    Setting("encoder_only", _set, "encoder disaggregation is not supported; remove the flag"),
    Setting("language_only", _set, "encoder disaggregation is not supported; remove the flag"),
    Setting("enable_pdmux", _set, "PD multiplexing is not supported; remove the flag"),
    Setting("enable_mixed_chunk", _set, "decode rows would run as one-token prompts; remove the flag"),
    Setting("tp_size", _above(1), f"tensor parallelism is {_LATER}", "--tensor-parallel-size"),
    Setting("pp_size", _above(1), "pipeline parallelism is not supported, use 1", "--pipeline-parallel-size"),
    Setting("dp_size", _above(1), f"data parallelism is {_LATER} and start one server per replica", "--data-parallel-size"),
    Setting("attn_dp_size", _above(1), "DP attention is not supported, use 1"),
    Setting("enable_dp_attention", _set, "DP attention is not supported; remove the flag"),
    Setting("attn_cp_size", _above(1), "context parallelism is not supported, use 1"),
    Setting("dcp_size", _above(1), "context parallelism is not supported, use 1"),
    Setting("enable_prefill_cp", _set, "context parallelism is not supported; remove the flag"),
    Setting("nnodes", _above(1), f"several nodes are {_LATER}"),
    Setting("use_ray", _set, "Ray actors do not load plugins; remove the flag"),
    Setting("enable_hierarchical_cache", _set, _PREFIX),
    Setting("enable_lmcache", _set, _PREFIX),
    Setting("enable_flexkv", _set, _PREFIX),
    Setting("enable_unified_cache_external_linker", _set, _PREFIX),
    Setting("enable_session_radix_cache", _set, _PREFIX),
    Setting("enable_streaming_session", _set, _PREFIX),
    Setting("enable_hisparse", _set, _WORKS_ON_STOCK_KV),
    Setting("enable_unified_memory", _set, _WORKS_ON_STOCK_KV),
    Setting("enable_page_major_kv_layout", _set, _WORKS_ON_STOCK_KV),
    Setting("enable_kv_cache_sharding", _set, _WORKS_ON_STOCK_KV),
    Setting("prefill_only_disable_kv_cache", _set, _WORKS_ON_STOCK_KV),
    Setting("enable_memory_saver", _set, _WORKS_ON_STOCK_KV),
    Setting("kv_canary", _other_than("none"), _WORKS_ON_STOCK_KV),
    Setting("enable_nvidia_megakernel", _set, _WORKS_ON_STOCK_KV),
    Setting("enable_amd_monokernel", _set, _WORKS_ON_STOCK_KV),
    Setting("enable_mis", _set, "multi-item scoring needs its own attention mask; remove the flag"),
    Setting("enable_two_batch_overlap", _set, "kvdrive splits batches itself; remove the flag"),
    Setting("enable_single_batch_overlap", _set, "kvdrive overlaps work itself; remove the flag"),
    Setting("enable_deterministic_inference", _set, "SGLang allows it for its own attention backends only; remove the flag"),
    Setting("enable_lora", _set, "LoRA is not built yet; remove the flag"),
    Setting("lora_paths", _set, "LoRA is not built yet; remove the flag"),
    Setting("dllm_algorithm", _set, "diffusion language models are not supported; remove the flag"),
    Setting("is_embedding", _set, "embedding models have no decode to serve; remove the flag"),
)


def raise_all(reasons: Sequence[str]) -> None:
    if reasons:
        raise ConfigError(list(dict.fromkeys(reasons)))


def refuse_unsupported(server_args, model_config) -> list[str]:
    """Every reason why these server arguments with this model cannot be served; empty when they can."""
    return list(dict.fromkeys(refused_settings(server_args) + refused_model(model_config)))


def refused_settings(server_args) -> list[str]:
    """Faults of what the user set. Reads the record's raw input: what resolution declares later is not the user's choice."""
    reasons = [setting.reason(value) for setting in SETTINGS if setting.refused(value := getattr(server_args, setting.field))]
    if sys.platform != "linux":
        reasons.append(f"the operating system is {sys.platform}: kvdrive runs on Linux only (memfd, file descriptor passing)")
    return reasons


def refused_device(device: str) -> list[str]:
    if device not in DEVICES:
        return [f"--device is {device}: kvdrive serves on {' and '.join(DEVICES)} only"]
    if device == "cuda":
        import torch

        if torch.version.hip is not None:
            return ["--device is cuda on ROCm: kvdrive's CUDA path needs an NVIDIA GPU"]
    return []


def refused_model(model_config) -> list[str]:
    """Faults of the model. `model_config` is SGLang's `ModelConfig`."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    name = model_config.hf_config.model_type
    reasons = []
    if model_config.attention_arch == AttentionArch.MLA:
        reasons.append("multi-head latent attention (MLA) is not supported")
    if model_config.attention_arch == AttentionArch.SSM or mambaish_config(model_config) is not None:
        reasons.append("mamba and linear-attention layers are not supported")
    if model_config.is_encoder_decoder:
        reasons.append("encoder-decoder models are not supported")
    elif not model_config.is_generation:
        reasons.append("it does not generate text (embedding, reward and classification models have no decode)")
    if model_config.is_multimodal:
        reasons.append("multimodal models are not tested yet")
    if model_config.has_asymmetric_kv:
        reasons.append(f"keys have {model_config.head_dim} dimensions and values {model_config.v_head_dim}, they must be equal")
    if model_config.has_attention_sinks:
        reasons.append("attention with learned sinks is not supported")
    if getattr(model_config.hf_config, "dual_chunk_attention_config", None):
        reasons.append("dual chunk attention is not supported")
    reasons += _unusual_attention(model_config)
    return [f"model type {name}: {reason}" for reason in reasons]


def _unusual_attention(model_config):
    text = model_config.hf_text_config
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    window = model_config.sliding_window_size
    if getattr(text, "use_sliding_window", None) is False or (window is not None and window >= model_config.context_len):
        window = None
    if "sliding_attention" in kinds:
        kinds.remove("sliding_attention")
        yield f"layers with a sliding attention window of {model_config.sliding_window_size} tokens are not built yet"
    elif model_config.is_hybrid_swa:
        yield "layers with a sliding attention window are not built yet"
    elif window is not None and not getattr(text, "layer_types", None):
        yield (
            f"a sliding attention window of {window} tokens is not built yet; SGLang itself serves some such models with full "
            "attention: if you want that, add --json-model-override-args '{\"sliding_window\": null}'"
        )
    if model_config.attention_chunk_size is not None or model_config.is_local_attention_model:
        yield f"chunked local attention of {model_config.attention_chunk_size} tokens is not supported"
    if kinds:
        yield f"attention layers of the kinds {', '.join(kinds)} are not supported, only full_attention"
    grok = any("Grok" in architecture for architecture in model_config.hf_config.architectures or ())
    cap = getattr(text, "attn_logit_softcapping", 30.0 if grok else None)
    if cap:
        yield f"a soft cap of {cap:g} on attention logits is not built yet"
    if getattr(text, "is_causal", True) is False:
        yield "attention that is not causal is not supported"


def refused_local_model(server_args) -> list[str]:
    """The model's faults when the start fails anyway: only for a model on this disk, and never an error of its own.

    A separate `ModelConfig`, so that SGLang's memoised one is still built at SGLang's own moment.
    """
    from sglang.srt.configs.model_config import ModelConfig

    if not os.path.isdir(str(server_args.model_path)):
        return []
    try:
        return refused_model(ModelConfig.from_server_args(server_args))
    except Exception:  # this is advice on top of a failure that is already certain
        return []


def settings_that_did_not_hold(server_args) -> list[str]:
    """Our declarations that a later resolution step or another plugin replaced."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_kvdrive.adapter.plugin import declared_settings

    view = resolving_view(server_args)
    reasons = []
    for name, wanted in declared_settings(view).items():
        value = getattr(view, name)
        if value != wanted:
            reasons.append(f"{name} ended as {value!r} where kvdrive needs {wanted!r}: another plugin or a model rule changed it")
    for phase in ("decode", "prefill"):
        backend = getattr(view.cuda_graph_config, phase).backend
        if backend != "disabled":
            reasons.append(f"CUDA graphs of {phase} ended as {backend!r} where kvdrive needs 'disabled'")
    pieces = view.chunked_prefill_size
    if pieces is None or pieces <= 0 or pieces % BLOCK_TOKENS:
        reasons.append(f"chunked_prefill_size ended as {pieces}, it must be a multiple of {BLOCK_TOKENS} above 0")
    return reasons


def plugin_faults() -> list[str]:
    """What is missing of our general plugin in this process."""
    from sglang_kvdrive.adapter import plugin

    return plugin.faults()


def assert_hooked(*, pool, allocator, tree=None) -> None:
    """Called by the attention backend: everything that serves the KV cache in this process must be ours.

    Args:
        pool: `runner.token_to_kv_pool`.
        allocator: `runner.token_to_kv_pool_allocator`.
        tree: the prefix cache, where it already exists (SGLang builds it after the attention backend).

    Raises:
        ConfigError: with every part that is not ours and every broken seam.
    """
    from sglang_kvdrive.adapter.cache import KVDriveTree
    from sglang_kvdrive.adapter.pools import KVDriveAllocator, KVDrivePool
    from sglang_kvdrive.adapter.seams import check_seams

    reasons = plugin_faults()
    for what, part, wanted in (
        ("KV pool", pool, KVDrivePool),
        ("page allocator", allocator, KVDriveAllocator),
        *((("prefix cache", tree, KVDriveTree),) if tree is not None else ()),
    ):
        if not isinstance(part, wanted):
            reasons.append(f"the {what} is {type(part).__module__}.{type(part).__qualname__}, not kvdrive's {wanted.__name__}")
    reasons += [f"seam {seam.name}: {seam.detail}" for seam in check_seams() if not seam.ok]
    if reasons:
        raise ConfigError(
            ["kvdrive is only half hooked into this SGLang process and stops instead of serving natively:", *reasons]
        )
