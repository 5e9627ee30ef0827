"""Prompts in pieces: whatever the pieces, every token attends everything before it and comes home."""

import pytest
import torch
from kvdrive_kernels.attend_pieces.reference import STRETCH_TOKENS
from kvsupport.driver import EXACT, Driver, largest_error, make_config, make_engine, make_layout, random_tokens
from kvsupport.full_attention import full_attention

LAYOUT = make_layout(layers=2, kv_heads=1, q_per_kv=3)


def make_driver(n_tokens, layout=LAYOUT, n_sequences=1) -> Driver:
    return Driver(make_engine(layout, make_config(layout), max_tokens=n_tokens, n_sequences=n_sequences))


@pytest.fixture(scope="module")
def prompt():
    tokens = random_tokens(LAYOUT, STRETCH_TOKENS + 300, seed=1)
    return tokens, tokens.expected(LAYOUT.head_dim**-0.5)


@pytest.mark.parametrize(("n_tokens", "piece"), [(70, 1), (1000, 64), (1000, 100), (1000, 257), (1000, 320), (1000, 2048)])
def test_any_piece_size_gives_full_attention(prompt, n_tokens, piece):
    tokens, expected = prompt
    driver = make_driver(1000)
    driver.begin(0, tokens)
    assert largest_error(driver.prefill(0, n_tokens, piece), expected[:, :n_tokens]) < EXACT
    assert driver.engine.stats.prefill_tokens == n_tokens
    assert driver.engine.stats.bytes_home_written == n_tokens * LAYOUT.token_bytes


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 63, 64, 65])
def test_the_shortest_prompts(prompt, n_tokens):
    tokens, expected = prompt
    driver = make_driver(n_tokens)
    driver.begin(0, tokens)
    assert largest_error(driver.prefill(0, n_tokens, 64), expected[:, :n_tokens]) < EXACT


def test_a_prefix_longer_than_the_stream_buffer_is_attended_in_parts(prompt):
    tokens, expected = prompt
    n_tokens = STRETCH_TOKENS + 300
    driver = make_driver(n_tokens)
    driver.begin(0, tokens)
    out = torch.cat([driver.prefill_pass({0: n})[0] for n in (STRETCH_TOKENS + 100, 50, 150)], dim=1)
    assert largest_error(out, expected) < EXACT
    streamed = STRETCH_TOKENS + 100 + STRETCH_TOKENS + 150
    assert driver.engine.stats.bytes_streamed == streamed * LAYOUT.token_bytes


def test_several_sequences_in_one_pass_do_not_see_each_other():
    lengths = {2: 1, 0: 100, 4: 257, 1: 64, 3: 5}
    driver = make_driver(600, n_sequences=5)
    for seq_id in lengths:
        driver.begin(seq_id, random_tokens(LAYOUT, 600, seed=seq_id))
    first = driver.prefill_pass(lengths)
    second = driver.prefill_pass({0: 63, 3: 1, 2: 200})
    for outs, begins in ((first, dict.fromkeys(lengths, 0)), (second, lengths)):
        for seq_id, out in outs.items():
            end = begins[seq_id] + out.shape[1]
            tokens = driver.tokens[seq_id]
            for layer in range(LAYOUT.n_layers):
                expected = full_attention(
                    tokens.q[layer, begins[seq_id] : end],
                    tokens.k[layer, :end],
                    tokens.v[layer, :end],
                    driver.scale,
                    begins[seq_id],
                )
                assert largest_error(out[layer], expected) < EXACT
    driver.engine.check_integrity()


@pytest.mark.parametrize("piece", [64, 320])
def test_bfloat16_errs_at_most_twice_as_much_as_plain_torch(piece):
    layout = make_layout(layers=1, kv_heads=2, q_per_kv=3, head_dim=64, dtype=torch.bfloat16)
    tokens = random_tokens(layout, 1000, seed=2)
    driver = make_driver(1000, layout)
    driver.begin(0, tokens)
    out = driver.prefill(0, 1000, piece)
    expected = tokens.expected(driver.scale)
    q, k, v = (x[0].transpose(0, 1) for x in (tokens.q, tokens.k, tokens.v))
    plain = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    limit = largest_error(plain.transpose(0, 1)[None], expected)
    assert out.dtype == torch.bfloat16
    assert 0 < largest_error(out, expected) <= 2 * limit


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
def test_every_token_is_at_home_where_the_layout_says(chunk_size):
    layout = make_layout(chunk_size=chunk_size)
    driver = make_driver(200, layout)
    tokens = random_tokens(layout, 200)
    driver.begin(0, tokens)
    driver.prefill(0, 150, 37)
    home, blocks = driver.engine.dram.home, driver.engine.book.blocks[0]
    for position in (0, 1, 36, 37, 63, 64, 149):
        chunk, inside = position % 64 // chunk_size, position % chunk_size
        found = home[blocks[position // 64], :, :, chunk, :, inside]  # [L, H_kv, 2, D]
        assert torch.equal(found[:, :, 0], tokens.k[:, position])
        assert torch.equal(found[:, :, 1], tokens.v[:, position])
