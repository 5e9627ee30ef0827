"""The free lists of both tiers: free + used = total, and a wrong call changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvsupport.driver import make_layout
from sglang_kvdrive.device import CpuDevice
from sglang_kvdrive.errors import CapacityError, IntegrityError
from sglang_kvdrive.tiers.dram import DramTier
from sglang_kvdrive.tiers.hbm import HbmTier

LAYOUT = make_layout(layers=1, kv_heads=1, head_dim=2)


class Hbm:
    """Both tiers with the same calls, so that the same tests run on both."""

    def __init__(self, n):
        self.tier, self.total = HbmTier(LAYOUT, n, CpuDevice()), n

    def take(self, n, owner=0):
        return self.tier.allocate(n, owner)

    def give(self, ids, owner=0):
        self.tier.release(ids, owner)

    def state(self):
        return self.tier.n_free, self.tier._free[: self.tier.n_free].tolist(), self.tier._holder.tolist()


class Dram(Hbm):
    def __init__(self, n):
        self.tier, self.total = DramTier(LAYOUT, n, CpuDevice()), n

    def take(self, n, owner=0):  # noqa: ARG002 (blocks have no owner)
        return self.tier.allocate(n)

    def give(self, ids, owner=0):  # noqa: ARG002
        self.tier.release(ids)

    def state(self):
        return self.tier.n_free, self.tier.free_ids().tolist(), self.tier._used.tolist()


BOTH = pytest.mark.parametrize("kind", [Hbm, Dram])


def refuse(books, error, call, *args):
    """The call raises and changes nothing."""
    before = books.state()
    with pytest.raises(error):
        call(*args)
    assert books.state() == before
    books.tier.check_integrity()


@BOTH
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 3)), max_size=40))
def test_free_and_used_are_all_after_any_operations(kind, operations):
    books = kind(20)
    held: list[tuple[torch.Tensor, int]] = []
    for takes, n, owner in operations:
        n_used = sum(ids.numel() for ids, _ in held)
        if takes and n <= books.total - n_used:
            ids = books.take(n, owner)
            everything = torch.cat([ids, *(i for i, _ in held)])
            assert torch.unique(everything).numel() == everything.numel()
            held.append((ids, owner))
        elif takes:
            refuse(books, CapacityError, books.take, n, owner)
        elif held:
            ids, owner = held.pop(n % len(held))
            books.give(ids, owner)
        n_used = sum(ids.numel() for ids, _ in held)
        assert (books.tier.n_used, books.tier.n_free) == (n_used, books.total - n_used)
        assert books.tier.used_bytes + books.tier.n_free * books.tier.total_bytes // books.total == books.tier.total_bytes
        books.tier.check_integrity()


@BOTH
def test_a_double_free_is_refused(kind):
    books = kind(20)
    ids = books.take(5)
    books.give(ids)
    refuse(books, IntegrityError, books.give, ids)


@BOTH
def test_an_id_named_twice_in_one_call_is_refused(kind):
    books = kind(20)
    ids = books.take(5)
    refuse(books, IntegrityError, books.give, torch.cat([ids, ids[:1]]))


@BOTH
@pytest.mark.parametrize("foreign", [-1, 21, 10**6])
def test_an_id_that_does_not_exist_is_refused(kind, foreign):
    books = kind(20)
    ids = books.take(20)
    refuse(books, IntegrityError, books.give, torch.cat([ids[:1], torch.tensor([foreign], dtype=ids.dtype)]))


@BOTH
def test_more_than_there_is_is_refused_with_both_numbers(kind):
    books = kind(20)
    books.take(15)
    refuse(books, CapacityError, books.take, 6)
    with pytest.raises(CapacityError, match=r"5 of 20 slots free, 6 are|320 of 1280 tokens free, 384 are"):
        books.take(6)


def test_a_slot_of_another_sequence_is_refused():
    books = Hbm(20)
    mine, theirs = books.take(3, 1), books.take(3, 2)
    refuse(books, IntegrityError, books.give, torch.cat([mine, theirs[:1]]), 1)
    assert (books.tier.n_held(1), books.tier.n_held(2)) == (3, 3)


def test_block_zero_is_never_handed_out_nor_taken_back():
    books = Dram(4)
    assert sorted(books.take(4).tolist()) == [1, 2, 3, 4]
    refuse(books, IntegrityError, books.give, torch.tensor([0]))


def test_clear_frees_every_block():
    books = Dram(4)
    books.take(3)
    books.tier.clear()
    assert (books.tier.n_free, books.tier.n_used) == (4, 0)
    books.tier.check_integrity()


@pytest.mark.parametrize("fault", ["twice", "held", "lost"])
@BOTH
def test_a_planted_fault_is_found(kind, fault):
    books = kind(20)
    ids = books.take(5)
    tier = books.tier
    if fault == "twice":
        tier._free[0] = tier._free[1]
    elif fault == "held":
        tier._free[0] = ids[0]
    else:
        tier._n_free -= 1
    with pytest.raises(IntegrityError):
        tier.check_integrity()
