"""`attend_slots` against float64 attention over the tokens that count."""

import pytest
import torch
from kvdrive_kernels.attend_slots import attend_slots
from kvsupport.driver import EXACT, largest_error
from kvsupport.full_attention import attend_tokens
from kvsupport.poison import poison

HUGE = 2**31 - 1


def arrange(*, n_batch=2, n_heads=2, q_per_kv=3, dim=64, n_slots=63, chunk_size=4, dtype=torch.float32, counts=None):
    """An arena in which every token that does not count is NaN, and slot ids that are out of range where none counts."""
    arena = poison(torch.zeros(n_batch * n_heads * n_slots + 1, 2, chunk_size, dim, dtype=dtype))
    slot_ids = 1 + torch.randperm(n_batch * n_heads * n_slots).view(n_batch, n_heads, n_slots).int()
    if counts is None:
        counts = torch.randint(0, chunk_size + 1, slot_ids.shape)
        counts[..., n_slots // 2] = chunk_size
    for slot, n_valid in zip(slot_ids.flatten().tolist(), counts.flatten().tolist(), strict=True):
        arena[slot, :, :n_valid] = torch.randn(2, n_valid, dim).to(dtype)
    q = torch.randn(n_batch, n_heads, q_per_kv, dim).to(dtype)
    return q, arena, slot_ids.masked_fill(counts == 0, HUGE), counts.int()


def oracle(q, arena, slot_ids, counts, scale):
    out = torch.empty(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            chunks = [arena[s, :, :n] for s, n in zip(slot_ids[b, h].tolist(), counts[b, h].tolist(), strict=True) if n]
            keys, values = torch.cat(chunks, dim=1)
            tokens = list(range(keys.shape[0]))
            out[b, h] = attend_tokens(q[b, h], keys.unsqueeze(1), values.unsqueeze(1), [tokens], scale)
    return out


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("q_per_kv", [1, 3, 4, 8])
def test_it_attends_exactly_the_tokens_that_count(dim, q_per_kv):
    case = arrange(dim=dim, q_per_kv=q_per_kv)
    assert largest_error(attend_slots(*case, dim**-0.5), oracle(*case, dim**-0.5)) < EXACT


@pytest.mark.parametrize("n_slots", [1, 63, 100])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
def test_any_number_of_slots_and_any_chunk_size(n_slots, chunk_size):
    case = arrange(n_slots=n_slots, chunk_size=chunk_size, dim=16)
    assert largest_error(attend_slots(*case, 0.25), oracle(*case, 0.25)) < EXACT


def test_one_token_in_all_returns_its_value():
    counts = torch.zeros(2, 2, 63, dtype=torch.int64)
    counts[:, :, 40] = 1
    q, arena, slot_ids, counts = arrange(counts=counts)
    out = attend_slots(q, arena, slot_ids, counts, 0.125)
    for b in range(2):
        for h in range(2):
            assert torch.equal(out[b, h], arena[slot_ids[b, h, 40], 1, 0].expand(3, -1))


def test_large_logits_stay_finite():
    case = arrange(dim=64)
    assert largest_error(attend_slots(*case, 100.0), oracle(*case, 100.0)) < 1e-3


def test_the_places_of_slots_do_not_change_a_bit():
    q, arena, slot_ids, counts = arrange(counts=torch.full((2, 2, 63), 4))
    moved = torch.randperm(arena.shape[0])
    shuffled = torch.zeros_like(arena)
    shuffled[moved] = arena
    assert torch.equal(
        attend_slots(q, arena, slot_ids, counts, 0.125), attend_slots(q, shuffled, moved[slot_ids.long()].int(), counts, 0.125)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_as_much_as_rounding_the_exact_result(dtype):
    case = arrange(dim=64, dtype=dtype)
    expected = oracle(*case, 0.125)
    out = attend_slots(*case, 0.125)
    assert out.dtype == dtype
    assert largest_error(out, expected) <= 2 * largest_error(expected.to(dtype), expected)
