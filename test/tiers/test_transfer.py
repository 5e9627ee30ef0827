"""What is moved arrives unchanged, and bytes counted are bytes moved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvsupport.driver import make_layout
from sglang_kvdrive.device import CpuDevice
from sglang_kvdrive.layout import BLOCK_TOKENS
from sglang_kvdrive.stats import EngineStats
from sglang_kvdrive.tiers.dram import DramTier
from sglang_kvdrive.tiers.hbm import HbmTier
from sglang_kvdrive.tiers.transfer import Transfer

CHUNK_SIZES = pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])


class Tiers:
    def __init__(self, *, n_blocks=4, n_slots=40, **geometry):
        self.layout = make_layout(layers=2, kv_heads=3, head_dim=5, **geometry)
        self.hbm, self.dram = HbmTier(self.layout, n_slots, CpuDevice()), DramTier(self.layout, n_blocks, CpuDevice())
        self.transfer = Transfer(self.hbm, self.dram, EngineStats())
        self.stats = self.transfer.stats

    def fill_home(self, blocks):
        """Random K and V `[L, T, H_kv, D]` for all tokens of the given blocks."""
        n = len(blocks) * BLOCK_TOKENS
        k, v = (torch.randn(self.layout.n_layers, n, 3, 5).to(self.layout.dtype) for _ in range(2))
        position = torch.arange(n)
        for layer in range(self.layout.n_layers):
            places = self.transfer.home_places(torch.tensor(blocks)[position // BLOCK_TOKENS], position % BLOCK_TOKENS)
            self.transfer.write_home(layer, *places, k[layer], v[layer])
        return k, v

    def rows(self, layer, head, blocks, chunk_ids):
        per_block = self.layout.chunks_per_block
        return self.transfer.home_rows(layer, torch.tensor(blocks)[chunk_ids // per_block], head, chunk_ids % per_block)


@CHUNK_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_fetched_from_home_is_what_was_written(chunk_size, dtype):
    tiers = Tiers(chunk_size=chunk_size, dtype=dtype)
    blocks = [3, 1]
    k, v = tiers.fill_home(blocks)
    assert tiers.stats.bytes_home_written == 2 * BLOCK_TOKENS * tiers.layout.token_bytes
    chunk_ids = torch.randperm(2 * tiers.layout.chunks_per_block)[:7]
    slots = torch.randperm(40)[:7]
    tiers.transfer.fetch(tiers.rows(1, 2, blocks, chunk_ids), slots)
    assert tiers.stats.bytes_fetched == 7 * tiers.layout.slot_bytes
    for chunk, slot in zip(chunk_ids.tolist(), slots.tolist(), strict=True):
        tokens = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
        assert torch.equal(tiers.hbm.arena[slot, 0], k[1, tokens, 2])
        assert torch.equal(tiers.hbm.arena[slot, 1], v[1, tokens, 2])


@CHUNK_SIZES
def test_placed_chunks_are_counted_apart_from_fetched_ones(chunk_size):
    tiers = Tiers(chunk_size=chunk_size)
    tiers.fill_home([1])
    tiers.transfer.place(tiers.rows(0, 0, [1], torch.arange(5)), torch.arange(5))
    assert tiers.stats.bytes_placed == 5 * tiers.layout.slot_bytes
    assert tiers.stats.bytes_fetched == 0


@CHUNK_SIZES
def test_keys_read_at_home_are_the_keys_written(chunk_size):
    tiers = Tiers(chunk_size=chunk_size)
    k, _ = tiers.fill_home([2, 4])
    chunk_ids = torch.arange(2 * tiers.layout.chunks_per_block)
    for layer in range(2):
        for head in range(3):
            keys = tiers.transfer.read_keys(tiers.rows(layer, head, [2, 4], chunk_ids).view(2, -1))
            assert torch.equal(keys.reshape(-1, 5), k[layer, :, head])


@CHUNK_SIZES
def test_an_appended_token_lands_in_its_place_of_its_slot(chunk_size):
    tiers = Tiers(chunk_size=chunk_size)
    slots = torch.randperm(40)[:6].view(2, 3)
    inside = torch.tensor([0, chunk_size - 1])
    k, v = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    tiers.transfer.append(slots, inside, k, v)
    for b in range(2):
        for head in range(3):
            assert torch.equal(tiers.hbm.arena[slots[b, head], 0, inside[b]], k[b, head])
            assert torch.equal(tiers.hbm.arena[slots[b, head], 1, inside[b]], v[b, head])
    assert int(tiers.hbm.arena.isnan().logical_not().sum()) == 2 * k.numel()
    assert tiers.stats.bytes_appended == 2 * k.numel() * 4


@CHUNK_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_come_back_in_order(chunk_size, dtype):
    tiers = Tiers(chunk_size=chunk_size, dtype=dtype)
    slots = torch.randperm(40)[:12].view(3, 4)
    vectors = torch.randn(3, 4 * tiers.layout.vectors_per_slot, 5)
    tiers.transfer.store_vectors(slots, vectors)
    assert torch.equal(tiers.transfer.load_vectors(slots), vectors.to(dtype))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_bytes_counted_are_bytes_moved(counts, chunk_size):
    tiers = Tiers(chunk_size=chunk_size)
    tiers.fill_home([1])
    moved = 0
    for n in counts:
        tiers.hbm.arena.fill_(float("nan"))
        tiers.transfer.fetch(tiers.rows(0, 1, [1], torch.arange(n)), torch.arange(n))
        moved += int(tiers.hbm.arena.isnan().logical_not().sum()) * tiers.layout.itemsize
        assert tiers.stats.bytes_fetched == moved
