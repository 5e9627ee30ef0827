"""KVDriveConfig: what the user chose, checked once, never mutated. `resolve` returns a copy without "auto"."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace

from sglang_kvdrive.errors import ConfigError
from sglang_kvdrive.layout import BLOCK_TOKENS, CHUNK_SIZES, KVLayout, align_up, ceil_div

AUTO = "auto"
EVICTIONS = ("lookahead", "lru", "fifo")
DEFAULT_BUDGET_FLOOR = 512

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
               "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
               "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_size(text: str, *, what: str) -> int | str:
    """Bytes of a size such as `2GiB`, `512MiB`, `8GB`; `auto` stays `auto`.

    K, M, G and T are powers of 1024 (as KiB …), KB, MB, GB and TB powers of 1000. A bare number is refused.

    Raises:
        ConfigError: not a size, or not above zero.
    """
    spelling = f"write a size with a unit such as 512MiB or 2GiB, or {AUTO}"
    if text.strip().lower() == AUTO:
        return AUTO
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ConfigError(f"{what} is {text!r}, which is not a size: {spelling}")
    if not match[2]:
        raise ConfigError(f"{what} is {text!r}, a number without a unit: {spelling}")
    n_bytes = int(float(match[1]) * _SIZE_UNITS[match[2].upper()])
    if n_bytes < 1:
        raise ConfigError(f"{what} is {text!r}, it must be above 0: {spelling}")
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """`48.0 MiB (50,331,648 bytes)`: short for people, exact for the next command line."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{n_bytes} B" if unit == "B" else f"{value:.1f} {unit} ({n_bytes:,} bytes)"


@dataclass(frozen=True)
class Budget:
    """How many entries a decode step may attend per (layer, KV head), beside sink, local and pending tokens.

    Either a share of the tokens (`ratio`, never below `floor_entries`) or a fixed number (`entries`).
    """

    ratio: float | None = 0.0625
    entries: int | None = None
    floor_entries: int = DEFAULT_BUDGET_FLOOR

    @classmethod
    def parse(cls, text: str, *, floor_entries: int = DEFAULT_BUDGET_FLOOR, what: str = "--kvdrive-budget") -> Budget:
        """Read `6.25%` or `2048tok`.

        Raises:
            ConfigError: no unit, zero, above 100%, or not a number.
        """
        spelling = "write a share such as 6.25% (above 0%, up to 100%) or a number of tokens such as 2048tok (at least 1tok)"
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|tok)\s*", text)
        if match is None:
            bare = re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", text) is not None
            fault = "a number without a unit" if bare else "not a budget"
            raise ConfigError(f"{what} is {text!r}, {fault}: {spelling}")
        number = float(match[1])
        if match[2] == "%":
            if not 0 < number <= 100:
                raise ConfigError(f"{what} is {text!r}, outside the allowed range: {spelling}")
            return cls(ratio=number / 100, floor_entries=floor_entries)
        if number < 1 or number != int(number):
            raise ConfigError(f"{what} is {text!r}, not a whole number of tokens above 0: {spelling}")
        return cls(ratio=None, entries=int(number), floor_entries=0)

    def budget_entries(self, n_tokens: int) -> int:
        """K at `n_tokens` stored tokens: `max(floor, ratio * n)`, or the fixed number."""
        if self.entries is not None:
            return self.entries
        return max(self.floor_entries, ceil_div(max(1, round(self.ratio * 10**6)) * n_tokens, 10**6))

    def __str__(self) -> str:
        if self.entries is not None:
            return f"{self.entries}tok"
        return f"{self.ratio * 100:g}%" + (f" (at least {self.floor_entries}tok)" if self.floor_entries else "")


@dataclass(frozen=True)
class Preset:
    """A named bundle of settings, and where it was measured."""

    budget: Budget
    chunk_size: int
    measured_on: str


MEASURED_ON = "SmolLM2-135M-Instruct (head dim 64): facts in prompts of 2K to 4K tokens, with 512 tokens attended"
PRESETS = {
    "balanced": Preset(Budget(ratio=0.0625), 2, MEASURED_ON),
    "paper": Preset(Budget(ratio=0.0625), 4, MEASURED_ON),
    "fast": Preset(Budget(ratio=0.015625), 4, MEASURED_ON),
    "accurate": Preset(Budget(ratio=0.125), 1, MEASURED_ON),
}
DEFAULT_PRESET = "balanced"
"""Chunks of 2: the index is as large as with the paper's 4, and it finds clearly more at the same budget."""


@dataclass(frozen=True)
class SlotNeed:
    """HBM slots that one sequence holds, over all layers and KV heads."""

    sink: int
    zone: int
    window: int
    index: int

    @property
    def total(self) -> int:
        return self.sink + self.zone + self.window + self.index


