"""The flags: what SGLang sees, what a user gets told, and that the record survives the way to another process."""

import argparse
import json
import pickle
import subprocess
import sys

import pytest
from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # SGLang warns while it is imported

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture
def parse(model):
    """Flags to a record, as `python -m sglang.launch_server` does it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def parse(*flags):
        from sglang.srt.server_args import prepare_server_args

        return prepare_server_args(["--model-path", model, "--skip-tokenizer-init", *flags])

    return parse


def refusal(record, capsys) -> str:
    """What a user reads when a start from the command line is refused."""
    with pytest.raises(SystemExit) as stop:
        record.resolve_once()
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_every_flag_shows_in_server_info_and_in_the_memory_namespace(parse):
    from sglang_kvdrive.adapter import args

    record = parse("--kv-manager", "kvdrive", "--kvdrive-budget", "12.5%", "--kvdrive-window", "3")
    shown = record.resolved_dict()
    assert set(args.OUR_FIELDS) == {name for name in shown if name.startswith("kvdrive_")} | {"kv_manager"}
    assert (shown["kv_manager"], shown["kvdrive_budget"], shown["kvdrive_window"]) == ("kvdrive", "12.5%", 3.0)
    assert {type(record)._NS_BY_FIELD[name] for name in args.OUR_FIELDS} == {"memory"}


@pytest.mark.usefixtures("parse")
def test_help_can_be_printed_and_names_every_flag():
    from sglang.srt.server_args import ServerArgs
    from sglang_kvdrive.adapter import args

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = parser.format_help()
    assert [flag for flag in map(args.flag_of, args.OUR_FIELDS) if flag not in text] == []
    assert "6.25%" in text


def test_flags_left_alone_give_the_default_config(parse):
    from sglang_kvdrive.adapter.args import config_from_server_args

    assert config_from_server_args(parse("--kv-manager", "kvdrive")) == KVDriveConfig()


def test_every_flag_reaches_the_config(parse):
    from sglang_kvdrive.adapter.args import config_from_server_args

    flags = {
        "hbm": "48MiB", "dram": "2GiB", "preset": "fast", "budget": "192tok", "dense-below": "1000", "chunk-size": "2",
        "window": "1.5", "eviction": "fifo", "sink-tokens": "8", "local-tokens": "32", "budget-floor": "0",
    }  # fmt: skip
    config = config_from_server_args(
        parse("--kv-manager", "kvdrive", *(part for name, value in flags.items() for part in (f"--kvdrive-{name}", value)))
    )
    assert (config.hbm_bytes, config.dram_bytes, config.preset, str(config.budget)) == (48 * 2**20, 2**31, "fast", "192tok")
    assert (config.dense_below, config.chunk_size, config.window_multiple, config.eviction) == (1000, 2, 1.5, "fifo")
    assert (config.sink_tokens, config.local_tokens) == (8, 32)


def test_all_faults_are_listed_at_once_and_the_exit_code_is_2(parse, capsys):
    record = parse(
        "--kv-manager", "kvdrive", "--kvdrive-chunk-size", "3", "--kvdrive-hbm", "12", "--kvdrive-dram", "lots",
        "--kvdrive-budget", "0%", "--kvdrive-sink-tokens", "abc", "--kvdrive-window", "0.5", "--kvdrive-preset", "best",
        "--kvdrive-eviction", "random", "--kvdrive-log-interval", "-1", "--kvdrive-dense-below", "some", "--page-size", "16",
    )  # fmt: skip
    text = refusal(record, capsys)
    assert text.startswith("kvdrive cannot start:\n- ")
    for part in (
        "--kvdrive-chunk-size is 3, it must be one of 1, 2, 4, 8",
        "--kvdrive-hbm is '12', a number without a unit",
        "--kvdrive-dram is 'lots', which is not a size",
        "--kvdrive-budget is '0%', outside the allowed range",
        "--kvdrive-sink-tokens is 'abc', it must be a whole number",
        "--kvdrive-window is 0.5, it must be between 1 and 64",
        "--kvdrive-preset is 'best', it must be one of",
        "--kvdrive-eviction is 'random', it must be one of lookahead, lru, fifo",
        "--kvdrive-log-interval is -1",
        "--kvdrive-dense-below is 'some'",
        "--page-size is 16",
    ):
        assert part in text


@pytest.mark.parametrize("budget", ["0.0625", "2048", "0%", "101%", "0tok", "-1tok", "half"])
def test_a_budget_outside_its_range_is_refused_with_both_spellings(parse, capsys, budget):
    text = refusal(parse("--kv-manager", "kvdrive", f"--kvdrive-budget={budget}"), capsys)
    assert "6.25%" in text
    assert "2048tok" in text


def test_a_flag_without_kv_manager_is_refused_by_name(parse, capsys):
    for choice in ([], ["--kv-manager", "native"]):
        text = refusal(parse(*choice, "--kvdrive-budget", "12.5%", "--attention-backend", "kvdrive"), capsys)
        assert "--kvdrive-budget has no effect without --kv-manager kvdrive" in text
        assert "--attention-backend has no effect without --kv-manager kvdrive" in text


@pytest.mark.usefixtures("parse")
def test_engine_keywords_raise_the_same_reasons(model):
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(
        model_path=model, skip_tokenizer_init=True, kv_manager="kvdrive", kvdrive_hbm=2**31, kvdrive_budget=0.0625,
        kvdrive_chunk_size="4", kvdrive_sink_tokens=True,
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        record.resolve_once()
    assert len(error.value.reasons) == 4
    with pytest.raises(ConfigError, match="it must be native or kvdrive"):
        ServerArgs(model_path=model, kv_manager="fast").resolve_once()


@pytest.mark.usefixtures("parse")
def test_a_refused_record_can_be_corrected_and_resolved(model):
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(model_path=model, skip_tokenizer_init=True, kv_manager="kvdrive", page_size=16)
    with pytest.raises(ConfigError, match="page-size is 16"):
        record.resolve_once()
    record.page_size = 64
    record.resolve_once()


@pytest.mark.slow
def test_a_resolved_record_survives_the_way_into_a_new_process(parse):
    record = parse("--kv-manager", "kvdrive", "--kvdrive-budget", "12.5%")
    record.resolve_once()
    code = (
        "import pickle, sys\n"
        "record = pickle.load(sys.stdin.buffer)\n"
        "from sglang_kvdrive.adapter.notice import changes_of\n"
        "view = record.resolved_dict()\n"
        "print(type(record).__qualname__, view['kvdrive_budget'], view['page_size'], len(changes_of(record)) > 5)\n"
        "record.resolve_once()\n"
    )
    child = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(record), capture_output=True, check=True)
    assert child.stdout.decode().split() == ["KVDriveServerArgs", "12.5%", "64", "True"]
