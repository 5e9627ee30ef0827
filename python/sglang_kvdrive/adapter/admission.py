"""Admission: a request needs home blocks for its tokens (stock counts them) and slots in the HBM arena (we count them)."""

from __future__ import annotations

from sglang.srt.mem_cache.prefill_budget import PrefillBudget


class KVDrivePrefillBudget(PrefillBudget):
    """One prefill pass. Requests that HBM cannot hold beside the running ones wait; the arena always fits one alone."""

    def __init__(self, allocator, tree_cache, *, num_mixed_decode_tokens: int = 0):
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.engine = allocator.engine
        self._free_slots = self.engine.hbm.n_free - self.engine.slots_outstanding()
        self._candidate = 0

    def check_prefill(self, *, extend_input_len, **kwargs):
        if not self._fits_hbm(extend_input_len):
            return False, None
        return super().check_prefill(extend_input_len=extend_input_len, **kwargs)

    def can_allocate_prefill(self, *, extend_input_len, **kwargs) -> bool:
        return self._fits_hbm(extend_input_len) and super().can_allocate_prefill(extend_input_len=extend_input_len, **kwargs)

    def reserve(self, extend_input_len, max_new_tokens, *, is_chunked_continuation=False, **kwargs) -> None:
        """A continuing prompt was promised its slots when it was admitted."""
        if not is_chunked_continuation:
            self._free_slots -= self._candidate
        super().reserve(extend_input_len, max_new_tokens, is_chunked_continuation=is_chunked_continuation, **kwargs)

    def _fits_hbm(self, prompt_tokens: int) -> bool:
        self._candidate = self.engine.slots_promised(prompt_tokens)
        return self._candidate <= self._free_slots