@dataclass(frozen=True, kw_only=True)
class KVDriveConfig:
    """Settings of one engine.

    Args:
        preset: name the budget and chunk size came from, for display.
        budget: attended entries per (layer, KV head) beside sink, local and pending tokens.
        chunk_size: C, tokens per chunk: 1, 2, 4 or 8.
        sink_tokens: first tokens, always attended; rounded up to whole chunks.
        local_tokens: most recent tokens, always attended.
        pending_tokens: generated tokens that wait for the next seal, always attended (RetroInfer waits for 1,024).
        segment_tokens: prompt tokens sealed at a time (RetroInfer's segment).
        tokens_per_group: index tokens per k-means group (the paper uses about 14.6, RetroInfer 16).
        groups_per_page: groups of one index page; an index page is the unit in which the index grows.
        kmeans_iterations: Lloyd steps per segment, the last one with unnormalised centroids.
        window_multiple: slots of a window in multiples of the budget, at least 1 (the paper's xN).
        eviction: lookahead (current selector score), lru or fifo.
        dense_below: sequences whose prompt and generation stay up to this many tokens are served exactly; None = auto.
        hbm_bytes: size of the HBM arena; None = auto.
        dram_bytes: size of the DRAM home; None = auto.
        in_place: attend chunks where they lie in DRAM; HBM holds the index only (a cpu has no second memory to fill).

    Raises:
        ConfigError: with every reason at once.
    """

    preset: str = DEFAULT_PRESET
    budget: Budget = field(default_factory=lambda: PRESETS[DEFAULT_PRESET].budget)
    chunk_size: int = PRESETS[DEFAULT_PRESET].chunk_size
    sink_tokens: int = 4
    local_tokens: int = 64
    pending_tokens: int = 256
    segment_tokens: int = 8192
    tokens_per_group: int = 16
    groups_per_page: int = 16
    kmeans_iterations: int = 10
    window_multiple: float = 2.0
    eviction: str = "lookahead"
    dense_below: int | None = None
    hbm_bytes: int | None = None
    dram_bytes: int | None = None
    in_place: bool = False

    def __post_init__(self) -> None:
        reasons = list(self._faults())
        if reasons:
            raise ConfigError(reasons)

    def _faults(self):
        if self.chunk_size not in CHUNK_SIZES:
            allowed = ", ".join(map(str, CHUNK_SIZES))
            yield f"--kvdrive-chunk-size is {self.chunk_size}, it must be one of {allowed}"
        if not 1 <= self.window_multiple <= 64:
            yield (f"--kvdrive-window is {self.window_multiple:g}, it must be between 1 and 64: "
                   "a window below the budget cannot hold what one step attends")  # fmt: skip
        if self.eviction not in EVICTIONS:
            yield f"--kvdrive-eviction is {self.eviction!r}, it must be one of {', '.join(EVICTIONS)}"
        if not 0 <= self.sink_tokens <= 1024:
            yield f"--kvdrive-sink-tokens is {self.sink_tokens}, it must be between 0 and 1024"
        if not 1 <= self.local_tokens <= 8192:
            yield (f"--kvdrive-local-tokens is {self.local_tokens}, it must be between 1 and 8192: "
                   "the newest token is always attended")  # fmt: skip
        if self.dense_below is not None and self.dense_below < 0:
            yield f"--kvdrive-dense-below is {self.dense_below}, it must be at least 0, or {AUTO}"
        if self.tokens_per_group < 1 or self.groups_per_page < 1:
            sizes = f"tokens_per_group is {self.tokens_per_group}, groups_per_page is {self.groups_per_page}"
            yield f"{sizes}: both must be at least 1"
            return
        for name in ("pending_tokens", "segment_tokens"):
            if getattr(self, name) < 1 or getattr(self, name) % self.page_tokens:
                yield f"{name} is {getattr(self, name)}, it must be a multiple of an index page ({self.page_tokens} tokens)"
        whole_chunks = self.chunk_size not in CHUNK_SIZES or self.tokens_per_group % self.chunk_size == 0
        if not whole_chunks or self.kmeans_iterations < 1:
            yield (f"tokens_per_group is {self.tokens_per_group} and kmeans_iterations {self.kmeans_iterations}: "
                   f"whole chunks of {self.chunk_size} tokens, and at least 1")  # fmt: skip

    # -- derived sizes -------------------------------------------------------------------------------------------

    @property
    def sink_chunks(self) -> int:
        return ceil_div(self.sink_tokens, self.chunk_size)

    @property
    def zone_chunks(self) -> int:
        """Chunks of the local and pending zone of an indexed sequence: room for one more than a seal leaves behind."""
        return ceil_div(self.local_tokens + self.pending_tokens, self.chunk_size) + 1

    @property
    def page_tokens(self) -> int:
        return self.groups_per_page * self.tokens_per_group

    def sealed_end(self, n_tokens: int) -> int:
        """First token after the index region when `n_tokens` tokens are sealed as far as possible."""
        begin = self.sink_chunks * self.chunk_size
        return max(begin, (n_tokens - self.local_tokens) // self.chunk_size * self.chunk_size)

    def budget_chunks(self, n_tokens: int) -> int:
        """K in whole chunks at `n_tokens` stored tokens, rounded up."""
        return ceil_div(self.budget.budget_entries(n_tokens), self.chunk_size)

    def window_chunks(self, n_tokens: int) -> int:
        """Slots of the window of one (layer, KV head) at `n_tokens`; never more than there are chunks to hold."""
        n_indexed = (self.sealed_end(n_tokens) - self.sink_chunks * self.chunk_size) // self.chunk_size
        return min(int(self.window_multiple * self.budget_chunks(n_tokens)), n_indexed)

    def n_index_pages(self, n_tokens: int) -> int:
        """Index pages of a sequence of `n_tokens`: segments and generated seals are whole pages, only one may be cut short."""
        return ceil_div(self.sealed_end(n_tokens) - self.sink_chunks * self.chunk_size, self.page_tokens)

    def page_slots(self, layout: KVLayout) -> int:
        """HBM slots that hold the centroids of one index page of one (layer, KV head)."""
        return ceil_div(self.groups_per_page, layout.vectors_per_slot)

    def slots_of(self, layout: KVLayout, n_tokens: int) -> SlotNeed:
        """HBM slots that an indexed sequence of `n_tokens` tokens needs."""
        resident = (0, 0, 0) if self.in_place else (self.sink_chunks, self.zone_chunks, self.window_chunks(n_tokens))
        per_pair = (*resident, self.n_index_pages(n_tokens) * self.page_slots(layout))
        return SlotNeed(*(n * layout.n_pairs for n in per_pair))

    def dense_slots(self, layout: KVLayout, n_tokens: int) -> int:
        """HBM slots of a sequence that attends everything: all its tokens in whole home blocks, or none in place."""
        return 0 if self.in_place else align_up(n_tokens, BLOCK_TOKENS) // layout.chunk_size * layout.n_pairs

    def attended_at_most(self, n_tokens: int) -> int:
        """Entries that one step attends per (layer, KV head) at `n_tokens`, everything counted."""
        steady = self.sink_chunks * self.chunk_size + self.local_tokens + self.pending_tokens + self.chunk_size
        return min(n_tokens, self.budget_chunks(n_tokens) * self.chunk_size + steady)

    def resolve(self, **values) -> KVDriveConfig:
        """A copy with the given fields set (the engine's and the adapter's way to fill every None)."""
        return replace(self, **values)

    def as_dict(self) -> dict:
        """Plain values for JSON."""
        return {**asdict(self), "budget": str(self.budget)}


def config_from_flags(
    *,
    preset: str = DEFAULT_PRESET,
    budget: str | None = None,
    budget_floor: int | None = None,
    chunk_size: int | None = None,
    window: float = 2.0,
    eviction: str = "lookahead",
    sink_tokens: int = 4,
    local_tokens: int = 64,
    dense_below: str = AUTO,
    hbm: str = AUTO,
    dram: str = AUTO,
) -> KVDriveConfig:
    """Build a config from the spelling of the command line; what is not given comes from the preset.

    Raises:
        ConfigError: with the reasons of every flag at once.
    """
    reasons: list[str] = []

    def attempt(function, *args, default=None, **kwargs):
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            reasons.extend(error.reasons)
            return default

    chosen = PRESETS.get(preset)
    if chosen is None:
        reasons.append(f"--kvdrive-preset is {preset!r}, it must be one of {', '.join(PRESETS)}")
        chosen = PRESETS[DEFAULT_PRESET]
    floor = DEFAULT_BUDGET_FLOOR if budget_floor is None else budget_floor
    if floor < 0:
        reasons.append(f"--kvdrive-budget-floor is {floor}, it must be at least 0 tokens")
    if budget is None:
        chosen_budget = replace(chosen.budget, floor_entries=max(floor, 0))
    else:
        chosen_budget = attempt(Budget.parse, budget, floor_entries=max(floor, 0), default=chosen.budget)
    sizes = {name: attempt(parse_size, text, what=f"--kvdrive-{name}") for name, text in (("hbm", hbm), ("dram", dram))}
    dense = attempt(_parse_dense_below, dense_below)
    settings = dict(
        preset=preset if preset in PRESETS else DEFAULT_PRESET,
        budget=chosen_budget,
        chunk_size=chosen.chunk_size if chunk_size is None else chunk_size,
        window_multiple=window,
        eviction=eviction,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        dense_below=dense,
        hbm_bytes=None if sizes["hbm"] == AUTO else sizes["hbm"],
        dram_bytes=None if sizes["dram"] == AUTO else sizes["dram"],
    )
    config = attempt(KVDriveConfig, **settings)
    if reasons:
        raise ConfigError(reasons)
    return config


def _parse_dense_below(text: str) -> int | None:
    text = str(text).strip().lower()
    if text == AUTO:
        return None
    if not text.isdecimal():
        raise ConfigError(f"--kvdrive-dense-below is {text!r}, it must be a number of tokens from 0 up, or {AUTO}")
    return int(text)
