"""In bf16 the errors of our attention are those of bf16: at most twice what stock bf16 differs from stock fp32."""

from __future__ import annotations

import pytest
from kvsupport.clients import generate
from kvsupport.texts import story

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LENGTHS = (64, 257, 1000, 2000)
NEW_TOKENS = 32


def call(n_tokens: int):
    return generate(story(n_tokens, seed=n_tokens + 1), NEW_TOKENS, return_logprob=True)


STOCK_CALLS = {f"bf16 reference, {n} tokens": call(n) for n in LENGTHS}


def scores(answer: dict) -> list[tuple[int, float]]:
    """(token, log-probability) of each generated token."""
    return [(token, value) for value, token, _ in answer["answer"]["output_token_logprobs"]]


def shared_errors(one, other, reference) -> tuple[list[float], list[float]]:
    """Distances to the reference over the tokens that all three agree on from the start: there the inputs are the same."""
    errors = ([], [])
    for a, b, exact in zip(one, other, reference, strict=True):
        for list_, (token, value) in zip(errors, (a, b), strict=True):
            list_.append(abs(value - exact[1]) if token == exact[0] else None)
        if errors[0][-1] is None or errors[1][-1] is None:
            return errors[0][:-1], errors[1][:-1]
    return errors


def test_logprobs_in_bf16_are_as_close_to_fp32_as_those_of_stock(stock, server_slot):
    exact = {n: scores(stock[f"bf16 reference, {n} tokens"]) for n in LENGTHS}
    stock_server = server_slot.shared("stock_bf16")
    theirs = {n: scores(call(n)(stock_server)) for n in LENGTHS}
    server = server_slot.shared("kvdrive_bf16")
    before = server.state()
    ours = {n: scores(call(n)(server)) for n in LENGTHS}
    grown = server.counted(before)
    assert grown["attended_entries"] == grown["stored_entries"] > 0
    assert min(grown[name] for name in ("sparse_tokens", "seals", "hits", "misses")) > 0
    our_errors, their_errors = [], []
    for n in LENGTHS:
        a, b = shared_errors(ours[n], theirs[n], exact[n])
        our_errors += a
        their_errors += b
    assert len(our_errors) >= 2 * NEW_TOKENS, "too few tokens in common to judge"
    mean = [sum(errors) / len(errors) for errors in (our_errors, their_errors)]
    assert mean[0] <= 2 * mean[1], mean
    assert max(our_errors) <= 2 * max(their_errors), (max(our_errors), max(their_errors))
    server.wait_idle()
    server.assert_alive()
