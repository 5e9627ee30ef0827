"""The books of the windows: what stays, what goes, and in which order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvsupport.driver import make_layout
from sglang_kvdrive.config import EVICTIONS
from sglang_kvdrive.errors import IntegrityError
from sglang_kvdrive.values import Selection
from sglang_kvdrive.window.window import Windows

LAYOUT = make_layout(layers=1, kv_heads=2, head_dim=8)
N_CHUNKS = 24


def make_windows(eviction, entries) -> Windows:
    windows = Windows(LAYOUT, n_sequences=len(entries), max_entries=max(entries), eviction=eviction)
    first = 0
    for seq_id, n in enumerate(entries):
        windows.grow(seq_id, torch.arange(first, first + n * 2, dtype=torch.int32))
        first += n * 2
    return windows


def step(windows, chunks, scores):
    """One step of all sequences. chunks: per sequence, per head, best first. scores: by chunk, each chunk its own group."""
    k = max(len(c) for heads in chunks for c in heads)
    ids = torch.full((len(chunks), 2, k), -1, dtype=torch.int32)
    for b, heads in enumerate(chunks):
        for h, c in enumerate(heads):
            ids[b, h, : len(c)] = torch.tensor(c, dtype=torch.int32)
    windows.tick()
    return windows.probe(0, torch.arange(len(chunks)), Selection(ids, ids, torch.tensor(scores).expand(len(chunks), 2, -1)))


def contents(windows, seq_id, head):
    """Slot -> chunk."""
    n = int(windows.n_entries[seq_id])
    pairs = zip(windows._slots[0, seq_id, head, :n].tolist(), windows._chunks[0, seq_id, head, :n].tolist(), strict=True)
    return {slot: chunk for slot, chunk in pairs if chunk >= 0}


class Model:
    """What one window should do, with a list of (chunk, last use, arrival)."""

    def __init__(self, eviction, n_entries):
        self.eviction, self.n_entries = eviction, n_entries
        self.stamp: dict[int, tuple] = {}
        self.now = 0

    def step(self, chunks, scores):
        """Returns (hits, misses, evictions) and the chunks evicted in this step."""
        self.now += 1
        hits = [c for c in chunks if c in self.stamp]
        misses = [c for c in chunks if c not in self.stamp]
        n_evict = max(0, len(self.stamp) + len(misses) - self.n_entries)
        candidates = sorted((c for c in self.stamp if c not in chunks), key=lambda c: self._worth(c, scores))
        evicted = candidates[:n_evict]
        for c in evicted:
            del self.stamp[c]
        for rank, c in enumerate(chunks):
            if c in misses or self.eviction != "fifo":
                self.stamp[c] = (self.now, -rank)
        return (len(hits), len(misses), len(evicted)), set(evicted)

    def _worth(self, chunk, scores):
        return (scores[chunk] if self.eviction == "lookahead" else 0, self.stamp[chunk])


@given(st.data(), st.sampled_from(EVICTIONS))
def test_windows_of_a_batch_behave_like_their_models(data, eviction):
    entries = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    windows = make_windows(eviction, entries)
    models = [[Model(eviction, n) for _ in range(2)] for n in entries]
    for _ in range(data.draw(st.integers(1, 8))):
        scores = data.draw(st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.75]), min_size=N_CHUNKS, max_size=N_CHUNKS))
        chosen = st.lists(st.integers(0, N_CHUNKS - 1), unique=True, min_size=1)
        chunks = [[data.draw(chosen)[:n] for _ in range(2)] for n in entries]
        before = [[contents(windows, b, h) for h in range(2)] for b in range(len(entries))]
        lookup = step(windows, chunks, scores)
        for b, n in enumerate(entries):
            expected = [models[b][h].step(chunks[b][h], scores) for h in range(2)]
            counts = [sum(e[0][i] for e in expected) for i in range(3)]
            assert [int(lookup.n_hits[b]), int(lookup.n_misses[b]), int(lookup.n_evictions[b])] == counts
            for h in range(2):
                after, evicted = contents(windows, b, h), expected[h][1]
                assert set(after.values()) == set(models[b][h].stamp)
                assert not evicted & set(chunks[b][h])
                stayed = {c for c in before[b][h].values() if c not in evicted and c not in chunks[b][h]}
                if eviction == "lookahead" and evicted and stayed:
                    assert max(scores[c] for c in evicted) <= min(scores[c] for c in stayed)
                assert [after[s] for s in lookup.slot_ids[b, h, : len(chunks[b][h])].tolist()] == chunks[b][h]
                unmoved = {s for s, c in before[b][h].items() if after.get(s) == c}
                assert len(unmoved) == len(before[b][h]) - len(evicted)
                if len(before[b][h]) < n:
                    assert len(evicted) <= max(0, len(before[b][h]) + counts[1] - n)
        windows.check_integrity()


def test_every_slot_handed_out_belongs_to_the_window():
    windows = make_windows("lookahead", [3, 5])
    lookup = step(windows, [[[1, 2], [3]], [[4, 5], [6, 7]]], [0.5] * N_CHUNKS)
    assert set(lookup.slot_ids[0][lookup.misses[0]].tolist()) <= set(windows.slots_of(0).tolist())
    assert set(lookup.slot_ids[1][lookup.misses[1]].tolist()) <= set(windows.slots_of(1).tolist())
    assert lookup.slot_ids[0, 1, 1] == 0  # padding


def test_a_window_that_grows_keeps_what_it_holds():
    windows = Windows(LAYOUT, n_sequences=1, max_entries=6, eviction="lru")
    windows.grow(0, torch.arange(4, dtype=torch.int32))
    step(windows, [[[1, 2], [3, 4]]], [0.5] * N_CHUNKS)
    before = contents(windows, 0, 0)
    windows.grow(0, torch.arange(4, 12, dtype=torch.int32))
    lookup = step(windows, [[[1, 2, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]]], [0.5] * N_CHUNKS)
    assert before.items() <= contents(windows, 0, 0).items()
    assert (int(lookup.n_hits), int(lookup.n_misses), int(lookup.n_evictions)) == (4, 8, 0)


def test_a_released_window_is_empty_when_it_comes_back():
    windows = make_windows("lookahead", [2])
    step(windows, [[[1, 2], [3, 4]]], [0.5] * N_CHUNKS)
    assert windows.residents(0, 0, 0).sort().values.tolist() == [1, 2]
    assert sorted(windows.release(0).tolist()) == [0, 1, 2, 3]
    windows.grow(0, torch.arange(4, 8, dtype=torch.int32))
    assert windows.residents(0, 0, 0).numel() == 0
    assert int(step(windows, [[[1, 2], [3, 4]]], [0.5] * N_CHUNKS).n_hits) == 0


@pytest.mark.parametrize("fault", ["chunk", "slot"])
def test_a_planted_fault_is_found(fault):
    windows = make_windows("lookahead", [3])
    step(windows, [[[1, 2, 3], [3, 4]]], [0.5] * N_CHUNKS)
    windows.check_integrity()
    book = windows._chunks if fault == "chunk" else windows._slots
    book[0, 0, 1, 0] = book[0, 0, 1, 1]
    with pytest.raises(IntegrityError):
        windows.check_integrity()
