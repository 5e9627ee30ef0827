"""Plain PyTorch twin of `rotate_heads`."""

from __future__ import annotations

import torch


def rotate_heads(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, head_dim: int, halves: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (Su et al., 2021); every product and sum is rounded to the dtype, as SGLang's own is.

    Args:
        q: `[T, H_q * D]`, k: `[T, H_kv * D]`; rows may be apart.
        positions: `[T]` int64.
        cos_sin: `[P, R]`, cosines of the R / 2 angles of a position, then their sines; same dtype. R <= D.
        head_dim: D.
        halves: the partner of dimension i is i + R / 2 (NeoX), else neighbours turn together (GPT-J).

    Returns:
        q and k, turned, contiguous.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        heads = rows.reshape(rows.shape[0], -1, head_dim)
        part, rest = heads[..., : cos_sin.shape[1]], heads[..., cos_sin.shape[1] :]
        a, b = part.chunk(2, dim=-1) if halves else (part[..., ::2], part[..., 1::2])
        first, second = a * cos - b * sin, b * cos + a * sin
        part = torch.cat([first, second], -1) if halves else torch.stack([first, second], -1).flatten(-2)
        return torch.cat([part, rest], -1).reshape(rows.shape)

    return turned(q), turned(k)
