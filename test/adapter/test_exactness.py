"""With a budget of everything, in fp32, greedy: the token ids of stock SGLang, whatever the prompt's length, the prefill
pieces and the neighbours in the batch. Nothing is dense here: all goes through index and selection, and through window and
arena; with pieces of 2048 there is no arena, and chunks are attended where they lie."""

from __future__ import annotations

import pytest
from kvsupport.clients import generate
from kvsupport.texts import story

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 68, 69, 255, 257, 1000, 3000)
MIXED = (3000, 1, 64, 257, 5, 1000, 69, 63)
NEW_TOKENS = 48
ALONE = {64: [n for n in LENGTHS if n > 64], 320: LENGTHS, 2048: (1000, 3000)}
"""Prompts that fit one piece are the same whatever its size: each length runs alone where it differs, and once at 320."""


def prompt(n_tokens: int) -> list[int]:
    return story(n_tokens, seed=n_tokens)


STOCK_CALLS = {f"{n} tokens": generate(prompt(n), NEW_TOKENS) for n in LENGTHS}


def test_every_length_gives_the_tokens_of_stock_with_pieces_of_320(kvdrive_fp32, stock):
    check(kvdrive_fp32, 320, stock)


@pytest.mark.parametrize("piece", [64, 2048])
def test_every_length_gives_the_tokens_of_stock_with_other_pieces(piece, stock, server_slot):
    check(server_slot.shared(f"kvdrive_fp32_{piece}"), piece, stock)


def check(server, piece: int, stock) -> None:
    """Alone and in a batch of eight, with evidence that nothing took a short cut."""
    expected = {n: stock[f"{n} tokens"]["answer"]["output_ids"] for n in LENGTHS}
    before = server.state()
    for n in ALONE[piece]:
        assert server.generate(prompt(n), NEW_TOKENS)["output_ids"] == expected[n], n
    status, batch = server.post(
        "/generate",
        {
            "input_ids": [prompt(n) for n in MIXED],
            "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        },
        timeout=600,
    )
    assert status == 200
    assert [answer["output_ids"] for answer in batch] == [expected[n] for n in MIXED]
    grown = server.counted(before)
    assert grown["prefill_tokens"] == sum(ALONE[piece]) + sum(MIXED), "each token is prefilled once"
    assert grown["attended_entries"] == grown["stored_entries"] > 0
    assert grown["dense_tokens"] == 0
    for evidence in ("sparse_tokens", "seals", "selected_chunks", "bytes_streamed"):
        assert grown[evidence] > 0, evidence
    assert before["config"]["in_place"] == (piece == 2048)
    for evidence in ("hits", "misses", "bytes_fetched", "bytes_placed", "bytes_appended"):
        assert (grown[evidence] == 0) == (piece == 2048), evidence
    server.wait_idle()
    server.assert_alive()
