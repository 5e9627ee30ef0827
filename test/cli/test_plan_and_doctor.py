"""`kvdrive plan fit` against figures worked out by hand, and `kvdrive doctor`."""

import json
import subprocess
import sys

import pytest
from sglang_kvdrive.cli import doctor, main
from sglang_kvdrive.cli.modelinfo import longer_context_arguments, read_model_info
from sglang_kvdrive.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(tmp_path)

    return write


def fit(model, *arguments):
    return main.main(["plan", "fit", "--model", model, *arguments])


def test_plan_fit_prints_the_bytes_worked_out_by_hand(model, capsys):
    # 2 layers x 2 KV heads, head dim 64, bf16, 4 tokens a chunk: a slot is 2 * 4 * 64 * 2 = 1,024 bytes.
    # 4,000 tokens: sink 1 chunk; local 64 + pending 256 = 80 chunks + 1; the budget is 512 tokens = 128 chunks, window x2 = 256;
    # 3,932 tokens indexed: 16 pages of 256 tokens, 2 slots each = 32. 370 slots x 4 pairs = 1,480.
    # DRAM: 63 blocks of 64 tokens x 1,024 bytes a token (2 * 2 * 2 * 64 * 2).
    sizes = ("--chunk-size", "4", "--hbm", "4MiB", "--dram", "9MiB")
    assert fit(model(), "--context", "4000", "--batch", "2", *sizes) == 0
    out = capsys.readouterr().out
    assert "1,480 slots of 1,024 bytes" in out
    assert f"({1480 * 1024:,} bytes) per request" in out
    assert "63 blocks of 64 tokens, 65,536 bytes each" in out
    assert f"({63 * 65536:,} bytes) per request" in out
    assert "fits: batch 2 of at most 2" in out


def test_plan_fit_says_what_is_missing_and_exits_1(model, capsys):
    assert fit(model(), "--context", "4000", "--batch", "3", "--chunk-size", "4", "--hbm", "4MiB") == 1
    out = capsys.readouterr().out
    assert f"does not fit: {3 * 1480 * 1024 - 4 * 2**20:,} bytes of HBM are missing; the largest batch is 2" in out


def test_plan_fit_without_limits_only_reports(model, capsys):
    assert fit(model(), "--context", "64", "--batch", "1") == 0
    assert "no tier has a limit" in capsys.readouterr().out


def test_plan_fit_takes_float32_and_chunk_size_into_account(model, capsys):
    fit(model(), "--context", "4000", "--batch", "1", "--chunk-size", "8", "--dtype", "float32")
    assert "slots of 4,096 bytes" in capsys.readouterr().out


def test_plan_fit_counts_the_ssd_as_zero_and_says_so(model, capsys):
    assert fit(model(), "--context", "4000", "--batch", "9", "--dram", "1MiB", "--ssd", "1TiB") == 1
    assert "not built yet, counted as 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0", "--batch", "1"], "--context is 0, it must be at least 1"),
        (["--context", "64", "--batch", "1", "--hbm", "48"], "'48'"),
        (["--context", "64", "--batch", "1", "--ssd", "many"], "--ssd is 'many'"),
        (["--context", "64", "--batch", "1", "--budget", "6.25"], "6.25"),
        (["--context", "64", "--batch", "1", "--chunk-size", "3"], "1, 2, 4, 8"),
        (["--context", "64", "--batch", "1", "--window", "0.5"], "0.5"),
        (["--context", "64", "--batch", "1", "--preset", "best"], "'best'"),
    ],
)
def test_plan_fit_refuses_bad_input_with_exit_2(model, capsys, arguments, message):
    assert fit(model(), *arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_model_is_refused_with_the_way_to_get_it(capsys):
    assert fit("no/such-model", "--context", "64", "--batch", "1") == 2
    assert "hf download no/such-model config.json" in capsys.readouterr().err


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a folder without a config"):
        read_model_info(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_models_kvdrive_cannot_serve_are_refused_by_name_of_the_reason(model, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        read_model_info(model(**changes))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_broken_config_is_refused_without_a_traceback(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"readable config|lacks what"):
        read_model_info(str(tmp_path))


def test_a_text_config_inside_a_multimodal_config_is_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": LLAMA}))
    assert read_model_info(str(tmp_path)).n_kv_heads == 2


def test_longer_context_arguments_can_be_pasted(model):
    arguments = longer_context_arguments(read_model_info(model()), 4)
    length, _, override = arguments.partition(" --json-model-override-args ")
    assert length == "--context-length 16384"
    assert json.loads(override.strip("'")) == {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        "max_position_embeddings": 16384,
    }


def test_a_model_that_scales_already_is_not_scaled_twice(model):
    folder = model(rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert longer_context_arguments(read_model_info(folder), 2) is None
    assert "positions scaled: llama3" in doctor.describe_context(folder)


def test_doctor_prints_one_line_per_check_and_counts_failures(monkeypatch, capsys):
    good, bad = doctor.Check("a", True, "fine"), doctor.Check("b", False, "gone", "bring it back")
    monkeypatch.setattr(doctor, "run_checks", lambda: [good, bad])
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    a: fine", "FAIL  b: gone", "      fix: bring it back", "", "1 of 2 checks failed."
    ]  # fmt: skip
    monkeypatch.setattr(doctor, "run_checks", lambda: [good])
    assert main.main(["doctor"]) == 0


def test_doctor_reports_a_wrong_sglang(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda _name: "0.5.24")
    check = doctor.check_sglang()
    assert not check.ok
    assert "0.5.24" in check.detail
    assert check.fix == "pip install sglang==0.5.23"


def test_doctor_treats_seams_that_cannot_be_looked_at_as_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang_kvdrive.adapter.seams", None)
    (check,) = doctor.check_seams()
    assert not check.ok
    assert "cannot be checked" in check.detail


def test_help_is_fast_because_it_imports_nothing_heavy():
    code = "import sys, sglang_kvdrive.cli.main as m; m.build_parser().format_help(); print([n for n in ('torch', 'sglang', 'rich', 'psutil') if n in sys.modules])"  # noqa: E501
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
