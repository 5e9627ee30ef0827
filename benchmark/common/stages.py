"""Where the time of a decode step goes: timers around SGLang's modules, our kernels, and the bookkeeping of both."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from kvdrive_kernels.dispatch import Kernel
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "logits_processor")
SMALL = ("input_layernorm", "post_attention_layernorm", "norm", "rotary_emb", "act_fn", "embed_tokens")


class Stages:
    """Times until `finish`. A name's time excludes the names inside it."""

    def __init__(self, session):
        self._spent: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        """Time of the stages inside each running one."""
        self._undo = []
        runner = session.runner
        for name, module in runner.model.named_modules():
            last = name.rpartition(".")[2]
            if last in LINEARS:
                self._wrap(module, "forward", f"linear {last}")
            elif last in SMALL:
                self._wrap(module, "forward", "norms, rope, activation, embedding")
            elif last == "attn":
                self._wrap(module, "forward", "attention: Python around the kernels")
        self._wrap(Kernel, "__call__", lambda kernel: f"kernel {kernel.name}")
        self._wrap(runner.attn_backend, "init_forward_metadata", "plan of the step")
        self._wrap(ScheduleBatch, "prepare_for_decode", "SGLang: batch bookkeeping")
        self._wrap(runner, "sample", "SGLang: sampling")
        self._wrap(runner, "forward", "SGLang: forward, the rest")
        self._wrap(ForwardBatch, "init_new", "SGLang: batch bookkeeping")  # bound to the class already: a plain function serves

    def finish(self, steps: int) -> dict[str, float]:
        """Milliseconds per step by name."""
        for undo in self._undo:
            undo()
        return {name: 1e3 * seconds / steps for name, seconds in self._spent.items()}

    def _timed(self, function, stage: str | Callable[[object], str]):
        """`function` with its time counted for a stage, or for the stage that its first argument says."""

        def timed(*args, **kwargs):
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self._spent[stage if isinstance(stage, str) else stage(args[0])] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return timed

    def _wrap(self, owner, name: str, stage) -> None:
        """Time a method of a class, or of one object (which hides its class's until `finish`)."""
        own = vars(owner).get(name)
        setattr(owner, name, self._timed(getattr(owner, name), stage))
        self._undo.append(partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own))
