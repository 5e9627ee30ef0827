"""What kvdrive cannot serve is refused by name, all at once, before anything starts."""

import json
import sys
from types import SimpleNamespace

import pytest
from sglang_kvdrive.adapter import seams, selfcheck
from sglang_kvdrive.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # SGLang warns while it is imported

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip


def architecture(name: str, model_type: str, **settings) -> dict:
    return {**BASE, "architectures": [name], "model_type": model_type, **settings}


REFUSED_MODELS = {
    "MLA": architecture(
        "DeepseekV2ForCausalLM", "deepseek_v2", kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
    ),
    "mamba": architecture("FalconH1ForCausalLM", "falcon_h1"),
    "linear-attention": architecture("Qwen3NextForCausalLM", "qwen3_next", num_hidden_layers=4),
    "encoder-decoder": architecture(
        "MllamaForConditionalGeneration", "mllama", vision_config={},
        text_config={**BASE, "model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0},
    ),
    "window of 512 tokens": architecture("Gemma3ForCausalLM", "gemma3_text", sliding_window=512, num_hidden_layers=6),
    "window of 4096 tokens": architecture("MistralForCausalLM", "mistral", sliding_window=4096),
    "learned sinks": architecture("GptOssForCausalLM", "gpt_oss", num_local_experts=4, num_experts_per_tok=2),
    "soft cap of 50": architecture("Gemma2ForCausalLM", "gemma2", attn_logit_softcapping=50.0, query_pre_attn_scalar=16),
    "local attention of 8192": architecture("Llama4ForCausalLM", "llama4_text", attention_chunk_size=8192),
    "does not generate text": architecture("BertModel", "bert"),
    "multimodal": architecture("Qwen2VLForConditionalGeneration", "qwen2_vl", vision_config={}),
}  # fmt: skip
SERVED_MODELS = {
    "llama": BASE,
    "qwen2": architecture("Qwen2ForCausalLM", "qwen2", sliding_window=4096, use_sliding_window=False, max_window_layers=2),
    "qwen3": architecture("Qwen3ForCausalLM", "qwen3", sliding_window=None, use_sliding_window=False),
    "mistral": architecture("MistralForCausalLM", "mistral", sliding_window=None),
    "phi3 with a window beyond its context": architecture("Phi3ForCausalLM", "phi3", sliding_window=262144, pad_token_id=0),
}
REFUSED_FLAGS = {
    "attention_backend": "triton", "page_size": 16, "radix_cache_backend": "flexkv", "max_total_tokens": 1000,
    "cuda_graph_backend_decode": "full", "enable_torch_compile": True, "schedule_policy": "lpm", "chunked_prefill_size": 100,
    "kv_cache_dtype": "fp8_e4m3", "speculative_algorithm": "EAGLE", "disaggregation_mode": "prefill", "enable_pdmux": True,
    "enable_mixed_chunk": True, "tp_size": 2, "pp_size": 2, "dp_size": 2, "attn_dp_size": 2, "enable_dp_attention": True,
    "attn_cp_size": 2, "dcp_size": 2, "enable_hierarchical_cache": True, "enable_hisparse": True,
    "enable_unified_memory": True, "enable_kv_cache_sharding": True, "enable_two_batch_overlap": True,
    "lora_paths": ["x=y"], "enable_streaming_session": True, "is_embedding": True, "use_ray": True,
}  # fmt: skip


@pytest.fixture
def server_args(tmp_path):
    """Build our record for a model given by its config."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def build(config=BASE, **settings):
        from sglang.srt.server_args import ServerArgs

        (tmp_path / "config.json").write_text(json.dumps(config))
        return ServerArgs(model_path=str(tmp_path), skip_tokenizer_init=True, kv_manager="kvdrive", **settings)

    return build


def model_config(record):
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(record)


def test_defaults_are_served(server_args):
    record = server_args()
    assert selfcheck.refuse_unsupported(record, model_config(record)) == []
    assert selfcheck.refused_device("cpu") == []
    assert "--device is xpu" in selfcheck.refused_device("xpu")[0]


@pytest.mark.parametrize("fault", REFUSED_MODELS)
def test_a_model_that_cannot_be_served_is_refused_with_its_type_and_reason(server_args, fault):
    record = server_args(REFUSED_MODELS[fault])
    reasons = selfcheck.refuse_unsupported(record, model_config(record))
    model_type = REFUSED_MODELS[fault]["model_type"]
    assert any(fault in reason and reason.startswith(f"model type {model_type}: ") for reason in reasons), reasons


@pytest.mark.parametrize("name", SERVED_MODELS)
def test_a_dense_model_is_served(server_args, name):
    assert selfcheck.refused_model(model_config(server_args(SERVED_MODELS[name]))) == []


def test_a_window_that_the_user_switched_off_is_served(server_args):
    record = server_args(REFUSED_MODELS["window of 4096 tokens"], json_model_override_args='{"sliding_window": null}')
    assert selfcheck.refused_model(model_config(record)) == []


@pytest.mark.parametrize("field", REFUSED_FLAGS)
def test_a_setting_that_cannot_work_is_refused_by_its_flag(server_args, field):
    reasons = selfcheck.refused_settings(server_args(**{field: REFUSED_FLAGS[field]}))
    assert len(reasons) == 1
    assert reasons[0].startswith("--")
    assert any(word in reasons[0] for word in ("use ", "remove the flag", "it must be")), reasons


def test_every_refused_setting_is_a_flag_of_sglang_and_its_default_is_served(server_args):
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    flags = {setting.flag or "--" + setting.field.replace("_", "-") for setting in selfcheck.SETTINGS}
    assert flags - known == set()
    assert selfcheck.refused_settings(server_args()) == []


def test_all_reasons_of_flags_settings_and_model_come_at_once(server_args):
    record = server_args(REFUSED_MODELS["soft cap of 50"], page_size=16, enable_mixed_chunk=True, kvdrive_chunk_size=3)
    with pytest.raises(ConfigError) as error:
        record.resolve_once()
    text = "\n".join(error.value.reasons)
    for part in ("--kvdrive-chunk-size is 3", "--page-size is 16", "--enable-mixed-chunk is set", "soft cap of 50"):
        assert part in text


def test_a_model_alone_is_refused_during_resolution(server_args):
    with pytest.raises(ConfigError, match="learned sinks"):
        server_args(REFUSED_MODELS["learned sinks"]).resolve_once()


def test_another_operating_system_is_refused(server_args, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "the operating system is darwin" in selfcheck.refused_settings(server_args())[0]


def test_a_setting_that_somebody_changed_after_us_stops_the_start(server_args):
    from sglang.srt.arg_groups.overrides import declare_resolution

    record = server_args()
    record.resolve_once()
    assert selfcheck.settings_that_did_not_hold(record) == []
    declare_resolution(record, "another plugin", page_size=1, chunked_prefill_size=-1)
    text = "\n".join(selfcheck.settings_that_did_not_hold(record))
    assert "page_size ended as 1 where kvdrive needs 64" in text
    assert "chunked_prefill_size ended as -1" in text


def test_a_resolution_whose_hook_never_ran_stops_the_start(server_args, monkeypatch):
    from sglang.srt.arg_groups import resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    with pytest.raises(ConfigError, match="attention_backend ended as"):
        server_args().resolve_once()


def test_a_process_that_loaded_plugins_without_ours_stops_instead_of_serving_natively(server_args, monkeypatch):
    from sglang_kvdrive.adapter import plugin

    record = server_args()
    record.resolve_once()
    record.resolve_once()
    monkeypatch.setattr(plugin, "_STATE", plugin._State())
    with pytest.raises(ConfigError, match="not loaded in this process"):
        record.resolve_once()


def test_a_half_hooked_server_stops_with_every_part_that_is_not_ours(server_args, monkeypatch):
    class Ours:
        pass

    server_args()
    monkeypatch.setitem(sys.modules, "sglang_kvdrive.adapter.pools", SimpleNamespace(KVDrivePool=Ours, KVDriveAllocator=Ours))
    monkeypatch.setitem(sys.modules, "sglang_kvdrive.adapter.cache", SimpleNamespace(KVDriveTree=Ours))
    monkeypatch.setattr(seams, "check_seams", lambda: [])
    selfcheck.assert_hooked(pool=Ours(), allocator=Ours())
    selfcheck.assert_hooked(pool=Ours(), allocator=Ours(), tree=Ours())
    monkeypatch.setattr(seams, "check_seams", lambda: [seams.SeamResult("x.y", False, "gone")])
    with pytest.raises(ConfigError) as error:
        selfcheck.assert_hooked(pool="stock", allocator=1, tree=2.0)
    text = "\n".join(error.value.reasons)
    for part in ("KV pool is builtins.str", "page allocator is builtins.int", "prefix cache is builtins.float", "seam x.y: gone"):
        assert part in text
