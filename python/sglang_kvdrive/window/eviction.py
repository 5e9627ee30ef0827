"""What a resident chunk is worth: the three eviction policies. A policy is a priority and a rule for the stamp."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvdrive.config import EVICTIONS


@dataclass(frozen=True)
class Eviction:
    """How a window chooses its victims.

    `stamps_hits`: a hit renews the stamp (age since last use) instead of only an arrival (age since fetch).
    `by_score`: the current selector score of a chunk's group decides, the stamp only breaks ties. Scores of earlier
    steps are worse than random (measured), so nothing older than this step's scores is ever used.
    """

    name: str
    by_score: bool
    stamps_hits: bool


_POLICIES = {
    "lookahead": Eviction("lookahead", by_score=True, stamps_hits=True),
    "lru": Eviction("lru", by_score=False, stamps_hits=True),
    "fifo": Eviction("fifo", by_score=False, stamps_hits=False),
}
assert tuple(_POLICIES) == EVICTIONS


def eviction_policy(name: str) -> Eviction:
    return _POLICIES[name]
