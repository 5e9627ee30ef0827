"""`sglang.Engine`, and SGLang without `--kv-manager kvdrive`: the plugin is there and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from kvsupport.server import PATIENT
from kvsupport.texts import story

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPTS = (5, 69, 700)
PROGRAM = textwrap.dedent(
    """
    import json, sys
    import sglang

    if __name__ == "__main__":
        asked = json.loads(sys.argv[1])
        engine = sglang.Engine(device="cpu", dtype="float32", random_seed=0, log_level="error", **asked["settings"])
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        answers = [engine.generate(input_ids=ids, sampling_params=sampling) for ids in asked["prompts"]]
        info = engine.get_server_info()
        told = {"tokens": [a["output_ids"] for a in answers], "meta": [a["meta_info"].get("kvdrive") for a in answers],
                "state": info["internal_states"][0].get("kvdrive"), "backend": info["attention_backend"],
                "page_size": info["page_size"], "manager": info.get("kv_manager")}
        engine.shutdown()
        print("TOLD", json.dumps(told), flush=True)
    """
)
STAND_IN = (
    "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return lambda *a, **k: None\n"
)


def run_engine(tmp_path, model, settings: dict, env: dict | None = None) -> dict:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    asked = {"settings": {"model_path": str(model), **settings}, "prompts": [story(n, seed=n) for n in PROMPTS]}
    ended = subprocess.run(
        (sys.executable, str(program), json.dumps(asked)),
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **PATIENT, **(env or {})},
        check=False,
    )
    told = [line for line in ended.stdout.splitlines() if line.startswith("TOLD ")]
    assert told, ended.stderr[-3000:]
    return json.loads(told[-1].removeprefix("TOLD "))


@pytest.fixture(scope="module")
def stock_settings() -> dict:
    return {"attention_backend": "torch_native", "disable_radix_cache": True, "max_total_tokens": 8192}


@pytest.fixture(scope="module")
def stock_answers(stock_settings, model, tmp_path_factory, server_slot) -> dict:
    server_slot.stop()
    return run_engine(tmp_path_factory.mktemp("stock"), model, stock_settings)


def test_engine_takes_the_kv_manager_and_gives_the_tokens_of_stock(stock_answers, model, tmp_path):
    settings = {"kv_manager": "kvdrive", "kvdrive_budget": "100%", "kvdrive_dense_below": "0", "chunked_prefill_size": 256}
    told = run_engine(tmp_path, model, settings)
    assert told["tokens"] == stock_answers["tokens"]
    assert told["manager"] == told["backend"] == "kvdrive"
    assert told["meta"][-1][0]["mode"] == "sparse"
    assert min(told["state"][name] for name in ("selected_chunks", "seals", "bytes_streamed")) > 0


def test_an_installed_plugin_that_was_not_chosen_changes_nothing(stock_answers, stock_settings, model, tmp_path):
    """The same programs without our entry points. Stock cannot import on this CPU without a stand-in for its CUDA kernels."""
    folder = tmp_path / "stand_in" / "sgl_kernel"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(STAND_IN)
    env = {"SGLANG_PLUGINS": "none", "PYTHONPATH": str(folder.parent), "SGLANG_USE_CPU_ENGINE": "1"}
    told = run_engine(tmp_path, model, stock_settings, env)
    assert stock_answers["manager"] is None
    assert {name: told[name] for name in ("tokens", "backend", "page_size", "state")} == {
        name: stock_answers[name] for name in ("tokens", "backend", "page_size", "state")
    }
