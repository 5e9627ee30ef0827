"""Seams at a request's arrival: refuse what can never be served, at once, and say when memory cuts a generation short."""

from __future__ import annotations

import numpy as np


def init_req_max_new_tokens(original, scheduler, req):
    """AROUND `Scheduler.init_req_max_new_tokens`, which SGLang calls for every arriving request.

    Stock clips silently, down to an answer of zero tokens with status 200. We keep the clip, note it for the answer's
    meta_info, and refuse a prompt that leaves no room for a single token. Refused too: a prompt without any token, and a
    token id that the model does not have. Stock computes both, and the server ends.
    """
    asked = req.sampling_params.max_new_tokens
    original(scheduler, req)
    given = req.sampling_params.max_new_tokens
    prompt = len(req.origin_input_ids)
    if prompt == 0:
        req.set_finish_with_abort("The prompt has no tokens: send at least one.")
        return
    unknown = _unknown_token(req.origin_input_ids, scheduler.model_config.vocab_size)
    if unknown is not None:
        vocabulary = scheduler.model_config.vocab_size
        req.set_finish_with_abort(f"The prompt has the token id {unknown}, the model has the ids 0 to {vocabulary - 1}.")
        return
    by_context = max(0, scheduler.model_config.context_len - prompt - 1)
    wanted = by_context if asked is None else min(asked, by_context)
    if given >= wanted:
        return
    capacity = scheduler.max_total_num_tokens
    if given == 0:
        req.set_finish_with_abort(
            f"The prompt has {prompt} tokens and the KV cache holds {capacity} tokens in all tiers, of which a prompt can have "
            f"{longest_prompt(capacity, scheduler.page_size)}: no room is left to generate (asked for {wanted}). "
            "Shorten the prompt or start the server with a larger --kvdrive-dram."
        )
        return
    req.kvdrive_clipped = {
        "asked_tokens": wanted,
        "given_tokens": given,
        "reason": f"the KV cache holds {capacity} tokens in all tiers, the prompt has {prompt}",
    }


def longest_prompt(capacity: int, page_size: int) -> int:
    """Tokens of the longest prompt that gets at least one new token: SGLang's admission keeps a page and two tokens spare."""
    return max(0, (capacity - page_size - 3) // page_size * page_size)


def add_request_to_queue(original, scheduler, req, is_retracted=False):
    """AROUND `Scheduler._add_request_to_queue`: a refused request is answered now.

    Stock queues it like any other, so that the refusal waits behind every prompt that came before.
    """
    from sglang.srt.disaggregation.utils import is_unadmitted_reject

    if is_retracted or not is_unadmitted_reject(req):
        return original(scheduler, req, is_retracted=is_retracted)
    return scheduler.retire_unadmitted_request(req)


def _unknown_token(ids, vocabulary: int) -> int | None:
    """A token id outside the vocabulary, if the prompt has one."""
    ids = np.asarray(ids)
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0:
        return lowest
    return highest if highest >= vocabulary else None
