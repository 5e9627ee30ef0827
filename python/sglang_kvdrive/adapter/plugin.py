"""General plugin entry point: hang kvdrive onto SGLang. Inert unless `--kv-manager kvdrive` is chosen.

SGLang loads it once per process, in the scheduler only after `sglang.srt.managers.scheduler` is imported. Registering a
hook imports its target, so what only a scheduler needs is registered only there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from sglang_kvdrive.adapter.notice import CHANGES_ATTRIBUTE, SettingChange
from sglang_kvdrive.layout import BLOCK_TOKENS

NAME = "kvdrive"
CPU_MAX_REQUESTS = 64
"""Requests at a time on cpu unless the user says otherwise: stock would allow thousands, and our books have a row for each."""
CPU_BUFFER_TOKENS = 16384
"""What SGLang believes to be its device pool on cpu. It only sizes SGLang's static input buffers (a few 8-byte columns)
and caps the running requests at half of it; tokens are admitted against our logical capacity instead."""


@dataclass
class _State:
    """How far activation came in this process."""

    active: bool = False
    failure: str | None = None
    targets: list[str] = field(default_factory=list)


_STATE = _State()


def activate() -> None:
    """Entry point. A failure is remembered, because SGLang logs it and goes on."""
    try:
        _add_flags()
        _add_resolution()
        _add_memory_seams()
        if "sglang.srt.managers.scheduler" in sys.modules:
            _add_scheduler_seams()
    except Exception as error:
        _STATE.failure = f"{type(error).__name__}: {error}"
        raise
    _STATE.active = True


def faults() -> list[str]:
    """Why kvdrive is not fully hooked into this process; empty when it is."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if _STATE.failure is not None:
        return [f"the kvdrive plugin failed to load ({_STATE.failure}): check the SGLang version with `kvdrive doctor`"]
    if not _STATE.active:
        return ["the kvdrive plugin is not loaded in this process: SGLANG_PLUGINS must name kvdrive or be unset, "
                "SGLANG_PLATFORM must be unset, and sglang-kvdrive must be installed in this Python"]  # fmt: skip
    return [f"the hook on {target} could not be applied" for target in _STATE.targets if target not in HookRegistry._patched]


def chosen() -> bool:
    """Whether this process serves with kvdrive. False before SGLang publishes its configuration."""
    from sglang.srt.runtime_context import get_memory

    try:
        return getattr(get_memory(), "kv_manager", None) == NAME
    except ValueError:
        return False


# -- flags and settings (every process) --------------------------------------------------------------------------


def _add_flags() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_kvdrive.adapter.args import KVDriveServerArgs

    hook("sglang.srt.server_args.ServerArgs", KVDriveServerArgs, HookType.REPLACE)
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None and hasattr(engine, "Engine"):
        engine.Engine.server_args_class = KVDriveServerArgs  # a class attribute: the replacement does not reach it
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _add_resolution() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_cpu_backends")(_declare_settings)


def declared_settings(view) -> dict[str, object]:
    """The plain settings kvdrive needs, by field. `view` tells what the user chose where we only change a default."""
    settings = {
        "attention_backend": NAME,
        "page_size": BLOCK_TOKENS,
        "disable_radix_cache": True,
        "radix_cache_backend": NAME,
        "disable_overlap_schedule": True,
    }
    if view.device == "cpu":
        settings["max_total_tokens"] = CPU_BUFFER_TOKENS
    return settings


_PRICES = {
    "attention_backend": "attention reads sink, selected and local tokens from kvdrive's tiers",
    "page_size": "a request's last page of DRAM is partly empty",
    "disable_radix_cache": "repeated prefixes are prefilled again, also for n > 1 and every turn of a chat",
    "radix_cache_backend": "no tree is kept, each request owns its cache",
    "disable_overlap_schedule": "scheduling a step no longer overlaps the one before",
    "max_total_tokens": "only sizes SGLang's input buffers; the capacity is the DRAM line above",
    "max_running_requests": "more requests than this wait; set --max-running-requests for another number",
    "prefill_decode_interval": "a long prompt waits one decode step after each piece, so running streams never stall",
    "prefill_decode_interval_min_bs": "that wait happens only while a stream runs",
    "cuda_graph_decode": "each decode step launches its kernels one by one",
    "cuda_graph_prefill": "each prefill piece launches its kernels one by one",
}


