"""A decoder with random weights whose attention runs through an engine: outputs feed back, tokens come out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import KVLayout

from kvsupport.full_attention import full_attention


@dataclass
class Generation:
    """What one sequence produced: token ids and the logits each was taken from."""

    ids: list[int]
    logits: torch.Tensor


class TinyDecoder:
    """RMSNorm, rotary attention, gated projection, residual; greedy."""

    def __init__(self, layout: KVLayout, *, vocabulary: int = 211, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        dim = layout.n_q_heads * layout.head_dim

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64) / rows**0.5

        self.layout = layout
        self.scale = layout.head_dim**-0.5
        self.embedding = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64)
        kv_dim = layout.n_kv_heads * layout.head_dim
        self.layers = [
            {"q": weights(dim, dim) * 2, "k": weights(dim, kv_dim) * 2, "v": weights(dim, kv_dim), "o": weights(dim, dim),
             "up": weights(dim, 2 * dim), "down": weights(dim, dim)}
            for _ in range(layout.n_layers)
        ]  # fmt: skip
        self._cast: dict[torch.dtype, tuple] = {}

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """Logits `[T, vocabulary]`. `attend(layer, q, k, v)` takes and returns `[T, H, D]`."""
        return self._forward(ids, positions, attend, self.layout.dtype)

    def _forward(self, ids, positions, attend, dtype):
        embedding, layers = self._weights(dtype)
        x = embedding[ids]
        for layer, w in enumerate(layers):
            h = _norm(x)
            q, k, v = (self._heads(h @ w[name]) for name in "qkv")
            x = x + attend(layer, _rotate(q, positions), _rotate(k, positions), v).flatten(1).to(dtype) @ w["o"]
            gate, up = (_norm(x) @ w["up"]).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ w["down"]
        return _norm(x) @ embedding.T

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.layout.head_dim)

    def _weights(self, dtype: torch.dtype) -> tuple:
        if dtype not in self._cast:
            layers = [{name: w.to(dtype) for name, w in layer.items()} for layer in self.layers]
            self._cast[dtype] = (self.embedding.to(dtype), layers)
        return self._cast[dtype]

    def reference(self, prompt: list[int], n_new: int) -> Generation:
        """Greedy generation with full attention in float64, the whole sequence at once for every token."""
        ids, logits = list(prompt), []
        for _ in range(n_new):
            t = torch.tensor(ids)
            attend = lambda _, q, k, v: full_attention(q, k, v, self.scale)  # noqa: E731
            logits.append(self._forward(t, torch.arange(len(ids)), attend, torch.float64)[-1])
            ids.append(int(logits[-1].argmax()))
        return Generation(ids[len(prompt) :], torch.stack(logits))

    def prefill(self, engine: KVDriveEngine, seq_ids: list[int], pieces: list[list[int]]) -> torch.Tensor:
        """One forward pass. Returns the logits of the last token of each piece."""
        prefix = [int(engine.book.n_tokens[s]) for s in seq_ids]
        lengths = [len(p) for p in pieces]
        for seq_id, done, length in zip(seq_ids, prefix, lengths, strict=True):
            engine.extend(seq_id, done + length)
        plan = engine.begin_prefill(seq_ids, prefix, lengths)
        positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, lengths, strict=True)])
        ids = torch.tensor([i for p in pieces for i in p])
        logits = self.forward(ids, positions, lambda layer, q, k, v: engine.prefill(plan, layer, q, k, v, self.scale))
        return logits[torch.tensor(lengths).cumsum(0) - 1]

    def step(self, engine: KVDriveEngine, seq_ids: list[int], ids: list[int]) -> torch.Tensor:
        """One decode step. Returns logits `[B, vocabulary]`."""
        assert engine.can_step(seq_ids)
        positions = engine.book.n_tokens[torch.tensor(seq_ids)].clone()
        for seq_id, n in zip(seq_ids, positions.tolist(), strict=True):
            engine.extend(seq_id, n + 1)
        plan = engine.begin_step(torch.tensor(seq_ids))
        return self.forward(torch.tensor(ids), positions, lambda layer, q, k, v: engine.decode(plan, layer, q, k, v, self.scale))

    def generate(self, engine: KVDriveEngine, prompts: dict[int, list[int]], n_new: int, piece: int) -> dict[int, Generation]:
        """Prefill all prompts in pieces, then decode them as one batch."""
        last: dict[int, torch.Tensor] = {}
        for seq_id, prompt in prompts.items():
            engine.begin(seq_id)
            for at in range(0, len(prompt), piece):
                last[seq_id] = self.prefill(engine, [seq_id], [prompt[at : at + piece]])[0]
        seq_ids = list(prompts)
        logits = [torch.stack([last[s] for s in seq_ids])]
        for _ in range(n_new - 1):
            logits.append(self.step(engine, seq_ids, logits[-1].argmax(-1).tolist()))
        by_sequence = torch.stack(logits, dim=1)
        return {s: Generation(by_sequence[i].argmax(-1).tolist(), by_sequence[i]) for i, s in enumerate(seq_ids)}


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
