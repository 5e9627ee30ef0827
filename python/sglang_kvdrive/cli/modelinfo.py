"""What a model's config.json says, without downloading or loading the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_kvdrive.errors import ConfigError

CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
"""SGLang's names for the context length, in its order (`get_context_length`)."""


@dataclass(frozen=True)
class ModelInfo:
    """The part of a config that KV memory depends on."""

    name: str
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    native_context: int
    rope_type: str


def read_model_info(model: str) -> ModelInfo:
    """Read a model folder, a config.json, the name `smollm2`, or a Hugging Face name that is already in the local cache.

    Raises:
        ConfigError: not found, not JSON, or a model KVDrive does not support.
    """
    path = _config_path(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a readable config.json: it holds a {type(config).__name__}, not an object")
    text_config = config.get("text_config")
    config = {**config, **text_config} if isinstance(text_config, dict) else config
    _refuse_unsupported(model, config)
    try:
        return _from_config(model, config)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} lacks what KV sizes depend on: {error}") from None


def _config_path(model: str) -> Path:
    if model == "smollm2":
        from sglang_kvdrive.cli.model import default_dir

        path = default_dir()
        if not path.is_dir():
            raise ConfigError("smollm2 is not on this machine yet: run `kvdrive model smollm2` first")
    path = path if model == "smollm2" else Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
        if not path.is_file():
            raise ConfigError(f"--model is {model!r}, a folder without a config.json: name the folder of a model")
    if path.is_file():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise ConfigError(
            f"--model is {model!r}, neither a file or folder here nor a model in the Hugging Face cache: "
            f"name a folder, or fetch its config first: hf download {model} config.json"
        )
    return Path(cached)


def _refuse_unsupported(model: str, config: dict) -> None:
    reasons = []
    if config.get("kv_lora_rank"):
        reasons.append("it uses multi-head latent attention (MLA)")
    if config.get("is_encoder_decoder"):
        reasons.append("it is an encoder-decoder model")
    kinds = set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if kinds or config.get("ssm_cfg") or config.get("mamba_d_state"):
        reasons.append(f"not all of its layers are attention layers ({', '.join(sorted(kinds)) or 'mamba'})")
    if reasons:
        raise ConfigError(f"KVDrive does not support {model}: {'; '.join(reasons)}. Serve it with --kv-manager native")


def _from_config(model: str, config: dict) -> ModelInfo:
    n_q_heads = int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    context = next((config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int)), 2048)
    return ModelInfo(
        name=model,
        n_layers=int(config["num_hidden_layers"]),
        n_q_heads=n_q_heads,
        n_kv_heads=int(config.get("num_key_value_heads") or n_q_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // n_q_heads),
        dtype=str(dtype).removeprefix("torch."),
        native_context=context,
        rope_type=rope.get("rope_type") or rope.get("type") or "default",
    )


def longer_context_arguments(info: ModelInfo, factor: int) -> str | None:
    """Launch arguments that stretch the context by YaRN; None when the model already scales its positions.

    `max_position_embeddings` has to move too: with `original_max_position_embeddings` set, SGLang takes it as the context.
    """
    if info.rope_type != "default":
        return None
    context = info.native_context * factor
    override = {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": info.native_context,
        },
        "max_position_embeddings": context,
    }
    return f"--context-length {context} --json-model-override-args '{json.dumps(override)}'"
