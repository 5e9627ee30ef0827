"""What a runner process does: load the model through SGLang, start batches, decode, prefill, and time every part of it."""

from __future__ import annotations

import resource
import time
from array import array
from pathlib import Path

# The scheduler must be imported before the plugins, or kvdrive does not add what a scheduler needs.
import sglang.srt.managers.scheduler  # noqa: F401
import torch
from sglang.benchmark import one_batch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_device, get_schedule, publish, spawn_world_rank
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from benchmark.common.kit import load_kit, save_kit
from benchmark.common.stages import Stages


class Session:
    """One loaded model and at most one batch.

    Args:
        argv: SGLang's command line.
    """

    def __init__(self, argv: list[str]):
        load_plugins()
        server_args = prepare_server_args(argv)
        rank = spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        one_batch._init_process_global_configs()
        wrapped, _tokenizer = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
        self.runner = wrapped.torch_runner
        self.engine = getattr(self.runner.token_to_kv_pool_allocator, "engine", None)
        self.batch = None
        self.ids: list[int] = []
        self.at = 0

    # -- batches -----------------------------------------------------------------------------------------------------

    def start(self, kit: str, lengths: list[int], n_new: int) -> None:
        """A batch whose i-th request has the first `lengths[i]` tokens of the kit stored and will decode `n_new` more."""
        self.drop()
        keys, values, self.ids = load_kit(Path(kit))
        self.batch = self._batch([self.ids[:n] for n in lengths])
        forward = self._extend_inputs(self.batch)
        self.runner.attn_backend.init_forward_metadata(forward)
        for layer in range(keys.shape[0]):
            k, v = (torch.cat([x[layer, :n] for n in lengths]).to(self.runner.dtype) for x in (keys, values))
            if self.engine is not None:
                plan = self.runner.attn_backend._plan
                self.engine.transfer.write_home(layer, plan.rows, plan.inside, k, v)
            else:
                pool = self.runner.token_to_kv_pool
                pool.k_buffer[layer][self.batch.out_cache_loc] = k
                pool.v_buffer[layer][self.batch.out_cache_loc] = v
        if self.engine is not None:
            for row, n in zip(self.batch.req_pool_indices.tolist(), lengths, strict=True):
                self.engine.expect(row, n + n_new)
        self.at, self.lengths = 0, lengths

    def drop(self) -> None:
        self.batch = None
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()

    def _batch(self, prompts: list[list[int]]) -> ScheduleBatch:
        reqs = []
        for i, ids in enumerate(prompts):
            req = Req(
                rid=str(i),
                origin_input_text="",
                origin_input_ids=array("q", ids),
                sampling_params=SamplingParams(temperature=0, max_new_tokens=512),
            )
            req.full_untruncated_fill_ids, req.logprob_start_len, req.extend_end = req.origin_input_ids, -1, len(ids)
            reqs.append(req)
        return self._schedule(reqs)

    def _schedule(self, reqs: list[Req]) -> ScheduleBatch:
        allocator = self.runner.token_to_kv_pool_allocator
        tree = one_batch.TreeCacheNamespace(
            page_size=get_schedule().page_size, device=get_device().device, token_to_kv_pool_allocator=allocator
        )
        return ScheduleBatch.init_new(
            reqs=reqs,
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=tree,
            model_config=self.runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def _extend_inputs(self, batch: ScheduleBatch) -> ForwardBatch:
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        return ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)

    # -- work ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, steps: int, stages: bool = False) -> dict:
        """Feed the text's own tokens, so that every runner does the same work.

        Returns:
            `ms` of each step; `argmax` and `margin` `[steps][B]`, the best token and how far the next one is in logits; `stages`
            milliseconds of each by name, if asked for.
        """
        measured, argmax, margin = [], [], []
        watch = Stages(self) if stages else None
        for _ in range(steps):
            tokens = torch.tensor([self.ids[n + self.at] for n in self.lengths])
            started = time.perf_counter()
            found, logits = one_batch.decode(tokens, self.batch, self.runner)
            measured.append(1e3 * (time.perf_counter() - started))
            argmax.append(found.tolist())
            margin.append(logits.topk(2).values.diff().abs().flatten().tolist())
            self.at += 1
        return {"ms": measured, "argmax": argmax, "margin": margin, "stages": watch.finish(steps) if watch else None}

    @torch.no_grad()
    def prefill(self, ids: list[int], n_tokens: int, piece: int) -> dict:
        """Read the first `n_tokens` as a prompt, in pieces. Returns seconds of each piece and the next token."""
        self.drop()
        self.batch = self._batch([ids[:n_tokens]])
        req, seconds = self.batch.reqs[0], []
        found = None
        for start in range(0, n_tokens, piece):
            req.extend_end = min(n_tokens, start + piece)
            req.prefix_len = start
            batch = self._schedule([req])
            started = time.perf_counter()
            forward = self._extend_inputs(batch)
            output = self.runner.forward(forward).logits_output
            found = self.runner.sample(output, forward)
            seconds.append(time.perf_counter() - started)
        self.batch, self.ids, self.lengths, self.at = batch, ids, [n_tokens], 0
        if self.engine is not None:
            self.engine.expect(int(batch.req_pool_indices[0]), n_tokens + 512)
        return {"s": seconds, "token": int(found)}

    # -- evidence ------------------------------------------------------------------------------------------------------

    def counters(self) -> dict:
        """The engine's counters."""
        return {k: v for k, v in vars(self.engine.stats).items() if isinstance(v, (int, float))}

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def save_kit(self, path: str, ids: list[int]) -> None:
        """Write keys and values of the first request."""
        row = int(self.batch.req_pool_indices[0])
        n = int(self.engine.book.n_tokens[row])
        home = self.engine.dram.home[self.engine.book.blocks[row, : self.engine.book.n_blocks(row)]]
        # [blocks, L, H, chunks, 2, C, D] -> [2, L, T, H, D]
        both = home.permute(4, 1, 0, 3, 5, 2, 6).flatten(2, 4)[:, :, :n]
        save_kit(Path(path), both[0], both[1], ids)
