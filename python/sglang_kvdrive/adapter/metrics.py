"""Seams that read: `/server_info` and the length of a generation that memory cuts short."""

from __future__ import annotations

from sglang_kvdrive.adapter.report import KEY, engine_report


def add_internal_state(result, controller, *_args):
    """AFTER `get_internal_state`: add our part."""
    result.internal_state[KEY] = engine_report(controller.scheduler.token_to_kv_pool_allocator.engine)
    return result


def init_req_max_new_tokens(original, scheduler, req):
    """AROUND `Scheduler.init_req_max_new_tokens`: say when memory, not the request, limits a generation.

    Stock clips silently, down to an answer of zero tokens with status 200. We keep the clip, note it for the answer's
    meta_info, and refuse a prompt that leaves no room for a single token.
    """
    asked = req.sampling_params.max_new_tokens
    original(scheduler, req)
    given = req.sampling_params.max_new_tokens
    prompt = len(req.origin_input_ids)
    by_context = max(0, scheduler.model_config.context_len - prompt - 1)
    wanted = by_context if asked is None else min(asked, by_context)
    if given >= wanted:
        return
    capacity = scheduler.max_total_num_tokens
    if given == 0:
        req.set_finish_with_abort(
            f"The prompt has {prompt} tokens and the KV cache holds {capacity} tokens in all tiers: no room is left to "
            f"generate (asked for {wanted}). Shorten the prompt or start the server with a larger --kvdrive-dram."
        )
        return
    req.kvdrive_clipped = {
        "asked_tokens": wanted,
        "given_tokens": given,
        "reason": f"the KV cache holds {capacity} tokens in all tiers, the prompt has {prompt}",
    }
