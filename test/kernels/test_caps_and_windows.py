"""Logit caps and sliding windows in every kernel that attends, against float64; with NaN wherever nothing counts."""

import pytest
import torch
from kvdrive_kernels import attend_home, attend_pieces, attend_slots, select_chunks
from kvsupport.driver import EXACT, largest_error
from kvsupport.home import attend_some, make_home, make_index

CAPS_AND_WINDOWS = [(0.0, 1), (0.0, 63), (0.0, 64), (0.0, 100), (0.0, 5000), (2.0, 0), (30.0, 0), (5.0, 37)]
"""A window of 1 sees the token alone, one of 5,000 everything. Logits here spread over about ten."""
CLOSE = 8 * EXACT
"""float32 at logits ten times as large as elsewhere: their rounding goes into the exponent."""


@pytest.mark.parametrize(("cap", "window"), CAPS_AND_WINDOWS)
@pytest.mark.parametrize(("dim", "q_per_kv", "chunk"), [(64, 3, 2), (80, 1, 4), (96, 8, 1), (256, 5, 8)])
def test_decode_at_home(cap, window, dim, q_per_kv, chunk):
    lengths = [1, 63, 700, 130]
    home, blocks, stored = make_home(lengths, dim=dim, chunk=chunk)
    q = 4 * torch.randn(len(lengths), 2, q_per_kv, dim)
    none = torch.zeros(len(lengths), dtype=torch.int64)
    empty = torch.empty(len(lengths), 2, 0, dtype=torch.int32)
    places = (home, 1, blocks, torch.arange(len(lengths)), torch.tensor(lengths), none, none, empty, none)
    out = attend_home.attend_home(q, *places, dim**-0.5, logit_cap=cap, window=window)
    for b, n in enumerate(lengths):
        tokens = list(range(max(0, n - window) if window else 0, n))
        for h in range(2):
            k, v = (x[:, h] for x in stored[b])
            assert largest_error(out[b, h], attend_some(q[b, h], k, v, tokens, dim**-0.5, cap)) < CLOSE


@pytest.mark.parametrize("window", [1, 20, 70])
def test_a_window_also_cuts_what_was_selected(window):
    home, blocks, ((k, v),) = make_home([400], chunk=4)
    q, one = torch.randn(1, 2, 3, 64), torch.ones(1, dtype=torch.int64)
    chunk_ids = torch.tensor([97, 83, 90, 20], dtype=torch.int32).expand(1, 2, 4).contiguous()
    zone = one * 99
    out = attend_home.attend_home(q, home, 1, blocks, one * 0, one * 400, one * 2, zone, chunk_ids, one * 4, 0.125, window=window)
    listed = [t for c in (0, 1, 20, 83, 90, 97, 99) for t in range(4 * c, 4 * c + 4)]
    tokens = [t for t in listed if t >= 400 - window]
    for h in range(2):
        assert largest_error(out[0, h], attend_some(q[0, h], k[:, h], v[:, h], tokens, 0.125)) < EXACT


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_slots_without_their_first_tokens(cap, dim):
    arena = torch.randn(40, 2, 4, dim)
    slot_ids = torch.randperm(40).view(2, 2, 10).int()
    n_valid = torch.randint(1, 5, slot_ids.shape).int()
    n_skipped = (torch.rand(slot_ids.shape) * (n_valid + 1)).int()
    n_skipped[..., 4] = 0
    q = 4 * torch.randn(2, 2, 3, dim)
    for slot, first, stop in zip(*(x.flatten().tolist() for x in (slot_ids, n_skipped, n_valid)), strict=True):
        arena[slot, :, :first] = arena[slot, :, stop:] = float("nan")
    out = attend_slots.attend_slots(q, arena, slot_ids, n_valid, dim**-0.5, logit_cap=cap, n_skipped=n_skipped)
    for b in range(2):
        for h in range(2):
            k, v = arena[slot_ids[b, h].long()].transpose(0, 1).flatten(1, 2)
            counted = zip(range(10), n_skipped[b, h].tolist(), n_valid[b, h].tolist(), strict=True)
            tokens = [4 * i + t for i, first, stop in counted for t in range(first, stop)]
            assert largest_error(out[b, h], attend_some(q[b, h], k, v, tokens, dim**-0.5, cap)) < EXACT


@pytest.mark.parametrize(("cap", "window"), CAPS_AND_WINDOWS)
@pytest.mark.parametrize(("dim", "q_per_kv", "chunk"), [(64, 3, 2), (80, 1, 4), (96, 8, 1), (256, 5, 8)])
def test_pieces_of_prompts(cap, window, dim, q_per_kv, chunk):
    lengths, prefix = [1, 63, 200, 70], [0, 0, 150, 64]
    home, blocks, stored = make_home([p + n for p, n in zip(prefix, lengths, strict=True)], dim=dim, chunk=chunk)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    q = 4 * torch.randn(sum(lengths), 2 * q_per_kv, dim)
    places = (home, 1, blocks, torch.arange(4), starts, torch.tensor(prefix), torch.tensor(lengths))
    out = attend_pieces.attend_pieces(q, *places, dim**-0.5, logit_cap=cap, window=window)
    grouped = out.view(-1, 2, q_per_kv, dim)
    for i, (n, before) in enumerate(zip(lengths, prefix, strict=True)):
        for t in {0, 1, n // 2, n - 1} & set(range(n)):
            position, row = before + t, int(starts[i]) + t
            tokens = list(range(max(0, position + 1 - window) if window else 0, position + 1))
            for h in range(2):
                k, v = (x[:, h] for x in stored[i])
                expected = attend_some(q[row].view(2, q_per_kv, dim)[h], k, v, tokens, dim**-0.5, cap)
                assert largest_error(grouped[row, h], expected) < CLOSE


@pytest.mark.parametrize("cap", [1.0, 20.0])
def test_a_selection_is_made_by_capped_scores(cap):
    index, n_groups = make_index([300, 40, 700], chunk=2)
    q = 8 * torch.randn(3, 2, 4, 64)
    arguments = (q, *index, torch.tensor([33, 40, 100]), (100, n_groups), 0.125)
    chunk_ids, _, scores = select_chunks.select_chunks(*arguments, logit_cap=cap)
    expected_ids, _, expected = select_chunks.reference(*arguments, logit_cap=cap)
    assert torch.allclose(scores, expected, atol=1e-5)
    assert torch.equal(chunk_ids.sort(dim=-1).values, expected_ids.sort(dim=-1).values)
    arena, slots, _, sizes, _, pages, n_pages = index[:7]
    for b in range(3):
        mine = pages[b, : int(n_pages[b])]
        for h in range(2):
            vectors = arena[slots[mine, h].long()].flatten(1, -2).flatten(0, 1).double()  # 16 centroids fill whole slots of 4
            logits = cap * torch.tanh(q[b, h].double() @ vectors.T * 0.125 / cap)
            empty = sizes[mine, h].flatten() == 0
            exact = torch.softmax(logits.masked_fill(empty, float("-inf")), dim=-1).sum(0).masked_fill(empty, -1.0)
            assert largest_error(scores[b, h, : len(exact)], exact) < 1e-5
