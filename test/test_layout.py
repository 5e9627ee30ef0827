"""Shape and byte arithmetic."""

import pytest
import torch
from sglang_kvdrive.errors import ConfigError
from sglang_kvdrive.layout import BLOCK_TOKENS, CHUNK_SIZES, KVLayout, align_up, ceil_div


def test_rounding_goes_up_to_whole_units():
    assert [ceil_div(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    assert [align_up(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_a_block_is_the_same_number_of_bytes_whatever_the_chunk_size(chunk_size):
    layout = KVLayout(30, 9, 3, 64, torch.bfloat16, chunk_size)
    assert layout.token_bytes == 30 * 3 * 2 * 64 * 2
    assert layout.block_bytes == 64 * layout.token_bytes
    assert layout.chunks_per_block * layout.chunk_size == BLOCK_TOKENS
    assert layout.slot_bytes * layout.chunks_per_block * layout.n_pairs == layout.block_bytes
    home, arena = torch.Size(layout.home_shape(5)), torch.Size(layout.arena_shape(7))
    assert home.numel() * layout.itemsize == 5 * layout.block_bytes
    assert arena.numel() * layout.itemsize == 7 * layout.slot_bytes
    assert layout.vectors_per_slot * layout.head_dim * layout.itemsize == layout.slot_bytes


def test_query_heads_per_kv_head():
    assert KVLayout(1, 9, 3, 64, torch.float32).q_per_kv == 3


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as refusal:
        KVLayout(1, 7, 3, 64, torch.int8, chunk_size=3)
    message = str(refusal.value)
    assert len(refusal.value.reasons) == 3
    assert "7 query heads are not a multiple of 3 KV heads" in message
    assert "chunk size 3 is not one of 1, 2, 4, 8" in message
    assert "torch.int8" in message
    assert "--kv-cache-dtype auto" in message


@pytest.mark.parametrize("name", ["n_layers", "n_q_heads", "n_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_dimension_may_be_below_one(name, value):
    shape = {"n_layers": 1, "n_q_heads": 2, "n_kv_heads": 2, "head_dim": 4, name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}, it must be at least 1"):
        KVLayout(**shape, dtype=torch.float32)
