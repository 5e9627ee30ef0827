"""SGLang's two memory classes, ours: a pool without buffers, and an allocator whose pages are the home blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_decode_naive, alloc_extend_naive
from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool
from sglang.srt.utils import get_num_new_pages

from sglang_kvdrive.adapter.admission import KVDrivePrefillBudget
from sglang_kvdrive.errors import IntegrityError

if TYPE_CHECKING:
    from sglang_kvdrive.engine import KVDriveEngine


class KVDrivePool(NoOpMHATokenToKVPool):
    """Stands where SGLang expects device buffers. K and V never come here: the backend gives them to the engine."""


class KVDriveAllocator(PagedTokenToKVPoolAllocator):
    """Hands out logical token ids; page id == home block id, and the DRAM tier owns the only free list.

    SGLang constructs it with the size of its device pool; the capacity is that of our tiers and is known before the
    engine exists (`plan`).
    """

    engine: KVDriveEngine | None = None
    reporter = None

    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        from sglang_kvdrive.adapter.backend import plan_memory

        del size  # of the stock device pool
        self.plan = plan_memory(kvcache)
        self._dirty = False
        super().__init__(self.plan.capacity_tokens, page_size, dtype, device, kvcache, need_sort)

    def bind(self, engine: KVDriveEngine) -> None:
        """The engine exists now; from here on the allocator works."""
        self.engine = engine

    # -- the free list is the tier's --------------------------------------------------------------------------------

    @property
    def free_pages(self) -> torch.Tensor | None:
        return None if self.engine is None else self.engine.dram.free_ids()

    @free_pages.setter
    def free_pages(self, _pages) -> None:
        """SGLang assigns the list in its constructor; ours lies elsewhere."""

    def available_size(self) -> int:
        return self.size if self.engine is None else self.engine.dram.n_free * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return self.engine.dram.free_ids()

    def clear(self) -> None:
        self.free_group = None
        self.free_page_ids_group = []
        self.staged_pages, self.num_staged_pages = [], 0
        if self.engine is not None:
            self.engine.clear()

    def alloc(self, need_size: int):
        pages = self._take(need_size // self.page_size)
        if pages is None:
            return None
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def alloc_extend(self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None):
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        pages = self._take(num_new_pages)
        if pages is None:
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, pages, out, self.page_size, self.device)
        return out

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        pages = self._take(num_new_pages)
        if pages is None:
            return None
        out = torch.empty(len(seq_lens), dtype=torch.int64, device=self.device)
        alloc_decode_naive(seq_lens, last_loc, pages, out, self.page_size, num_new_pages)
        return out

    def _take(self, n_pages: int) -> torch.Tensor | None:
        """Pages, or None where SGLang expects to be told that there are too few."""
        if n_pages > self.engine.dram.n_free:
            return None
        self._dirty = True
        return self.engine.dram.allocate(n_pages).to(self.device)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        self.engine.dram.release(torch.cat(page_ids).cpu())

    # -- what the scheduler asks -------------------------------------------------------------------------------------

    def create_prefill_budget(self, tree_cache, *, num_mixed_decode_tokens=0):
        return KVDrivePrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def check_decode_capacity(self, *, num_tokens, tree_cache, requests=None, spec_algorithm=None) -> bool:
        """DRAM for the next tokens and HBM for what the sequences grow by; SGLang retracts requests until both fit."""
        if self.available_size() < num_tokens:
            return False
        return self.engine.can_step([req.kv.req_pool_idx for req in requests or ()])

    def max_new_tokens_for_memory(self, input_tokens, max_new_tokens, *, token_capacity, sliding_window_size, chunk_size):
        """Stock, with one token less of capacity: with the radix cache off, stock's admission of `ignore_eos` requests wants
        one token more than this clip leaves, and a request at the edge would wait for ever at the head of the queue."""
        return super().max_new_tokens_for_memory(
            input_tokens,
            max_new_tokens,
            token_capacity=token_capacity - 1,
            sliding_window_size=sliding_window_size,
            chunk_size=chunk_size,
        )

    def verify_byte_accounting(self) -> list[str]:
        """SGLang calls this in every idle loop; the books are checked once after each activity."""
        if not self._dirty:
            return []
        self._dirty = False
        if self.reporter is not None:
            self.reporter.publish()
        try:
            self.engine.check_integrity()
        except IntegrityError as error:
            return [str(error)]
        return []
