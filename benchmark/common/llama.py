"""A Llama-type model on top of the engine, without SGLang: measure selections on a real model in one process.

Prefill is exact and its K and V can be kept, so that many settings decode from the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.layout import BLOCK_TOKENS, KVLayout, ceil_div
from transformers import AutoConfig


@dataclass(frozen=True)
class Prompt:
    """K and V of a prompt `[L, T, H_kv, D]` after RoPE, and the logits `[V]` after its last token."""

    keys: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor


class Llama:
    """Weights of a Llama checkpoint; `dtype` is the dtype of weights, K and V."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16):
        self.config = config = AutoConfig.from_pretrained(folder)
        self.weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.dtype = dtype
        self.n_layers, self.n_q, self.n_kv = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
        self.dim = config.hidden_size // self.n_q
        theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        self.inverse = 1.0 / theta ** (torch.arange(0, self.dim, 2).float() / self.dim)

    def layout(self, chunk_size: int) -> KVLayout:
        return KVLayout(self.n_layers, self.n_q, self.n_kv, self.dim, self.dtype, chunk_size)

    def forward(self, ids: torch.Tensor, first: int, attend) -> torch.Tensor:
        """Hidden state of the last token. `attend(layer, q, k, v)` takes and returns `[T, heads, D]`."""
        hidden = self.weights["model.embed_tokens.weight"][ids]
        angles = torch.outer(torch.arange(first, first + ids.numel()).float(), self.inverse)
        turn = torch.cat([angles, angles], -1)
        cos, sin = turn.cos().unsqueeze(1), turn.sin().unsqueeze(1)
        for layer in range(self.n_layers):
            normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (self._project(normed, layer, name) for name in ("q_proj", "k_proj", "v_proj"))
            q, k = (_rotate(x, cos, sin).to(self.dtype) for x in (q, k))
            mixed = attend(layer, q, k, v).flatten(1)
            hidden = hidden + mixed @ self.weights[f"model.layers.{layer}.self_attn.o_proj.weight"].T
            hidden = hidden + self._feed_forward(
                self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight"), layer
            )
        return self._norm(hidden[-1:], "model.norm.weight")[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return (head @ hidden).float()

    def read(self, ids: torch.Tensor, piece: int = 2048) -> Prompt:
        """Exact prefill; keeps K and V."""
        shape = (self.n_layers, ids.numel(), self.n_kv, self.dim)
        keys, values = torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype)
        engine = make_engine(self, KVDriveConfig(dense_below=0), ids.numel() + 1)
        engine.begin(0)
        for start in range(0, ids.numel(), piece):
            part = ids[start : start + piece]
            engine.extend(0, start + part.numel())
            plan = engine.begin_prefill([0], [start], [part.numel()])

            def attend(layer, q, k, v, plan=plan, start=start):
                keys[layer, start : start + k.shape[0]], values[layer, start : start + k.shape[0]] = k, v
                return engine.prefill(plan, layer, q, k, v, self.dim**-0.5)

            hidden = self.forward(part, start, attend)
        return Prompt(keys, values, self.logits(hidden))

    def decoder(self, prompt: Prompt, config: KVDriveConfig, n_new: int) -> Decoder:
        return Decoder(self, prompt, config, n_new)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return scaled.to(self.dtype) * self.weights[name]

    def _project(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return (x @ self.weights[f"model.layers.{layer}.self_attn.{name}.weight"].T).view(x.shape[0], -1, self.dim)

    def _feed_forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        gate, up, down = (self.weights[f"model.layers.{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


class Decoder:
    """Teacher-forced or free decoding of one sequence from a kept prompt."""

    def __init__(self, model: Llama, prompt: Prompt, config: KVDriveConfig, n_new: int):
        self.model = model
        n_tokens = prompt.keys.shape[1]
        self.engine = make_engine(model, config, n_tokens + n_new + 1)
        self.engine.begin(0)
        self.engine.extend(0, n_tokens)
        plan = self.engine.begin_prefill([0], [0], [n_tokens])
        for layer in range(model.n_layers):
            self.engine.transfer.write_home(layer, plan.rows, plan.inside, prompt.keys[layer], prompt.values[layer])

    def step(self, token: int) -> torch.Tensor:
        """Feed one token; logits `[V]` of the next."""
        position = int(self.engine.book.n_tokens[0])
        self.engine.extend(0, position + 1)
        plan = self.engine.begin_step(torch.tensor([0]))

        def attend(layer, q, k, v):
            return self.engine.decode(plan, layer, q, k, v, self.model.dim**-0.5)

        return self.model.logits(self.model.forward(torch.tensor([token]), position, attend))


def make_engine(model: Llama, config: KVDriveConfig, max_tokens: int) -> KVDriveEngine:
    layout = model.layout(config.chunk_size)
    config = config.resolve(dense_below=config.dense_below or 0)
    slots = max(config.slots_of(layout, max_tokens).total, config.dense_slots(layout, min(config.dense_below, max_tokens)))
    sizes = {
        "hbm_bytes": slots * layout.slot_bytes,
        "dram_bytes": (ceil_div(max_tokens, BLOCK_TOKENS) + 1) * layout.block_bytes,
        "dense_below": min(config.dense_below, max_tokens),
    }
    return KVDriveEngine(layout, config.resolve(**sizes), n_sequences=1, max_tokens=max_tokens)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x.float() * cos + turned.float() * sin
