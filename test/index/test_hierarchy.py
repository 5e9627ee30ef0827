"""The books of the index: paging, immutability, and that planted faults are found."""

import pytest
import torch
from kvsupport.driver import make_config, make_layout
from sglang_kvdrive.errors import CapacityError, IntegrityError
from sglang_kvdrive.index.grouping import Groups, group_segment, n_groups_of
from sglang_kvdrive.index.hierarchy import ChunkIndex

LAYOUT = make_layout(layers=2, kv_heads=3, head_dim=8)
CONFIG = make_config(LAYOUT, groups_per_page=4)  # 16 chunks, 64 tokens per page


def make_index(n_pages=12, n_sequences=3) -> ChunkIndex:
    return ChunkIndex(LAYOUT, CONFIG, n_sequences=n_sequences, max_tokens=2000, n_pages=n_pages)


def random_groups(n_chunks: int) -> Groups:
    return group_segment(torch.randn(LAYOUT.n_kv_heads, n_chunks, LAYOUT.chunk_size, LAYOUT.head_dim), 16, 10)


class Sealed:
    """Seals segments into an index and remembers what belongs where."""

    def __init__(self, index: ChunkIndex):
        self.index = index
        self.next_slot = 0
        self.groups: dict[int, list] = {}

    def seal(self, seq_id: int, n_chunks: int) -> list[torch.Tensor]:
        """Returns per layer the slots for the centroids."""
        index = self.index
        first = int(index.n_chunks[seq_id]) + CONFIG.sink_chunks
        n = index.pages_for(n_chunks) * index.slots_per_page * LAYOUT.n_pairs
        slots = torch.arange(self.next_slot, self.next_slot + n, dtype=torch.int32)
        positions = index.open_segment(seq_id, n_chunks, slots)
        self.next_slot += n
        written = []
        for layer in range(LAYOUT.n_layers):
            groups = random_groups(n_chunks)
            self.groups.setdefault(seq_id, []).append((layer, positions, first, groups))
            written.append(index.write_segment(seq_id, layer, positions, first, groups))
        return written


def members_of(view, b, head):
    """Group number -> chunk ids, as the view describes them."""
    found = {}
    for g, (begin, size) in enumerate(zip(view.begins[b, head].tolist(), view.sizes[b, head].tolist(), strict=True)):
        if size:
            found[g] = view.members[b, head, begin : begin + size].tolist()
    return found


def check_against(sealed: Sealed, seq_ids: list[int]):
    """Every group of every sealed segment is found where its page says, through the view of a batch."""
    index = sealed.index
    pages = index.pages_of(torch.tensor(seq_ids))
    for layer in range(LAYOUT.n_layers):
        view = index.view(layer, *pages)
        for b, seq_id in enumerate(seq_ids):
            for head in range(LAYOUT.n_kv_heads):
                expected = {}
                for written, positions, first, groups in sealed.groups.get(seq_id, []):
                    if written == layer:
                        chunks = groups.members[head].split(groups.sizes[head].tolist())
                        for g, chunk in enumerate(chunks):
                            if chunk.numel():
                                expected[positions.start * CONFIG.groups_per_page + g] = (chunk + first).tolist()
                assert members_of(view, b, head) == expected


