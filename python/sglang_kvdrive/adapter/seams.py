"""Every place where kvdrive hangs on SGLang, and a check that each still has the shape we were written for.

A seam is a dotted target, why we need it, and what must be true of it: parameters of a callable, attributes of a class.
`kvdrive doctor` prints the table; the attention backend refuses to start on a broken one.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class Seam:
    """One target in SGLang.

    Args:
        target: dotted path.
        kind: how we hang on it: hook, registry, subclass, call.
        why: what kvdrive needs it for.
        parameters: names the callable must accept, in this order (others may follow if they have defaults).
        attributes: names a class must have; `fields:x` asks for a field of an SGLang argument record.
    """

    target: str
    kind: str
    why: str
    parameters: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeamResult:
    """Outcome of one check: `detail` says why we need the seam, or what is wrong with it."""

    name: str
    ok: bool
    detail: str


_SRT = "sglang.srt."
_ARG_FIELDS = (
    "attention_backend", "page_size", "disable_radix_cache", "radix_cache_backend", "disable_overlap_schedule",
    "max_total_tokens", "prefill_decode_interval", "prefill_decode_interval_min_bs", "cuda_graph_config",
    "chunked_prefill_size", "device", "model_path",
)  # fmt: skip

SEAMS = (
    # flags and settings
    Seam(_SRT + "server_args.ServerArgs", "hook", "--kv-manager and --kvdrive-* flags",
         attributes=("from_cli_args", "resolve_once", "_NS_BY_FIELD", *(f"fields:{name}" for name in _ARG_FIELDS))),
    Seam(_SRT + "server_args.prepare_server_args", "call", "command line to settings", ("argv",)),
    Seam(_SRT + "entrypoints.engine.Engine", "hook", "the same settings for sglang.Engine(...)",
         attributes=("server_args_class",)),
    Seam(_SRT + "plugins.load_plugins", "call", "loads this plugin in every process", ()),
    Seam(_SRT + "plugins.hook_registry.HookRegistry.register", "call", "applies hooks", ("target", "hook", "hook_type")),
    Seam(_SRT + "plugins.hook_registry.HookRegistry", "call", "tells which hooks were applied", attributes=("_patched",)),
    Seam(_SRT + "arg_groups.resolution_hooks.register_resolution_hook", "registry", "changes stock settings", ("name",)),
    Seam(_SRT + "arg_groups.platform_hook.handle_cpu_backends", "hook", "the step that changes them", ("server_args",)),
    Seam(_SRT + "arg_groups.overrides.declare_resolution", "call", "declares a changed setting", ("server_args", "source")),
    Seam(_SRT + "arg_groups.overrides.model_config_of", "call", "the model, to refuse what we cannot serve", ("server_args",)),
    Seam(_SRT + "arg_groups.choices.add_attention_backend_choices", "registry", "makes `kvdrive` a legal backend name"),
    Seam(_SRT + "model_executor.cuda_graph_config.with_phase", "call", "turns CUDA graphs off", ("config", "phase")),
    Seam(_SRT + "runtime_context.get_memory", "call", "whether kvdrive was chosen in this process", ()),
    # memory
    Seam(_SRT + "platforms.interface.SRTPlatform.get_kv_pool_cls", "hook", "our KV pool", ("self", "kind")),
    Seam(_SRT + "platforms.interface.SRTPlatform.get_paged_allocator_cls", "hook", "our page allocator", ("self",)),
    Seam(_SRT + "mem_cache.memory_pool.MHATokenToKVPool", "subclass", "base of our KV pool",
         ("size", "page_size", "dtype", "head_num", "head_dim", "layer_num", "device", "enable_memory_saver"),
         ("_create_buffers", "set_kv_buffer", "get_key_buffer", "get_value_buffer", "get_kv_buffer")),
    Seam(_SRT + "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator", "subclass", "base of our page allocator",
         ("size", "page_size", "dtype", "device", "kvcache", "need_sort"),
         ("available_size", "alloc_extend", "alloc_decode", "free", "free_segments", "_release_page_ids", "clear",
          "max_new_tokens_for_memory", "check_decode_capacity", "verify_byte_accounting")),
    Seam(_SRT + "mem_cache.memory_pool.ReqToTokenPool.attach_aux_cache", "call", "reports the capacity of all tiers",
         ("self", "aux_cache")),
    Seam(_SRT + "mem_cache.memory_pool.ReqToTokenPool.schedulable_token_capacity", "call", "reads that capacity",
         ("self", "physical_capacity")),
    # scheduler
    Seam(_SRT + "mem_cache.registry.register_radix_cache_backend", "registry", "our radix-free cache", ("name", "factory")),
    Seam(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache", "subclass", "base of our radix-free cache",
         attributes=("reset", "match_prefix", "checkpoint", "evict", "inc_lock_ref", "dec_lock_ref", "on_release",
                     "flush_pending_backups", "supports_prefix_sharing", "release_host_resources")),
    Seam(_SRT + "layers.attention.attention_registry.register_attention_backend", "registry", "our attention backend", ("name",)),
    Seam(_SRT + "layers.attention.base_attn_backend.AttentionBackend", "subclass", "base of our attention backend",
         attributes=("init_forward_metadata", "forward_extend", "forward_decode")),
    Seam(_SRT + "layers.attention.base_attn_backend.AttentionBackend.forward", "subclass", "how attention is called",
         ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
    Seam(_SRT + "layers.radix_attention.RadixAttention.__init__", "call", "shapes of one attention layer",
         ("self", "num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id")),
    Seam(_SRT + "managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state", "hook",
         "statistics in /server_info", ("self", "recv_req")),
    Seam(_SRT + "managers.scheduler.Scheduler.get_output_streamer_class", "hook", "what each request did", ("self",)),
    Seam(_SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer", "subclass", "the same",
         attributes=("has_additional_customized_info", "build_additional_customized_info")),
    Seam(_SRT + "managers.scheduler.Scheduler.init_req_max_new_tokens", "hook", "says when memory cuts a generation short",
         ("self", "req")),
    Seam(_SRT + "managers.scheduler.Scheduler._add_request_to_queue", "hook", "answers a refused request at once",
         ("self", "req", "is_retracted")),
    Seam(_SRT + "managers.scheduler.Scheduler.retire_unadmitted_request", "call", "the same", ("self", "req")),
    Seam(_SRT + "disaggregation.utils.is_unadmitted_reject", "call", "tells that a request was refused", ("req",)),
    Seam(_SRT + "mem_cache.prefill_budget.PrefillBudget", "subclass", "admission counts HBM too",
         attributes=("check_prefill", "can_allocate_prefill", "reserve")),
    Seam(_SRT + "mem_cache.memory_pool.NoOpMHATokenToKVPool", "subclass", "a KV pool without buffers"),
    Seam(_SRT + "models.utils.enable_fused_set_kv_buffer", "hook", "no kernel writes K and V past us", ("forward_batch",)),
    # layers around attention, on the cpu
    Seam(_SRT + "layers.layernorm.RMSNorm.forward_native", "hook", "fast norms on the cpu",
         ("self", "x", "residual", "post_residual_addition", "quant_linear")),
    Seam(_SRT + "layers.rotary_embedding.base.RotaryEmbedding.forward_native", "hook", "fast rotary embedding on the cpu",
         ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg")),
    Seam(_SRT + "layers.activation.SiluAndMul.forward_native", "hook", "a fast gate on the cpu", ("self", "x")),
    Seam(_SRT + "layers.quantization.unquant.UnquantizedLinearMethod.apply", "hook", "fast thin products on the cpu",
         ("self", "layer", "x", "bias")),
    Seam(_SRT + "layers.logits_processor.LogitsProcessor._compute_lm_head", "hook", "the same for the last layer",
         ("self", "hidden_states", "lm_head", "embedding_bias", "out")),
)  # fmt: skip


def check_seams() -> list[SeamResult]:
    """Check the SGLang version and every seam. Imports SGLang's scheduler side: slow outside a scheduler process."""
    return [_check_version(), *map(_check, SEAMS)]


