"""The C++ kernels against their PyTorch twins, on sizes that are not round, with NaN wherever nothing counts."""

import pytest
import torch
from kvdrive_kernels import attend_home, attend_pieces, group_keys, probe_books, select_chunks, store_tokens
from kvsupport.driver import EXACT, largest_error
from kvsupport.full_attention import full_attention
from kvsupport.home import attend_some, make_home, make_index
from kvsupport.poison import poison

DIMS = (16, 64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8, 5)
TOLERANCE = {torch.float32: EXACT, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_per_kv", GROUPS)
def test_attention_at_home_is_exact_over_sink_selected_and_zone(dtype, dim, q_per_kv):
    chunk, lengths = 2, [1, 63, 700, 100]
    home, blocks, stored = make_home(lengths, dim=dim, chunk=chunk, dtype=dtype)
    q = torch.randn(len(lengths), 2, q_per_kv, dim).to(dtype)
    n_tokens = torch.tensor(lengths)
    n_sink, zone, n_wanted = torch.tensor([0, 2, 2, 2]), torch.tensor([0, 2, 300, 40]), torch.tensor([0, 0, 19, 7])
    chunk_ids = torch.full((4, 2, 19), -1, dtype=torch.int32)
    for b in (2, 3):
        for h in range(2):
            n = int(n_wanted[b])
            chunk_ids[b, h, :n] = 2 + torch.randperm(int(zone[b]) - 2)[:n].int()
    arguments = (home, 1, blocks, torch.arange(4), n_tokens, n_sink, zone, chunk_ids, n_wanted, dim**-0.5)
    out = attend_home.attend_home(q, *arguments)
    for b, n in enumerate(lengths):
        for h in range(2):
            ids = [*range(int(n_sink[b])), *chunk_ids[b, h, : int(n_wanted[b])].tolist(), *range(int(zone[b]), -(-n // chunk))]
            tokens = [t for c in ids for t in range(c * chunk, min(n, (c + 1) * chunk))]
            k, v = (x[:, h] for x in stored[b])
            assert largest_error(out[b, h], attend_some(q[b, h], k, v, tokens, dim**-0.5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 63, 512, 513, 2000])
def test_attention_over_everything_takes_any_length(chunk, n):
    home, blocks, ((k, v),) = make_home([n], chunk=chunk, dim=16)
    q, none = 8 * torch.randn(1, 2, 3, 16), torch.zeros(1, dtype=torch.int64)
    empty = torch.empty(1, 2, 0, dtype=torch.int32)
    out = attend_home.attend_home(q, home, 1, blocks, none, torch.tensor([n]), none, none, empty, none, 0.25)
    for h in range(2):
        assert largest_error(out[0, h], attend_some(q[0, h], k[:, h], v[:, h], list(range(n)), 0.25)) < 4 * EXACT


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_per_kv", GROUPS)
def test_pieces_attend_everything_before_them_and_nothing_after(dtype, dim, q_per_kv):
    lengths, prefix = [1, 63, 100, 70], [0, 0, 200, 64]
    home, blocks, stored = make_home([p + n for p, n in zip(prefix, lengths, strict=True)], dim=dim, chunk=4, dtype=dtype)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    wide = torch.randn(sum(lengths), 2 * q_per_kv + 4, dim).to(dtype)
    q = wide[:, : 2 * q_per_kv]  # as models give it: a view of the joint projection
    out = attend_pieces.attend_pieces(
        q, home, 1, blocks, torch.arange(4), starts, torch.tensor(prefix), torch.tensor(lengths), dim**-0.5
    )
    for i, (n, p) in enumerate(zip(lengths, prefix, strict=True)):
        rows = slice(int(starts[i]), int(starts[i]) + n)
        expected = full_attention(q[rows], *stored[i], dim**-0.5, p)
        assert largest_error(out[rows], expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_pieces_may_be_longer_than_a_tile_and_chunks_of_any_size(chunk):
    home, blocks, stored = make_home([777], dim=32, chunk=chunk)
    q = 4 * torch.randn(600, 6, 32)
    one = torch.zeros(1, dtype=torch.int64)
    out = attend_pieces.attend_pieces(q, home, 1, blocks, one, one, one + 177, one + 600, 0.2)
    assert largest_error(out, full_attention(q, *stored[0], 0.2, 177)) < 4 * EXACT


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_per_kv", GROUPS)
@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_a_selection_is_that_of_the_twin(dim, q_per_kv, chunk):
    index, n_groups = make_index([300, 40, 700], dim=dim, chunk=chunk)
    q = 3 * torch.randn(3, 2, q_per_kv, dim)
    n_wanted = torch.tensor([33, 40, 100])
    arguments = (q, *index, n_wanted, (100, n_groups), dim**-0.5)
    chunk_ids, group_ids, scores = select_chunks.select_chunks(*arguments)
    expected_ids, _, expected_scores = select_chunks.reference(*arguments)
    assert torch.allclose(scores, expected_scores, atol=1e-5)
    for b, n in enumerate(n_wanted.tolist()):
        for h in range(2):
            got, expected = chunk_ids[b, h].tolist(), expected_ids[b, h].tolist()
            assert set(got[:n]) == set(expected[:n])
            assert len(set(got[:n])) == n
            assert set(got[n:]) <= {-1}
            ranks = scores[b, h][group_ids[b, h, :n].long()]
            assert (ranks[1:] <= ranks[:-1]).all()


@pytest.mark.parametrize(("by_score", "stamps_hits"), [(True, True), (False, True), (False, False)])
def test_books_are_those_of_the_twin(by_score, stamps_hits):
    shape, width = (4, 2), 40
    books = [torch.full((*shape, width), -1, dtype=torch.int32), torch.zeros(*shape, width, dtype=torch.int32),
             torch.zeros(*shape, width, dtype=torch.int64),
             torch.randperm(8 * width).view(*shape, width).int()]  # fmt: skip
    twin = [book.clone() for book in books]
    n_entries, seq_ids = torch.tensor([40, 17, 30, 25]), torch.tensor([2, 0, 3])
    for step in range(12):
        chunk_ids = torch.stack([torch.stack([torch.randperm(64)[:20] for _ in range(2)]) for _ in range(3)]).int()
        chunk_ids[0, :, 11:] = -1
        group_ids = (chunk_ids // 4).clamp_min(-1)
        scores = torch.rand(3, 2, 16)
        arguments = (n_entries, seq_ids, chunk_ids, group_ids, scores, step * 100)
        rule = {"by_score": by_score, "stamps_hits": stamps_hits}
        slots, misses, counts = probe_books.probe_books(*books, *arguments, **rule)
        _, expected_misses, expected_counts = probe_books.reference(*twin, *arguments, **rule)
        assert torch.equal(misses, expected_misses)
        assert torch.equal(counts, expected_counts)
        for b, seq in enumerate(seq_ids.tolist()):
            for h in range(2):
                n, k = int(n_entries[seq]), int((chunk_ids[b, h] >= 0).sum())
                held = dict(zip(books[3][seq, h, :n].tolist(), books[0][seq, h, :n].tolist(), strict=True))
                assert [held[s] for s in slots[b, h, :k].tolist()] == chunk_ids[b, h, :k].tolist()
                order, expected = (b_[0][seq, h, :n].sort().values for b_ in (books, twin))
                assert torch.equal(order, expected)


def test_a_window_smaller_than_the_selection_is_an_error(kernels):
    if kernels == "torch":
        pytest.skip("the twin is given correct books")
    books = [torch.full((1, 1, 4), -1, dtype=torch.int32), torch.zeros(1, 1, 4, dtype=torch.int32),
             torch.zeros(1, 1, 4, dtype=torch.int64), torch.arange(4, dtype=torch.int32).view(1, 1, 4)]  # fmt: skip
    ids = torch.arange(5, dtype=torch.int32).view(1, 1, 5)
    with pytest.raises(RuntimeError, match="smaller than the selection"):
        probe_books.probe_books(
            *books, torch.tensor([4]), torch.tensor([0]), ids, ids, torch.rand(1, 1, 5), 0, by_score=True, stamps_hits=True
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tokens_are_stored_where_they_belong_and_nowhere_else(dtype):
    pool = poison(torch.zeros(50, 2, 4, 16, dtype=dtype))
    before = pool.clone()
    joint = torch.randn(9, 6, 16).to(dtype)
    k, v = joint[:, :3], joint[:, 3:]
    rows, inside = torch.randperm(40)[:27].view(9, 3), torch.randint(0, 4, (9,))
    store_tokens.store_tokens(pool, rows, 10, inside, k, v)
    store_tokens.reference(before, rows, 10, inside, k, v)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize(("n", "n_groups", "dim"), [(1, 1, 16), (63, 5, 64), (100, 100, 80), (1000, 63, 64), (257, 33, 256)])
def test_grouping_is_that_of_the_twin_where_it_is_not_a_matter_of_rounding(n, n_groups, dim):
    centres = 4 * torch.randn(3, n_groups, dim)
    vectors = centres[:, torch.arange(n) * n_groups // n] + 0.1 * torch.randn(3, n, dim)
    labels, centroids, sizes = group_keys.group_keys(vectors, n_groups, 6)
    expected = group_keys.reference(vectors, n_groups, 6)
    assert torch.equal(labels, expected[0])
    assert torch.equal(sizes, expected[2])
    assert torch.allclose(centroids, expected[1], atol=1e-4)
