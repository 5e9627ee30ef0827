"""The one block that a server prints at start: what kvdrive changed, what that costs, and what it serves with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_kvdrive.config import PRESETS, KVDriveConfig, format_bytes

CHANGES_ATTRIBUTE = "_kvdrive_changes"


class SettingChange(NamedTuple):
    """One stock SGLang setting that kvdrive overrode."""

    setting: str
    before: object
    after: object
    price: str


def changes_of(server_args) -> list[SettingChange]:
    """What the resolution hook recorded on these server arguments (the record travels to every process)."""
    return [SettingChange(*change) for change in getattr(server_args, CHANGES_ATTRIBUTE, ())]


def startup_block(
    *,
    changes: Sequence[SettingChange],
    config: KVDriveConfig,
    device: str,
    context_len: int,
    capacity_tokens: int,
    token_bytes: int,
    kernels: str | None = None,
) -> str:
    """The block as one string of several lines.

    Args:
        changes: from `changes_of(server_args)`.
        config: resolved: sizes and dense threshold are numbers (a None is shown as auto).
        device: cpu or cuda.
        context_len: longest request in tokens.
        capacity_tokens: tokens that all home tiers together hold.
        token_bytes: K and V of one token over all layers and heads.
        kernels: what computes on the cpu, in words.
    """
    lines = [f"kvdrive serves the KV cache on {device}:"]
    lines += [f"  {name:<10} {text}" for name, text in _facts(config, context_len, capacity_tokens, token_bytes)]
    if kernels:
        lines.append(f"  {'kernels':<10} {kernels}")
    lines.append("kvdrive changed these SGLang settings:" if changes else "kvdrive changed no SGLang setting.")
    width = max((len(change.setting) for change in changes), default=0)
    lines += [f"  {c.setting:<{width}}  {_show(c.before)} -> {_show(c.after)}: {c.price}" for c in changes]
    return "\n".join(lines)


def _facts(config: KVDriveConfig, context_len: int, capacity_tokens: int, token_bytes: int):
    hbm = "auto" if config.hbm_bytes is None else format_bytes(config.hbm_bytes)
    dram = "auto" if config.dram_bytes is None else format_bytes(config.dram_bytes)
    if config.in_place:
        yield "HBM", f"none beside DRAM on this device: chunks are attended where they lie; the index takes {hbm}"
    else:
        yield "HBM", f"{hbm}: sinks, recent tokens, index and windows x{config.window_multiple:g}, eviction {config.eviction}"
    yield "DRAM", f"{dram}: {capacity_tokens:,} tokens of {format_bytes(token_bytes)}"
    budget = min(config.budget_chunks(context_len) * config.chunk_size, context_len)
    yield (
        "budget",
        f"{config.budget} per (layer, KV head): {budget:,} of {context_len:,} tokens "
        f"({_percent(budget, context_len)}) at the context length, in chunks of {config.chunk_size}",
    )
    attended = config.attended_at_most(context_len)
    sink = config.sink_chunks * config.chunk_size
    yield (
        "on top",
        f"{sink} sink + {config.local_tokens} local + up to {config.pending_tokens} pending tokens are always attended: "
        f"at most {attended:,} tokens ({_percent(attended, context_len)}) at the context length",
    )
    if config.dense_below is None:
        yield "exact", "up to an automatic length a request attends every token"
    else:
        yield "exact", f"up to {config.dense_below:,} tokens (prompt and generation) a request attends every token"
    yield "preset", f"{config.preset}, measured on {PRESETS[config.preset].measured_on}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}%"


def _show(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