def _check_version() -> SeamResult:
    name = "SGLang version"
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return SeamResult(name, False, f"SGLang is not installed: pip install sglang=={SGLANG_VERSION}")
    if found != SGLANG_VERSION:
        return SeamResult(name, False, f"found {found}, needs exactly {SGLANG_VERSION}: pip install sglang=={SGLANG_VERSION}")
    return SeamResult(name, True, found)


def _check(seam: Seam) -> SeamResult:
    try:
        target = pkgutil.resolve_name(seam.target)
    except Exception as error:  # a module that does not import is a broken seam, whatever it raises
        return SeamResult(seam.target, False, f"not found ({type(error).__name__}: {error}); needed for: {seam.why}")
    faults = [*_parameter_faults(seam, target), *_attribute_faults(seam, target)]
    return SeamResult(seam.target, not faults, "; ".join(faults) + f"; needed for: {seam.why}" if faults else seam.why)


def _parameter_faults(seam: Seam, target: object):
    if seam.parameters is None:
        return
    parameters = inspect.signature(target).parameters  # follows __wrapped__, so a hooked target shows its own signature
    names = tuple(parameters)
    if names[: len(seam.parameters)] != seam.parameters:
        yield f"takes ({', '.join(names)}), expected it to begin with ({', '.join(seam.parameters)})"
        return
    for name in names[len(seam.parameters) :]:
        parameter = parameters[name]
        if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"has a new parameter without a default: {name}"


def _attribute_faults(seam: Seam, target: object):
    for name in seam.attributes:
        kind, _, field = name.rpartition(":")
        names = getattr(target, "__struct_fields__", ()) if kind == "fields" else dir(target)
        if field not in names:
            yield f"has no {'field' if kind else 'attribute'} {field}"
