"""The selection rule, slow and obvious: lists, loops and float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Group:
    """One group of the index of one (layer, KV head)."""

    centroid: np.ndarray
    members: list[int]


def log_scores(q: np.ndarray, vectors: np.ndarray, scale: float, lse: np.ndarray) -> np.ndarray:
    """Log of the softmax mass of each vector, summed over the query heads q `[G, D]`."""
    logits = q @ vectors.T * scale - lse[:, None]
    top = logits.max(axis=0)
    return top + np.log(np.exp(logits - top).sum(axis=0))


def log_denominators(q: np.ndarray, groups: list[Group], scale: float) -> np.ndarray:
    """`[G]` log of the softmax denominator over the groups that exist."""
    logits = q @ np.stack([g.centroid for g in groups if g.members]).T * scale
    top = logits.max(axis=1)
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=1))


def walk(scores: list[float], members: list[list[int]], n_wanted: int, chunk_score) -> list[int]:
    """Groups best first (ties to the lower group), until `n_wanted` chunks are there; the last group gives its best ones.

    Args:
        chunk_score: score of a chunk id.
    """
    chosen: list[int] = []
    for group in sorted((g for g in range(len(scores)) if members[g]), key=lambda g: (-scores[g], g)):
        left = n_wanted - len(chosen)
        if left <= 0:
            break
        if len(members[group]) <= left:
            chosen += members[group]
        else:
            chosen += sorted(members[group], key=lambda c: -chunk_score(c))[:left]
    return chosen


def select(q: np.ndarray, groups: list[Group], chunk_means: dict[int, np.ndarray], n_wanted: int, scale: float) -> list[int]:
    """Chunks that one (layer, KV head) attends for the queries q `[G, D]` of its group."""
    lse = log_denominators(q, groups, scale)
    scores = log_scores(q, np.stack([g.centroid for g in groups]), scale, lse)
    return walk(
        scores.tolist(),
        [g.members for g in groups],
        n_wanted,
        lambda chunk: float(log_scores(q, chunk_means[chunk][None], scale, lse)[0]),
    )