def _declare_settings(server_args, previous) -> None:
    """Resolution hook on `handle_cpu_backends`, which runs on every device, before memory and attention are decided."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    from sglang_kvdrive.adapter import selfcheck

    view = resolving_view(server_args)
    if getattr(view, "kv_manager", None) != NAME:
        return previous(server_args)
    selfcheck.raise_all(
        selfcheck.refuse_unsupported(server_args, model_config_of(server_args)) + selfcheck.refused_device(view.device)
    )
    settings = declared_settings(view)
    if view.device == "cpu" and view.max_running_requests is None:
        settings["max_running_requests"] = CPU_MAX_REQUESTS
    if view.prefill_decode_interval is None:
        settings["prefill_decode_interval"] = 1
        settings["prefill_decode_interval_min_bs"] = max(view.prefill_decode_interval_min_bs, 1)
    changes = []
    for name, after in settings.items():
        before = getattr(view, name)
        declare_resolution(server_args, NAME, **{name: after})
        if before != after:
            changes.append(SettingChange(name, before, after, _PRICES[name]))
    changes += _disable_graphs(server_args)
    setattr(server_args, CHANGES_ATTRIBUTE, [tuple(change) for change in changes])
    return previous(server_args)


def _disable_graphs(server_args) -> list[SettingChange]:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    changes = []
    for phase in (Phase.DECODE, Phase.PREFILL):
        config = resolving_view(server_args).cuda_graph_config  # read again: the first declaration is part of the second
        before = getattr(config, phase).backend
        if before != Backend.DISABLED:
            declare_resolution(server_args, NAME, cuda_graph_config=with_phase(config, phase, backend=Backend.DISABLED))
            changes.append(SettingChange(f"cuda_graph_{phase}", before, Backend.DISABLED, _PRICES[f"cuda_graph_{phase}"]))
    return changes


# -- memory: asked for by the KV cache configurator --------------------------------------------------------------


def _add_memory_seams() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    hook("sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls", _kv_pool_cls, HookType.AFTER)
    hook("sglang.srt.platforms.interface.SRTPlatform.get_paged_allocator_cls", _allocator_cls, HookType.AFTER)


def _kv_pool_cls(_result, _platform, *, kind):
    if not chosen() or kind != "mha":  # SGLang asks for all kinds, whatever the model; unsupported models were refused
        return None  # keeps the platform's own answer
    from sglang_kvdrive.adapter.pools import KVDrivePool

    return KVDrivePool


def _allocator_cls(_result, _platform):
    if not chosen():
        return None
    from sglang_kvdrive.adapter.pools import KVDriveAllocator

    return KVDriveAllocator


# -- scheduler ---------------------------------------------------------------------------------------------------


def _add_scheduler_seams() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookType

    register_attention_backend(NAME)(_backend)
    if get_radix_cache_factory(NAME) is None:
        register_radix_cache_backend(NAME, _tree)
    hook(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        _internal_state,
        HookType.AFTER,
    )
    hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", _no_fused_kv_write, HookType.AROUND)
    hook("sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class", _output_streamer_class, HookType.AFTER)
    hook("sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens", _init_req_max_new_tokens, HookType.AROUND)
    hook("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", _add_request_to_queue, HookType.AROUND)


def _backend(runner):
    from sglang_kvdrive.adapter.backend import create_backend

    return create_backend(runner)


def _tree(context):
    from sglang_kvdrive.adapter.cache import KVDriveTree

    return KVDriveTree(context.params)


def _internal_state(result, controller, *args):
    if not chosen():
        return None
    from sglang_kvdrive.adapter.metrics import add_internal_state

    return add_internal_state(result, controller, *args)


def _output_streamer_class(_result, _scheduler):
    if not chosen():
        return None
    from sglang_kvdrive.adapter.report import KVDriveOutputStreamer

    return KVDriveOutputStreamer


def _init_req_max_new_tokens(original, scheduler, req):
    if not chosen():
        return original(scheduler, req)
    from sglang_kvdrive.adapter.intake import init_req_max_new_tokens

    return init_req_max_new_tokens(original, scheduler, req)


def _add_request_to_queue(original, scheduler, req, *args, **kwargs):
    if not chosen():
        return original(scheduler, req, *args, **kwargs)
    from sglang_kvdrive.adapter.intake import add_request_to_queue

    return add_request_to_queue(original, scheduler, req, *args, **kwargs)


def _no_fused_kv_write(original, *args, **kwargs):
    """Fused RoPE kernels write K and V straight into the stock buffers: with logical ids that is out of bounds on a GPU."""
    return False if chosen() else original(*args, **kwargs)


def hook(target: str, function, kind) -> None:
    """Hang a function onto SGLang, and remember it: `faults` names what could not be applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.register(target, function, kind)
    _STATE.targets.append(target)
