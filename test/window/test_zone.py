"""Steady zones: the sink stays, what follows it moves through a ring."""

import pytest
import torch
from kvsupport.driver import make_layout
from sglang_kvdrive.errors import IntegrityError
from sglang_kvdrive.window.zone import SteadyZones

LAYOUT = make_layout(layers=2, kv_heads=2)


def make_zones(n_places=7, sink_chunks=2) -> SteadyZones:
    zones = SteadyZones(LAYOUT, n_sequences=2, max_places=10, sink_chunks=sink_chunks)
    zones.grow(1, torch.arange(n_places * LAYOUT.n_pairs, dtype=torch.int32))
    return zones


def places(zones, chunks):
    return zones.places(torch.tensor([1]), torch.tensor([chunks]))[0].tolist()


def test_sink_chunks_keep_their_places_and_the_others_form_a_ring():
    assert places(make_zones(), list(range(13))) == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6, 2]


def test_without_a_sink_everything_is_ring():
    assert places(make_zones(sink_chunks=0), [0, 6, 7, 13]) == [0, 6, 0, 6]


def test_as_many_neighbours_as_the_ring_has_places_never_collide():
    zones = make_zones()
    for first in range(2, 30):
        assert len(set(places(zones, list(range(first, first + 5))))) == 5


def test_slots_of_chunks_differ_by_layer_and_head_and_are_the_given_ones():
    zones = make_zones()
    slots = zones.slots_at(torch.tensor([1]), torch.arange(7).unsqueeze(0))
    assert slots.shape == (2, 1, 2, 7)
    assert slots.flatten().sort().values.tolist() == list(range(28))
    zones.check_integrity()


def test_a_zone_that_grows_before_it_wraps_keeps_its_chunks():
    zones = make_zones(n_places=4)
    before = zones.slots_at(torch.tensor([1]), torch.arange(4).unsqueeze(0))
    zones.grow(1, torch.arange(100, 100 + 3 * LAYOUT.n_pairs, dtype=torch.int32))
    assert torch.equal(before, zones.slots_at(torch.tensor([1]), torch.arange(4).unsqueeze(0)))
    assert places(zones, [6, 7]) == [6, 2]


def test_release_returns_every_slot_once():
    zones = make_zones()
    assert zones.release(1).sort().values.tolist() == list(range(28))
    assert zones.release(1).numel() == 0


def test_a_shared_slot_is_found():
    zones = make_zones()
    zones._slots[1, 1, 0, 3] = zones._slots[0, 1, 1, 2]
    with pytest.raises(IntegrityError):
        zones.check_integrity()
