"""Keys and values of a real text, prefilled once per model, so that a benchmark of decoding starts in seconds.

The model is stretched beyond its own 8K tokens by yarn rope scaling: the timings are real, the text it would write is not.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import torch
from kvdrive_kernels.native import cache_dir
from safetensors import safe_open
from safetensors.torch import save_file

TOKENS = 32768
NEW_TOKENS = 512
MAX_TOKENS = TOKENS + NEW_TOKENS


def rope_override(model: Path) -> str:
    """`--json-model-override-args` that stretches the model to `MAX_TOKENS`."""
    config = json.loads((model / "config.json").read_text())
    original = config["max_position_embeddings"]
    rope = {**config["rope_parameters"], "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    return json.dumps({"rope_parameters": rope, "max_position_embeddings": MAX_TOKENS})


def text_ids(model: Path) -> list[int]:
    """`MAX_TOKENS` token ids of reference prose."""
    from transformers import AutoTokenizer

    text = "\n\n".join(pydoc_data.topics.topics.values())
    return AutoTokenizer.from_pretrained(model)(text[: 8 * MAX_TOKENS])["input_ids"][:MAX_TOKENS]


def ensure_kit(model: Path) -> Path:
    """Path of the kit: `keys` and `values` `[L, T, H_kv, D]` in bf16, `ids` `[MAX_TOKENS]`. Made by kvdrive's exact prefill."""
    path = cache_dir() / "bench" / f"{model.name}-{TOKENS}.safetensors"
    if not path.is_file():
        from benchmark.common.runner import KVDRIVE, Runner

        print(f"prefilling {TOKENS} tokens once for {path} (some minutes)", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = text_ids(model)
        with Runner(model, (*KVDRIVE, "--kvdrive-dram", "3GiB"), dtype="float32", capacity=MAX_TOKENS) as runner:
            runner.call("prefill", ids, TOKENS, 2048)
            runner.call("save_kit", str(path), ids)
    return path


def save_kit(path: Path, keys: torch.Tensor, values: torch.Tensor, ids: list[int]) -> None:
    partial = path.with_suffix(".partial")
    tensors = {"keys": keys.bfloat16().contiguous(), "values": values.bfloat16().contiguous(), "ids": torch.tensor(ids)}
    save_file(tensors, partial)
    partial.replace(path)


def load_kit(path: Path) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Keys, values, ids; mapped from the file, not read."""
    with safe_open(path, "pt") as file:
        return file.get_tensor("keys"), file.get_tensor("values"), file.get_tensor("ids").tolist()
