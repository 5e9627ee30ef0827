"""`fill_chunks` against the obvious walk over lists."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvdrive_kernels.fill_chunks import fill_chunks
from kvsupport.poison import poison
from kvsupport.selection import walk


def pack(members: list[list[list[int]]]):
    """Begins, sizes and member lists of a batch of sequences (one KV head each), padded with poison."""
    n_groups = max(map(len, members))
    total = max(sum(map(len, groups)) for groups in members) + 3
    begins = torch.zeros(len(members), 1, n_groups, dtype=torch.int32)
    sizes = torch.zeros_like(begins)
    lists = poison(torch.zeros(len(members), 1, total, dtype=torch.int32))
    for b, groups in enumerate(members):
        at = 0
        for g, chunks in enumerate(groups):
            begins[b, 0, g], sizes[b, 0, g] = at, len(chunks)
            lists[b, 0, at : at + len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
            at += len(chunks)
    return begins, sizes, lists


def check(scores: list[list[float]], members: list[list[list[int]]], wanted: list[int], chunk_score: list[float]):
    """Compare with the walk. `chunk_score` by chunk id, all different."""
    begins, sizes, lists = pack(members)
    table = torch.tensor(chunk_score)
    padded = torch.full(sizes.shape, -1.0)
    for b, row in enumerate(scores):
        padded[b, 0, : len(row)] = torch.tensor(row)
    padded.masked_fill_(sizes == 0, -1.0)
    chunk_ids, group_ids = fill_chunks(
        padded, begins, sizes, lists, torch.tensor(wanted), lambda candidates: table[candidates.clamp_min(0).long()]
    )
    assert chunk_ids.shape == group_ids.shape == (len(members), 1, max(wanted))
    for b, groups in enumerate(members):
        expected = walk(scores[b], groups, wanted[b], lambda chunk: chunk_score[chunk])
        assert chunk_ids[b, 0, : wanted[b]].tolist() == expected
        assert (chunk_ids[b, 0, wanted[b] :] == -1).all()
        assert (group_ids[b, 0, wanted[b] :] == -1).all()
        for chunk, group in zip(expected, group_ids[b, 0].tolist(), strict=False):
            assert chunk in groups[group]


def split(sizes: list[int]) -> list[list[int]]:
    order = torch.randperm(sum(sizes)).tolist()
    return [[order.pop() for _ in range(size)] for size in sizes]


def distinct(n: int) -> list[float]:
    return torch.randperm(max(n, 1)).float().tolist()


@pytest.mark.parametrize("n_wanted", [1, 2, 62, 63])
@pytest.mark.parametrize("sizes", [[63], [0, 63, 0], [1] * 63, [0, 0, 5, 58], [20, 0, 20, 0, 23]])
def test_exactly_the_wanted_chunks_come_out(n_wanted, sizes):
    check([torch.rand(len(sizes)).tolist()], [split(sizes)], [n_wanted], distinct(63))


def test_one_huge_group_is_cut_by_chunk_score():
    members = [list(range(100))]
    score = distinct(100)
    check([[1.0]], [members], [7], score)


def test_equal_scores_go_to_the_lower_group():
    begins, sizes, lists = pack([[[5, 6], [7, 8], [9]]])
    chunk_ids, group_ids = fill_chunks(torch.ones(1, 1, 3), begins, sizes, lists, torch.tensor([4]), lambda c: c.float())
    assert chunk_ids.tolist() == [[[5, 6, 7, 8]]]
    assert group_ids.tolist() == [[[0, 0, 1, 1]]]


def test_equal_chunk_scores_go_to_the_earlier_member():
    begins, sizes, lists = pack([[[9, 3, 7]]])
    chunk_ids, _ = fill_chunks(torch.ones(1, 1, 1), begins, sizes, lists, torch.tensor([2]), lambda c: torch.zeros(c.shape))
    assert chunk_ids.tolist() == [[[9, 3]]]


def test_a_sequence_that_wants_nothing_gets_nothing():
    check([[0.5, 0.6], [0.7]], [split([3, 4]), split([5])], [0, 3], distinct(7))


def test_groups_whose_mass_vanished_are_still_taken_before_empty_ones():
    check([[0.0, 0.0, 1.0]], [[[], [1, 2], [0]]], [3], distinct(3))


@given(st.data())
def test_every_mixture_of_sizes_equals_the_walk(data):
    n_batch = data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    members, scores, wanted = [], [], []
    for _ in range(n_batch):
        sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any))
        members.append(split(sizes))
        ties = data.draw(st.booleans())
        scores.append((torch.randint(0, 3, (len(sizes),)).float() if ties else torch.rand(len(sizes))).tolist())
        wanted.append(data.draw(st.integers(0, sum(sizes))))
    if max(wanted) == 0:
        wanted[0] = 1
    check(scores, members, wanted, distinct(max(sum(map(len, m)) for m in members)))
