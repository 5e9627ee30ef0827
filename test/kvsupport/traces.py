"""Read a decode trace (`test/fixtures/README.md` says what is in it)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class Trace:
    """Chunk ids `[layer, kv_head, step, M]`, best first; the first `n_selected` columns are the selection."""

    ids: np.ndarray
    n_selected: int

    @property
    def n_steps(self) -> int:
        return self.ids.shape[2]

    @property
    def n_chunks(self) -> int:
        return int(self.ids.max()) + 1


def read_trace(name: str = "mini_opt_4096") -> Trace:
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return Trace(arrays["ids"].astype(np.int64), json.loads(str(arrays["meta"]))["selected_chunks"])
