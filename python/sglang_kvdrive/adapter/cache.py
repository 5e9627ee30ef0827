"""The prefix cache that caches nothing, and the per-request events SGLang sends through it."""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)

from sglang_kvdrive.adapter.report import request_report


class KVDriveTree(BasePrefixCache):
    """Radix-free: every request owns its blocks. `on_release` is the end of a request in any state."""

    def __init__(self, params):
        self.disable = True
        self.page_size = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.sliding_window_size = params.sliding_window_size
        self.root_node = object()

    @property
    def engine(self):
        return self.token_to_kv_pool_allocator.engine

    def reset(self) -> None:
        """A flush: `KVDriveAllocator.clear` empties the engine."""

    def match_prefix(self, params) -> MatchResult:
        return MatchResult(0, self.root_node, self.root_node, self.root_node)

    def supports_prefix_sharing(self) -> bool:
        return False

    def checkpoint(self, req, *, up_to, **kwargs) -> None:
        """Called after every piece of a prompt: the first moment at which the request is known with its row. After a
        retraction, what was generated is prompt."""
        if not req.finished():
            self.engine.expect(req.kv.req_pool_idx, len(req.origin_input_ids) + len(req.output_ids))

    def evict(self, params) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node) -> IncLockRefResult:
        return IncLockRefResult()

    def dec_lock_ref(self, node, params=None) -> DecLockRefResult:
        return DecLockRefResult()

    def on_release(self, req, *, checkpointed: bool) -> None:
        """Finish, abort or retraction: what the request did is kept for its answer, what it held returns."""
        row = req.kv.req_pool_idx
        if row is None:
            return
        req.kvdrive_report = request_report(self.engine, row, req)
        self.engine.release(row)

    def flush_pending_backups(self) -> None:
        """Called after every step."""
        reporter = self.token_to_kv_pool_allocator.reporter
        if reporter is not None:
            reporter.tick()


class SequenceEvents:
    """What SGLang calls an auxiliary cache: tells it the logical capacity, hears about rows.

    Rows are released through `KVDriveTree.on_release`; `free` catches a row that ends in any other way.
    """

    def __init__(self, allocator):
        self.allocator = allocator
        self.dense_capacity = allocator.size

    def alloc_to_lengths(self, *, req_pool_indices_cpu, target_seq_lens_cpu) -> None:
        """Home blocks come with the allocation itself."""

    def free(self, row: int) -> None:
        self.allocator.engine.release(row)

    def clear(self) -> None:
        self.allocator.engine.clear()

    def reset_allocator(self) -> None:
        """The allocator clears itself."""
