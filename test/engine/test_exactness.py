"""With a budget of everything the engine is full attention: every prompt length, piece and chunk size, both paths."""

import pytest
import torch
from kvsupport.driver import EXACT, Driver, largest_error, make_config, make_engine, make_layout, random_tokens

PROMPTS = (1, 2, 3, 4, 5, 63, 64, 65, 68, 69, 255, 257, 1000, 3000)
STEPS = 24
LAYOUT = make_layout(layers=2, kv_heads=2, q_per_kv=2, head_dim=16)
SCALE = LAYOUT.head_dim**-0.5
PATHS = pytest.mark.parametrize("path", ["sparse", "dense", "sparse in place", "dense in place"])
CHUNK_SIZES = pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])


@pytest.fixture(scope="module")
def sequences():
    """Tokens and float64 attention of every sequence, computed once."""
    tokens = [random_tokens(LAYOUT, n + STEPS, seed=n) for n in PROMPTS]
    return tokens, [t.expected(SCALE) for t in tokens]


def make_driver(path, chunk_size, n_sequences, max_tokens) -> Driver:
    """Seals are small (16 tokens), so that every decoding sequence passes one within its steps."""
    layout = make_layout(layers=2, kv_heads=2, q_per_kv=2, head_dim=16, chunk_size=chunk_size)
    config = make_config(
        layout, groups_per_page=1, segment_tokens=1024, dense_below=max_tokens if "dense" in path else 0, in_place="place" in path
    )
    return Driver(make_engine(layout, config, max_tokens=max_tokens, n_sequences=n_sequences))


def assert_evidence(driver, path, n_longest):
    """The path that was meant is the path that was taken, and nothing was left out."""
    stats = driver.engine.stats
    assert stats.attended_entries == stats.stored_entries > 0
    if "place" in path:
        assert (stats.hits, stats.misses, stats.bytes_fetched, stats.bytes_placed, stats.bytes_appended) == (0, 0, 0, 0, 0)
        assert stats.selected_chunks > 0 or "dense" in path or n_longest <= 68 + 1
        assert (stats.dense_tokens > 0) == ("dense" in path) == (stats.sparse_tokens == 0)
    elif path == "dense":
        assert (stats.sparse_tokens, stats.seals, stats.hits + stats.misses) == (0, 0, 0)
        assert stats.dense_tokens > 0
        assert stats.bytes_placed > 0
    else:
        assert stats.dense_tokens == 0
        assert stats.sparse_tokens > 0
        if n_longest > 68 + 1:
            assert stats.seals > 0
            assert stats.hits > 0
            assert stats.bytes_fetched == stats.misses * driver.layout.slot_bytes > 0
    driver.engine.check_integrity()


@CHUNK_SIZES
@PATHS
@pytest.mark.parametrize("piece", [100, 257])
def test_a_batch_of_all_lengths_is_full_attention(sequences, path, chunk_size, piece):
    tokens, expected = sequences
    driver = make_driver(path, chunk_size, len(PROMPTS), max(PROMPTS) + STEPS)
    for seq_id, n_tokens in enumerate(PROMPTS):
        driver.begin(seq_id, tokens[seq_id])
        assert largest_error(driver.prefill(seq_id, n_tokens, piece), expected[seq_id][:, :n_tokens]) < EXACT
    out = driver.steps(list(range(len(PROMPTS))), STEPS)
    for seq_id, n_tokens in enumerate(PROMPTS):
        assert largest_error(out[:, :, seq_id], expected[seq_id][:, n_tokens:]) < EXACT
    assert_evidence(driver, path, max(PROMPTS))
    for seq_id in range(len(PROMPTS)):
        driver.release(seq_id)
    driver.assert_empty()


@PATHS
@pytest.mark.parametrize("which", [n for n in range(len(PROMPTS)) if PROMPTS[n] <= 257])
def test_a_short_prompt_alone_is_full_attention_token_by_token(sequences, path, which):
    tokens, expected = sequences[0][which], sequences[1][which]
    n_tokens = PROMPTS[which]
    driver = make_driver(path, 4, 1, n_tokens + STEPS)
    driver.begin(0, tokens)
    piece = 1 if n_tokens <= 69 else 100
    assert largest_error(driver.prefill(0, n_tokens, piece), expected[:, :n_tokens]) < EXACT
    out = driver.steps([0], STEPS)
    assert largest_error(out[:, :, 0], expected[:, n_tokens:]) < EXACT
    assert_evidence(driver, path, n_tokens)


@pytest.mark.parametrize("sink", [0, 1, 4, 5, 100])
@pytest.mark.parametrize("local", [1, 7, 64])
def test_any_sink_and_local_zone_is_full_attention(sink, local):
    layout = make_layout(layers=1)
    for dense_below in (0, 300):
        config = make_config(layout, groups_per_page=1, sink_tokens=sink, local_tokens=local, dense_below=dense_below)
        driver = Driver(make_engine(layout, config, max_tokens=300, n_sequences=4))
        tokens = random_tokens(layout, 300, seed=sink)
        prompts = (1, 6, 107, 250)
        for seq_id, n_tokens in enumerate(prompts):
            driver.begin(seq_id, tokens)
            driver.prefill(seq_id, n_tokens, 300)
        out = driver.steps(list(range(4)), 30)
        expected = tokens.expected(driver.scale)
        for seq_id, n_tokens in enumerate(prompts):
            assert largest_error(out[:, :, seq_id], expected[:, n_tokens : n_tokens + 30]) < EXACT
        assert driver.engine.stats.attended_entries == driver.engine.stats.stored_entries


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_plain_torch(dtype):
    layout = make_layout(layers=1, kv_heads=2, q_per_kv=3, head_dim=64, dtype=dtype)
    config = make_config(layout, groups_per_page=1)
    tokens = random_tokens(layout, 330, seed=9)
    driver = Driver(make_engine(layout, config, max_tokens=330))
    driver.begin(0, tokens)
    driver.prefill(0, 300, 100)
    out = driver.steps([0], 30)[:, :, 0]
    expected = tokens.expected(driver.scale)
    q, k, v = (x[0].transpose(0, 1) for x in (tokens.q, tokens.k, tokens.v))
    plain = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    limit = largest_error(plain.transpose(0, 1)[None, 300:], expected[:, 300:])
    assert 0 < largest_error(out, expected[:, 300:]) <= 2 * limit
