"""Plain PyTorch twin of `select_chunks`."""

from __future__ import annotations

import torch

from kvdrive_kernels.attend_slots.reference import cap_logits
from kvdrive_kernels.fill_chunks.reference import fill_chunks
from kvdrive_kernels.mean_keys.reference import mean_keys
from kvdrive_kernels.score_groups.reference import score_groups


def select_chunks(
    q: torch.Tensor,
    arena: torch.Tensor,
    slots: torch.Tensor,
    begins: torch.Tensor,
    sizes: torch.Tensor,
    members: torch.Tensor,
    pages: torch.Tensor,
    n_pages: torch.Tensor,
    home: torch.Tensor,
    layer: int,
    blocks: torch.Tensor,
    seq_ids: torch.Tensor,
    n_wanted: torch.Tensor,
    shape: tuple[int, int],  # noqa: ARG001 - saves the native version from looking
    scale: float,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score the groups of each sequence's index, walk them best first, stop at exactly the budget.

    The group that does not fit whole is cut by the mean keys of its chunks, read at home.

    Args:
        q: `[B, H_kv, G, D]`.
        arena: `[S, 2, C, D]`, same dtype; a slot holds 2C centroids.
        slots: `[P, H_kv, n]` int32, the slots that hold the centroids of each index page, of one layer as the next three.
        begins, sizes: `[P, H_kv, E]` int32, the E groups of each page: first member (counted through the members of all
            pages of the sequence) and number of members, 0 = no such group.
        members: `[P, H_kv, M]` int32, chunk ids.
        pages: `[sequences, n]` int64 and n_pages: `[sequences]` int64, index pages of every sequence.
        home: `[blocks, L, H_kv, chunks_per_block, 2, C, D]`, layer and blocks `[sequences, n]`: where chunks lie.
        seq_ids: `[B]` int64, rows of `pages` and `blocks`.
        n_wanted: `[B]` int64, chunks to choose, from 1 to the number of indexed chunks.
        shape: K, the largest `n_wanted`, and N_g, groups of the longest of these sequences.
        scale: factor on q·k.
        logit_cap: as in `attend_home`.

    Returns:
        chunk_ids, group_ids `[B, H_kv, K]` int32, ranked best first, -1 beyond `n_wanted`; a group's id is its position in
        the pages of its sequence. scores `[B, H_kv, N_g]` fp32, -1 where empty (`score_groups`).
    """
    n_heads, dim = q.shape[1], q.shape[3]
    n_layers, per_block, chunk_size = home.shape[1], home.shape[3], home.shape[5]
    counts = n_pages[seq_ids]
    mine = pages[seq_ids, : int(counts.max())]
    present = torch.arange(mine.shape[1]) < counts.unsqueeze(1)

    def heads_first(pool: torch.Tensor) -> torch.Tensor:
        return pool[mine].transpose(1, 2).flatten(2)

    vectors = arena.view(arena.shape[0], -1, dim)[heads_first(slots).long()]
    by_page = vectors.view(*vectors.shape[:2], mine.shape[1], -1, dim)[:, :, :, : sizes.shape[2]]
    present_sizes = (sizes[mine] * present[:, :, None, None]).transpose(1, 2).flatten(2)
    scores, lse = score_groups(q, by_page.flatten(2, 3), present_sizes, scale, logit_cap)

    def chunk_scores(candidates: torch.Tensor) -> torch.Tensor:
        """Like a group's score, with the chunk's own mean key, in the log so that nothing overflows."""
        ids = candidates.clamp_min(0).long()
        block = blocks[seq_ids.view(-1, 1, 1), ids // per_block]
        heads = torch.arange(n_heads).view(1, -1, 1)
        rows = ((block * n_layers + layer) * n_heads + heads) * per_block + ids % per_block
        means = mean_keys(home.view(-1, 2, chunk_size, dim)[rows, 0])
        logits = torch.einsum("bhgd,bhxd->bhgx", q.float(), means) * scale
        logits = cap_logits(logits, logit_cap)
        return torch.logsumexp(logits - lse.unsqueeze(-1), dim=2)

    chunk_ids, group_ids = fill_chunks(scores, heads_first(begins), present_sizes, heads_first(members), n_wanted, chunk_scores)
    return chunk_ids, group_ids, scores
