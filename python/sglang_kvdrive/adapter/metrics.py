"""Seam that reads: our part of `/server_info`."""

from __future__ import annotations

from sglang_kvdrive.adapter.report import KEY, engine_report


def add_internal_state(result, controller, *_args):
    """AFTER `get_internal_state`: add our part."""
    result.internal_state[KEY] = engine_report(controller.scheduler.token_to_kv_pool_allocator.engine)
    return result
