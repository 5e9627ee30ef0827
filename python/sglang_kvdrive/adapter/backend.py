"""The attention backend: SGLang's token-major tensors in, the engine's path, and back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_kvdrive.adapter import cpu_layers
from sglang_kvdrive.adapter.args import config_from_server_args
from sglang_kvdrive.adapter.cache import SequenceEvents
from sglang_kvdrive.adapter.notice import changes_of, startup_block
from sglang_kvdrive.adapter.report import Reporter
from sglang_kvdrive.adapter.selfcheck import assert_hooked
from sglang_kvdrive.adapter.sizing import in_place_if_auto, longest_request, resolve_memory
from sglang_kvdrive.breakeven import break_even_tokens
from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout
from sglang_kvdrive.machine import available_memory_bytes

logger = logging.getLogger("sglang_kvdrive")

DEFAULT_MAX_REQUESTS = 64
"""Sequences that "auto" sizes are made for where nothing says how many requests run at a time."""


@dataclass(frozen=True)
class MemoryPlan:
    """What is decided before the engine exists, because SGLang asks for the capacity first."""

    layout: KVLayout
    config: KVDriveConfig
    context_len: int

    @property
    def capacity_tokens(self) -> int:
        return self.config.dram_bytes // self.layout.block_bytes * BLOCK_TOKENS


def plan_memory(pool) -> MemoryPlan:
    """Sizes of all tiers for the model whose (empty) pool this is.

    Raises:
        ConfigError: they do not fit this machine or cannot serve one request.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_memory, get_schedule, get_server_args

    model = model_config_of(get_server_args())
    config = in_place_if_auto(config_from_server_args(get_memory()))
    layout = KVLayout(
        pool.layer_num, model.num_attention_heads, pool.head_num, pool.head_dim, pool.store_dtype, config.chunk_size
    )
    needs_break_even = config.dense_below is None
    config = resolve_memory(
        config,
        layout,
        context_len=model.context_len,
        max_requests=get_schedule().max_running_requests or DEFAULT_MAX_REQUESTS,
        available_bytes=available_memory_bytes(),
        break_even_tokens=break_even_tokens(layout, config, model.context_len) if needs_break_even else 0,
    )
    return MemoryPlan(layout, config, model.context_len)


def create_backend(runner) -> KVDriveBackend:
    """Factory for SGLang's attention registry: build the engine, hook it to allocator and rows, say so once."""
    from sglang.srt.runtime_context import get_memory, get_observability

    allocator = runner.token_to_kv_pool_allocator
    kernels = cpu_layers.install() if runner.device == "cpu" else None
    assert_hooked(pool=runner.token_to_kv_pool, allocator=allocator)
    plan = allocator.plan
    engine = KVDriveEngine(
        plan.layout,
        plan.config,
        n_sequences=runner.req_to_token_pool.req_to_token.shape[0],
        max_tokens=longest_request(plan.layout, plan.config.dram_bytes, plan.context_len),
    )
    allocator.bind(engine)
    runner.req_to_token_pool.attach_aux_cache(SequenceEvents(allocator))
    interval = float(get_memory().kvdrive_log_interval)
    allocator.reporter = Reporter(engine, log_interval=interval, metrics=bool(get_observability().enable_metrics))
    block = startup_block(
        changes=changes_of(runner.server_args),
        config=plan.config,
        device=str(runner.device),
        context_len=plan.context_len,
        capacity_tokens=plan.capacity_tokens,
        token_bytes=plan.layout.token_bytes,
        kernels=kernels,
    )
    logger.info("%s", block)
    return KVDriveBackend(runner, engine)


class KVDriveBackend(AttentionBackend):
    """Prefill: full attention, K and V go home. Decode: select, fetch, attend."""

    def __init__(self, runner, engine: KVDriveEngine):
        super().__init__()
        self.engine = engine
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._first_layer = runner.token_to_kv_pool.start_layer
        self._plan = None

    def init_forward_metadata(self, forward_batch) -> None:
        """One plan per forward pass, used by every layer."""
        if forward_batch.forward_mode.is_decode():
            self._plan = self._plan_decode(forward_batch)
        elif forward_batch.forward_mode.is_extend():
            self._plan = self._plan_prefill(forward_batch)
        else:
            self._plan = None

    def _plan_decode(self, forward_batch):
        rows = forward_batch.req_pool_indices.long()
        newest = forward_batch.seq_lens.long() - 1
        self.engine.book.blocks[rows, newest // BLOCK_TOKENS] = forward_batch.out_cache_loc.long() // BLOCK_TOKENS
        return self.engine.begin_step(rows)

    def _plan_prefill(self, forward_batch):
        rows = forward_batch.req_pool_indices.tolist()
        prefix, lengths = list(forward_batch.extend_prefix_lens_cpu), list(forward_batch.extend_seq_lens_cpu)
        for row, done, length in zip(rows, prefix, lengths, strict=True):
            if done == 0:
                self.engine.begin(row)
            locations = self.req_to_token_pool.req_to_token[row, : done + length : BLOCK_TOKENS]
            self.engine.book.bind_blocks(row, 0, locations.long() // BLOCK_TOKENS)
        return self.engine.begin_prefill(rows, [int(n) for n in prefix], [int(n) for n in lengths])

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        q, k, v = self._heads(q, k, v, layer, save_kv_cache, kwargs)
        return self.engine.prefill(self._plan, self._layer(layer), q, k, v, layer.scaling).flatten(1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        q, k, v = self._heads(q, k, v, layer, save_kv_cache, kwargs)
        return self.engine.decode(self._plan, self._layer(layer), q, k, v, layer.scaling).flatten(1)

    def _layer(self, layer) -> int:
        return layer.layer_id - self._first_layer

    def _heads(self, q, k, v, layer, save_kv_cache, extra) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """View `[tokens, heads, D]`. What start-up could not see in the model's configuration stops here, loudly."""
        if not save_kv_cache or layer.is_cross_attention or layer.logit_cap or layer.sliding_window_size > 0 or extra:
            raise NotImplementedError(
                f"layer {layer.layer_id} wants save_kv_cache={save_kv_cache}, cross attention={layer.is_cross_attention}, "
                f"logit cap={layer.logit_cap}, sliding window={layer.sliding_window_size}, {sorted(extra)}: "
                "kvdrive does not serve such a layer"
            )
        shape = (-1, layer.tp_k_head_num, layer.qk_head_dim)
        return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), k.reshape(shape), v.reshape(shape)

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
