"""`probe_window` against the rule, written as a sort over tuples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvdrive_kernels.probe_window import probe_window


def expected(selected, resident, priority, stamps, n_entries):
    """Entry of every selected chunk, and whether it was a hit: one (sequence, KV head)."""
    at = {chunk: entry for entry, chunk in enumerate(resident[:n_entries]) if chunk >= 0}
    kept = {at[chunk] for chunk in selected if chunk in at}
    free = [e for e in range(n_entries) if resident[e] < 0]
    victims = [e for e in range(n_entries) if resident[e] >= 0 and e not in kept]
    victims = free + sorted(victims, key=lambda e: (priority[e], stamps[e], e))
    return [at[c] if c in at else victims.pop(0) for c in selected], [c in at for c in selected]


def check(selected, resident, priority, stamps, n_entries):
    """Each argument is a list per sequence; padded here to a batch."""
    k, w = max(map(len, selected)), max(map(len, resident))

    def pad(rows, width, fill, dtype):
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype).unsqueeze(1)

    dtype = torch.int64 if isinstance(priority[0][0], int) else torch.float32
    entries, hits = probe_window(
        pad(selected, k, -1, torch.int32),
        pad(resident, w, -1, torch.int32),
        pad(priority, w, 0, dtype),
        pad(stamps, w, 0, torch.int64),
        torch.tensor(n_entries),
    )
    for b in range(len(selected)):
        n = len(selected[b])
        want_entries, want_hits = expected(selected[b], resident[b], priority[b], stamps[b], n_entries[b])
        got = entries[b, 0, :n].tolist()
        assert hits[b, 0, :n].tolist() == want_hits
        assert [e for e, hit in zip(got, want_hits, strict=True) if hit] == [
            e for e, hit in zip(want_entries, want_hits, strict=True) if hit
        ]
        n_free = sum(c < 0 for c in resident[b][: n_entries[b]])
        misses, want = ([e for e, hit in zip(es, want_hits, strict=True) if not hit] for es in (got, want_entries))
        assert set(misses[:n_free]) <= {e for e in range(n_entries[b]) if resident[b][e] < 0}  # free entries in any order
        assert misses[n_free:] == want[n_free:]
        assert len(set(got)) == n
        assert all(0 <= e < n_entries[b] for e in got)
        assert (entries[b, 0, n:] == 0).all()
        assert not hits[b, 0, n:].any()


def test_all_hits_move_nothing():
    check([[3, 9, 5]], [[9, 5, 3, 7]], [[0.1, 0.2, 0.3, 0.4]], [[1, 2, 3, 4]], [4])


def test_all_misses_replace_the_least_valuable():
    check([[30, 31]], [[9, 5, 3, 7]], [[0.4, 0.1, 0.3, 0.2]], [[1, 2, 3, 4]], [4])


def test_an_empty_window_is_filled():
    check([[30, 31, 32]], [[-1, -1, -1]], [[0.0, 0.0, 0.0]], [[0, 0, 0]], [3])


def test_free_entries_go_before_residents_of_no_value():
    check([[30]], [[9, -1, 3]], [[0.0, 5.0, 0.0]], [[1, 2, 3]], [3])


def test_a_selected_chunk_is_no_victim_though_its_value_is_the_lowest():
    check([[9, 30]], [[9, 5]], [[0.0, 1.0]], [[1, 2]], [2])


def test_equal_values_give_up_the_older():
    check([[30, 31]], [[9, 5, 3]], [[0.5, 0.5, 0.5]], [[7, 6, 8]], [3])


@pytest.mark.parametrize("clock", [2**30, 2**40, 2**52])
def test_equal_values_give_up_the_older_however_long_the_engine_has_run(clock):
    check([[30, 31]], [[-1, 9, 5, 3]], [[0.0, 0.5, 0.5, 0.5]], [[0, clock + 7, clock + 8, clock + 6]], [4])
    check([[30], [40, 41]], [[9, 5], [1, 2, 3]], [[0.5, 0.5], [0.5] * 3], [[clock + 2, clock + 1], [clock + 3, clock, 5]], [2, 3])


def test_entries_beyond_a_window_are_never_used():
    check([[30], [31, 32]], [[9, -1], [4, 5, 6]], [[0.5, 0.5], [0.3, 0.2, 0.1]], [[1, 0], [1, 2, 3]], [1, 3])


@given(st.data())
def test_every_window_and_selection_follows_the_rule(data):
    selected, resident, priority, stamps, n_entries = [], [], [], [], []
    by_score = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 3))):
        w = data.draw(st.integers(1, 12))
        n = data.draw(st.integers(1, w))
        chunks = data.draw(st.lists(st.integers(0, 20), unique=True, min_size=w, max_size=w))
        resident.append([-1 if e >= n or data.draw(st.booleans()) else chunks[e] for e in range(w)])
        selected.append(data.draw(st.lists(st.integers(0, 20), unique=True, max_size=n)))
        ages = data.draw(st.lists(st.integers(0, 99), unique=True, min_size=w, max_size=w))
        stamps.append(ages)
        values = data.draw(st.lists(st.sampled_from([0.0, 1e-30, 0.25, 0.5, 3.0]), min_size=w, max_size=w))
        priority.append(values if by_score else ages)
        n_entries.append(n)
    if any(selected):
        check(selected, resident, priority, stamps, n_entries)
