"""What the engine tells people: `/server_info`, `/metrics`, one log line per interval, and each answer's meta_info."""

from __future__ import annotations

import logging
import time
from typing import ClassVar

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import BLOCK_TOKENS

logger = logging.getLogger("sglang_kvdrive")

KEY = "kvdrive"
"""Name of our part in `internal_states[]` and in `meta_info`."""


def engine_report(engine: KVDriveEngine) -> dict:
    """Counters and tier sizes as plain values, for `/server_info`."""
    stats = engine.stats
    return {
        "config": engine.config.as_dict(),
        "max_tokens": engine.max_tokens,
        "minimum_hbm_bytes": engine.config.slots_of(engine.layout, engine.max_tokens).total * engine.layout.slot_bytes,
        "tiers": {
            "hbm": {"used_bytes": engine.hbm.used_bytes, "total_bytes": engine.hbm.total_bytes},
            "dram": {
                "used_bytes": engine.dram.used_bytes,
                "total_bytes": engine.dram.total_bytes,
                "used_tokens": engine.dram.n_used * BLOCK_TOKENS,
                "total_tokens": engine.dram.capacity_tokens,
            },
        },
        "sequences": len(engine.book.active()),
        "hit_rate": stats.hit_rate,
        "attended_share": stats.attended_entries / stats.stored_entries if stats.stored_entries else None,
        **stats.as_dict(),
    }


def request_report(engine: KVDriveEngine, row: int, req) -> dict:
    """What one request did, for its `meta_info`. Tokens are per step, averaged over layers and KV heads."""
    stats = engine.sequence_stats(row)
    entries = max(1, stats.steps * engine.layout.n_pairs)
    report = {
        "mode": stats.mode,
        "budget_tokens": stats.budget_entries,
        "steps": stats.steps,
        "attended_tokens": round(stats.attended / entries, 1),
        "stored_tokens": round(stats.stored / entries, 1),
        "hit_rate": None if stats.hit_rate is None else round(stats.hit_rate, 4),
    }
    clipped = getattr(req, "kvdrive_clipped", None)
    if clipped is not None:
        report["clipped"] = clipped
    return report


class KVDriveOutputStreamer(SchedulerOutputStreamer):
    """Adds the report to the last output of each request: `meta_info["kvdrive"]`, a list of one."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs) -> dict[str, list]:
        return {KEY: [[req.kvdrive_report] if req.finished() and hasattr(req, "kvdrive_report") else [] for req in reqs]}


class Reporter:
    """Prometheus metrics and the log line. `tick` is called after every step and does nothing between intervals."""

    METRICS_INTERVAL = 1.0

    def __init__(self, engine: KVDriveEngine, *, log_interval: float, metrics: bool):
        self.engine = engine
        self.log_interval = log_interval
        self._next_log = time.monotonic() + log_interval
        self._next_metrics = 0.0
        self._seen = engine.stats.as_dict()
        self._metrics = _Metrics() if metrics else None

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_metrics:
            self._next_metrics = now + self.METRICS_INTERVAL
            self.publish()
        if self.log_interval and now >= self._next_log:
            self._next_log = now + self.log_interval
            self._log()

    def publish(self) -> None:
        """Bring the Prometheus metrics up to date: once a second while busy, and when the server becomes idle."""
        if self._metrics is not None:
            self._metrics.update(self.engine)

    def _log(self) -> None:
        stats = self.engine.stats.as_dict()
        since = {name: value - self._seen[name] for name, value in stats.items()}
        self._seen = stats
        if not since["decoded_tokens"] and not since["prefill_tokens"]:
            return
        probes = since["hits"] + since["misses"]
        logger.info(
            "kvdrive: %d sequences, %d tokens decoded (%d sparse), attended %.1f%% of stored, hit rate %s, "
            "fetched %.1f MiB, HBM %.0f%%, DRAM %.0f%% used",
            len(self.engine.book.active()),
            since["decoded_tokens"],
            since["sparse_tokens"],
            100 * since["attended_entries"] / max(1, since["stored_entries"]),
            f"{100 * since['hits'] / probes:.1f}%" if probes else "-",
            since["bytes_fetched"] / 2**20,
            100 * self.engine.hbm.n_used / max(1, self.engine.hbm.n_slots),
            100 * self.engine.dram.n_used / max(1, self.engine.dram.n_blocks),
        )


class _Metrics:
    """Prometheus: gauges for what is held, counters for what only grows. The README lists every name."""

    COUNTERS: ClassVar = {
        "decoded_tokens": "Tokens decoded.",
        "dense_tokens": "Tokens decoded with everything attended.",
        "sparse_tokens": "Tokens decoded with a selection attended.",
        "prefill_tokens": "Prompt tokens stored.",
        "attended_entries": "Tokens attended while decoding, over layers and KV heads.",
        "stored_entries": "Tokens that full attention would have attended, over layers and KV heads.",
        "hits": "Selected chunks that were resident in HBM.",
        "misses": "Selected chunks that had to be fetched.",
        "evictions": "Resident chunks that gave way.",
        "seals": "Segments indexed.",
        "bytes_fetched": "Bytes DRAM to HBM for misses.",
        "bytes_placed": "Bytes DRAM to HBM for steady zones.",
        "bytes_appended": "Bytes of new tokens written to HBM.",
        "bytes_home_written": "Bytes of new tokens written to DRAM.",
        "bytes_streamed": "Bytes of DRAM read by prefill.",
    }
    GAUGES: ClassVar = {
        "hbm_used_bytes": "Bytes held in the HBM arena.",
        "hbm_total_bytes": "Size of the HBM arena.",
        "dram_used_bytes": "Bytes held in DRAM.",
        "dram_total_bytes": "Size of the DRAM home.",
        "sequences": "Requests that hold KV.",
        "hit_rate": "Share of selected chunks found in HBM since the start.",
    }

    def __init__(self):
        from prometheus_client import Counter, Gauge

        self._counters = {name: Counter(f"sglang:kvdrive_{name}", text) for name, text in self.COUNTERS.items()}
        self._gauges = {
            name: Gauge(f"sglang:kvdrive_{name}", text, multiprocess_mode="mostrecent") for name, text in self.GAUGES.items()
        }
        self._seen = dict.fromkeys(self.COUNTERS, 0)

    def update(self, engine: KVDriveEngine) -> None:
        stats = engine.stats
        for name, counter in self._counters.items():
            value = getattr(stats, name)
            counter.inc(value - self._seen[name])
            self._seen[name] = value
        values = {
            "hbm_used_bytes": engine.hbm.used_bytes,
            "hbm_total_bytes": engine.hbm.total_bytes,
            "dram_used_bytes": engine.dram.used_bytes,
            "dram_total_bytes": engine.dram.total_bytes,
            "sequences": len(engine.book.active()),
            "hit_rate": stats.hit_rate or 0.0,
        }
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
