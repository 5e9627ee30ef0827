"""SGLang's model runner in a process of its own, without scheduler or HTTP: what a step costs and where its time goes.

Several runners (stock, kvdrive, kvdrive with everything attended) live side by side; one works at a time, the others block on
a pipe and take no core, so that their turns can be interleaved. Batches of any length start from a kit: the keys and values of
a real text, prefilled once, copied into the runner's memory.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path

from benchmark.common.kit import MAX_TOKENS, rope_override

STOCK = ("--attention-backend", "torch_native", "--disable-radix-cache", "--disable-overlap-schedule")
KVDRIVE = ("--kv-manager", "kvdrive")


class Runner:
    """Handle of one runner process.

    Args:
        model: folder of the model.
        flags: SGLang's command line (`STOCK` or `KVDRIVE` and more).
        capacity: tokens that its KV cache must hold.
    """

    def __init__(self, model: Path, flags: tuple[str, ...], *, dtype: str, capacity: int):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        argv = ["--model-path", str(model), "--device", "cpu", "--dtype", dtype, "--context-length", str(MAX_TOKENS), *flags]
        argv += ["--json-model-override-args", rope_override(model), "--max-running-requests", "8"]
        argv += ["--random-seed", "0", "--log-level", "error"]
        if "kvdrive" not in flags:
            argv += ["--max-total-tokens", str(capacity)]
        self._process = context.Process(target=_serve, args=(theirs, argv), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def call(self, name: str, *args, **kwargs):
        """Run a method of `session.Session` there and return what it returns."""
        self._pipe.send((name, args, kwargs))
        return self._answer()

    def _answer(self):
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(f"in the runner process:\n{value}")
        return value

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_error) -> None:
        self.stop()


def _serve(pipe, argv: list[str]) -> None:
    try:
        from benchmark.common.session import Session

        session = Session(argv)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)  # torch's process group has no orderly end without the scheduler
        try:
            pipe.send((True, getattr(session, name)(*args, **kwargs)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
