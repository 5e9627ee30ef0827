"""One server at a time for a whole test run: asking for another one stops the one before."""

from __future__ import annotations

import sys
from pathlib import Path

from kvsupport.server import STOCK, Server

EVERYTHING = ("--kvdrive-budget", "100%", "--kvdrive-dense-below", "0")
ARENA = ("--kvdrive-hbm", "2GiB")
"""Without a size there is no arena on the cpu, and chunks are attended where they lie."""
FP32 = ("--dtype", "float32")
SMALL_CAPACITY = 2048
"""Tokens that the small server holds in all its tiers: 90 MiB of fp32 KV."""
SMALL_ARENA = 1456
"""Tokens whose KV would fill the small server's arena."""
SMALL_PIECE = 256
SMALL_BUDGET = 288
SMALL_RUNNING = 8
SMALL = (
    *FP32, "--chunked-prefill-size", str(SMALL_PIECE), "--context-length", "8192",
    "--kvdrive-dram", "90MiB", "--kvdrive-hbm", "64MiB", "--kvdrive-budget", f"{SMALL_BUDGET}tok",
    "--kvdrive-window", "1", "--kvdrive-dense-below", "0",
)  # fmt: skip

SERVERS = {
    "stock_fp32": {"kvdrive": False, "flags": (*STOCK, *FP32)},
    # The budget is everything and nothing is dense: answers equal stock through index, selection and window.
    "kvdrive_fp32": {
        "flags": (*FP32, *EVERYTHING, *ARENA, "--chunked-prefill-size", "320", "--enable-metrics"),
    },
    # The same with other prefill pieces, and once without an arena.
    "kvdrive_fp32_64": {"flags": (*FP32, *EVERYTHING, *ARENA, "--chunked-prefill-size", "64")},
    "kvdrive_fp32_2048": {"flags": (*FP32, *EVERYTHING, "--chunked-prefill-size", "2048")},
    "stock_bf16": {"kvdrive": False, "flags": (*STOCK, "--dtype", "bfloat16")},
    "kvdrive_bf16": {
        "command": (str(Path(sys.executable).with_name("sglang")), "serve"),
        "flags": ("--dtype", "bfloat16", *EVERYTHING, *ARENA),
    },
    "kvdrive_small": {
        "flags": (*SMALL, "--max-running-requests", str(SMALL_RUNNING),
                  "--schedule-conservativeness", "0.05"),  # admit more than fits to the end, so that it comes to retractions
    },
    "kvdrive_one": {"flags": (*SMALL, "--max-running-requests", "1")},
}  # fmt: skip
"""The servers that several test modules share, in the order in which a test run starts them."""


class ServerSlot:
    """Holds the only running server.

    Args:
        model: folder of the model.
        folder: where the servers' logs go.
    """

    def __init__(self, model: Path, folder: Path):
        self.model, self.folder = model, folder
        self.n_started = 0
        self._name: str | None = None
        self._server: Server | None = None

    def shared(self, name: str) -> Server:
        """The server `name` of `SERVERS`; starts it unless it runs."""
        return self.start(name, **SERVERS[name])

    def start(self, name: str, *, flags=(), **settings) -> Server:
        """The running server if it is called `name`, else a new one."""
        if self._name == name and self._server.process.poll() is None:
            return self._server
        self.stop()
        self.n_started += 1
        log = self.folder / f"{self.n_started:02}-{name}.log"
        self._server = Server(self.model, flags, log=log, **settings)
        self._name = name
        return self._server

    def stop(self) -> None:
        server, self._server, self._name = self._server, None, None
        if server is not None:
            server.stop()