@pytest.mark.parametrize("n_chunks", [1, 3, 4, 15, 16, 17, 63, 100])
def test_a_segment_fills_as_many_pages_as_it_needs(n_chunks):
    sealed = Sealed(make_index())
    sealed.seal(1, n_chunks)
    assert int(sealed.index.n_pages[1]) == -(-n_chunks // 16)
    assert int(sealed.index.n_chunks[1]) == n_chunks
    check_against(sealed, [1])
    sealed.index.check_integrity()


def test_segments_of_several_sequences_interleave_and_stay_apart():
    sealed = Sealed(make_index())
    for seq_id, n_chunks in ((0, 20), (2, 16), (0, 16), (1, 5), (0, 33), (2, 16)):
        sealed.seal(seq_id, n_chunks)
        sealed.index.check_integrity()
    check_against(sealed, [0, 1, 2])
    check_against(sealed, [2, 0])
    check_against(sealed, [1])


def test_every_indexed_chunk_is_in_exactly_one_group():
    sealed = Sealed(make_index())
    for n_chunks in (33, 16, 16):
        sealed.seal(0, n_chunks)
    for layer in range(LAYOUT.n_layers):
        view = sealed.index.view(layer, *sealed.index.pages_of(torch.tensor([0])))
        for head in range(LAYOUT.n_kv_heads):
            chunks = sorted(c for group in members_of(view, 0, head).values() for c in group)
            assert chunks == list(range(CONFIG.sink_chunks, CONFIG.sink_chunks + 65))


def test_a_sealed_segment_never_changes():
    sealed = Sealed(make_index())
    sealed.seal(0, 33)
    index = sealed.index

    def snapshot():
        view = index.view(1, *index.pages_of(torch.tensor([0])))
        parts = (view.centroid_slots, view.begins, view.sizes, view.members)
        return [part[..., : n * 3].clone() for part, n in zip(parts, (index.slots_per_page, 4, 4, 16), strict=True)]

    before = snapshot()
    sealed.seal(1, 16)
    sealed.seal(0, 16)
    sealed.index.release(1)
    sealed.seal(2, 16)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))


def test_a_view_is_never_that_of_another_sequence_in_the_same_pages():
    sealed = Sealed(make_index(n_pages=2))
    sealed.seal(0, 20)
    check_against(sealed, [0])
    sealed.index.release(0)
    sealed.groups.clear()
    sealed.seal(0, 20)
    check_against(sealed, [0])


def test_slots_returned_on_release_are_those_that_were_given():
    sealed = Sealed(make_index())
    sealed.seal(0, 33)
    sealed.seal(1, 16)
    sealed.seal(0, 16)
    given = sealed.next_slot
    assert torch.equal(sealed.index.slots_of(0).sort().values, sealed.index.release(0).sort().values)
    assert sealed.index.release(1).numel() + 4 * sealed.index.slots_per_page * LAYOUT.n_pairs == given
    assert int(sealed.index.n_pages.sum()) == 0
    sealed.index.check_integrity()


def test_too_few_pages_raise_and_take_nothing():
    sealed = Sealed(make_index(n_pages=3))
    sealed.seal(0, 33)
    with pytest.raises(CapacityError, match="0 of 3 pages free, 1 are needed"):
        sealed.seal(1, 1)
    sealed.index.check_integrity()
    assert int(sealed.index.n_pages[1]) == 0
    sealed.index.release(0)
    sealed.seal(1, 48)


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8])
def test_there_is_one_group_for_every_sixteen_tokens(chunk_size):
    assert n_groups_of(256 // chunk_size, chunk_size, 16) == 16
    assert n_groups_of(1, chunk_size, 16) == 1
    assert n_groups_of(16 // chunk_size + 1, chunk_size, 16) == 2


@pytest.mark.parametrize(
    "fault", ["page twice", "page lost", "page both", "chunk twice", "size", "count", "other head", "other layer"]
)
def test_a_planted_fault_is_found(fault):
    sealed = Sealed(make_index())
    sealed.seal(0, 33)
    sealed.seal(1, 16)
    index = sealed.index
    index.check_integrity()
    page = int(index._page_table[0, 0])
    match fault:
        case "page twice":
            index._page_table[1, 0] = page
        case "page lost":
            index._free.pop()
        case "page both":
            index._free.append(page)
        case "chunk twice":
            index._members[0, page, 0, 0] = index._members[0, page, 0, 1]
        case "size":
            index._sizes[0, page, 0, 0] += 1
        case "count":
            index.n_chunks[0] += 1
        case "other head":
            index._members[0, page, 2, 0] = index._members[0, page, 2, 1]
        case "other layer":
            index._sizes[1, page, 1, 0] += 1
    with pytest.raises(IntegrityError):
        index.check_integrity()
