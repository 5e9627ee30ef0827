"""Where the time of a decode step goes: timers around SGLang's modules, our kernels, and the bookkeeping of both."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress

from kvdrive_kernels.dispatch import Kernel
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "logits_processor")
SMALL = ("input_layernorm", "post_attention_layernorm", "norm", "rotary_emb", "act_fn", "embed_tokens")


class Stages:
    """Times until `finish`. A name's time excludes the names inside it."""

    def __init__(self, session):
        self._spent: dict[str, float] = defaultdict(float)
        self._stack: list[float] = []
        self._undo = []
        runner = session.runner
        for name, module in runner.model.named_modules():
            last = name.rpartition(".")[2]
            if last in LINEARS:
                self._module(module, f"linear {last}")
            elif last in SMALL:
                self._module(module, "norms, rope, activation, embedding")
            elif last == "attn":
                self._module(module, "attention: Python around the kernels")
        self._method(Kernel, "__call__", lambda kernel, *_a, **_k: f"kernel {kernel.name}")
        self._method(runner.attn_backend, "init_forward_metadata", lambda *_a, **_k: "plan of the step")
        self._method(ScheduleBatch, "prepare_for_decode", lambda *_a, **_k: "SGLang: batch bookkeeping")
        self._method(runner, "sample", lambda *_a, **_k: "SGLang: sampling")
        self._method(runner, "forward", lambda *_a, **_k: "SGLang: forward, the rest")
        init_new = ForwardBatch.__dict__["init_new"]
        ForwardBatch.init_new = staticmethod(self._timed(ForwardBatch.init_new, lambda *_a, **_k: "SGLang: batch bookkeeping"))
        self._undo.append(lambda: setattr(ForwardBatch, "init_new", init_new))

    def finish(self, steps: int) -> dict[str, float]:
        """Milliseconds per step by name."""
        for undo in self._undo:
            undo()
        return {name: 1e3 * seconds / steps for name, seconds in self._spent.items()}

    def _timed(self, function, name_of):
        def timed(*args, **kwargs):
            self._begin()
            try:
                return function(*args, **kwargs)
            finally:
                self._end(name_of(*args, **kwargs))

        return timed

    def _begin(self) -> None:
        self._stack.append(0.0)
        self._stack.append(time.perf_counter())

    def _end(self, name: str) -> None:
        spent = time.perf_counter() - self._stack.pop()
        inside = self._stack.pop()
        self._spent[name] += spent - inside
        if self._stack:
            self._stack[-2] += spent

    def _method(self, owner, name: str, name_of) -> None:
        original = getattr(owner, name)
        had = name in vars(owner)
        setattr(owner, name, self._timed(original, name_of))

        def undo():
            if had:
                setattr(owner, name, original)
            else:
                with suppress(AttributeError):
                    delattr(owner, name)

        self._undo.append(undo)

    def _module(self, module, name: str) -> None:
        # A module is called through its class: the timer wraps the instance's forward.
        self._method(module, "forward", lambda *_a, **_k: name)
