"""A decoder whose outputs feed back: token ids do not depend on prefill pieces or on who else is in the batch."""

import pytest
import torch
from kvsupport.driver import make_config, make_engine, make_layout
from kvsupport.tiny_decoder import TinyDecoder

LAYOUT = make_layout(layers=3, kv_heads=2, q_per_kv=2, head_dim=16)
DECODER = TinyDecoder(LAYOUT, seed=1)
NEW = 48
LENGTHS = {0: 300, 1: 37, 2: 120, 3: 513}
PROMPTS = {s: torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(s)).tolist() for s, n in LENGTHS.items()}


def generate(prompts, *, budget="6.25%", floor=0, piece=257, **settings):
    config = make_config(LAYOUT, budget=budget, floor=floor, groups_per_page=1, segment_tokens=128, **settings)
    engine = make_engine(LAYOUT, config, max_tokens=600, n_sequences=4)
    out = DECODER.generate(engine, prompts, NEW, piece)
    engine.check_integrity()
    return out, engine.stats


@pytest.fixture(scope="module")
def sparse():
    out, stats = generate(PROMPTS)
    assert stats.attended_entries < stats.stored_entries
    assert min(stats.hits, stats.misses, stats.evictions) > 0
    return out


def assert_same(a, b):
    assert a.ids == b.ids
    assert (a.logits - b.logits).abs().max() < 1e-4


@pytest.mark.parametrize("piece", [64, 100, 320, 2048])
def test_pieces_of_the_prompt_do_not_change_the_tokens(sparse, piece):
    out, _ = generate(PROMPTS, piece=piece)
    for seq_id in PROMPTS:
        assert_same(out[seq_id], sparse[seq_id])


@pytest.mark.parametrize("batch", [[0], [1], [2], [3], [3, 0], [2, 1, 0]])
def test_the_rest_of_the_batch_does_not_change_the_tokens(sparse, batch):
    out, _ = generate({s: PROMPTS[s] for s in batch})
    for seq_id in batch:
        assert_same(out[seq_id], sparse[seq_id])


@pytest.mark.parametrize(("window", "eviction"), [(1, "fifo"), (4, "lru")])
def test_windows_and_eviction_do_not_change_a_bit_of_the_logits(sparse, window, eviction):
    out, _ = generate(PROMPTS, window_multiple=window, eviction=eviction)
    for seq_id in PROMPTS:
        assert torch.equal(out[seq_id].logits, sparse[seq_id].logits)


def test_a_budget_of_everything_gives_the_tokens_of_full_attention():
    prompts = {1: PROMPTS[1], 2: PROMPTS[2]}
    expected = {s: DECODER.reference(p, NEW) for s, p in prompts.items()}
    for dense_below in (0, 600):
        out, stats = generate(prompts, budget="100%", dense_below=dense_below)
        assert stats.attended_entries == stats.stored_entries
        for seq_id in prompts:
            assert_same(out[seq_id], expected[seq_id])


def test_a_small_budget_gives_other_logits(sparse):
    out, _ = generate(PROMPTS, budget="100%")
    assert (out[3].logits - sparse[3].logits).abs().max() > 1e-2
