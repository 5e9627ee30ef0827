"""The general plugin: what it declares when chosen, that it is inert when not, and that half an activation is noticed."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sglang_kvdrive.adapter import notice, plugin
from sglang_kvdrive.config import Budget, KVDriveConfig
from sglang_kvdrive.errors import ConfigError

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # SGLang warns while it is imported

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip
STUB = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args: None
"""
SERVE = "import sys; from sglang.cli.main import main; sys.argv[0] = 'sglang'; main()"
RESOLVE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
record = prepare_server_args(json.loads(sys.argv[1]))
record.resolve_once()
with open(sys.argv[2], "w") as out:
    json.dump(record.resolved_dict(), out, default=str)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture
def resolve(model):
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def resolve(*flags, finish=True):
        from sglang.srt.server_args import prepare_server_args

        record = prepare_server_args(["--model-path", model, "--skip-tokenizer-init", "--random-seed", "1", *flags])
        if finish:
            record.resolve_once()
        return record

    return resolve


def test_chosen_it_declares_every_setting_it_needs_and_records_each_with_its_price(resolve):
    record = resolve("--kv-manager", "kvdrive")
    shown = record.resolved_dict()
    assert shown["attention_backend"] == "kvdrive"
    assert shown["page_size"] == 64
    assert shown["disable_radix_cache"] is True
    assert shown["radix_cache_backend"] == "kvdrive"
    assert shown["disable_overlap_schedule"] is True
    assert shown["prefill_decode_interval"] == 1
    assert shown["prefill_decode_interval_min_bs"] == 1
    assert {shown["cuda_graph_config"][phase]["backend"] for phase in ("decode", "prefill")} == {"disabled"}
    changes = {change.setting: change for change in notice.changes_of(record)}
    assert changes["disable_radix_cache"].price.startswith("repeated prefixes are prefilled again")
    assert changes["page_size"][1:3] == (None, 64)
    assert all(change.price for change in changes.values())
    record.check_server_args()


def test_on_cpu_sglang_sizes_its_buffers_by_a_declared_number_not_by_the_free_memory(resolve):
    record = resolve("--kv-manager", "kvdrive", "--device", "cpu")
    assert record.resolved_dict()["max_total_tokens"] == plugin.CPU_BUFFER_TOKENS


@pytest.mark.slow
def test_with_the_declared_interval_a_running_stream_decodes_after_every_prefill_piece(resolve):
    from sglang.srt.managers.scheduler import Scheduler

    shown = resolve("--kv-manager", "kvdrive").resolved_dict()
    state = SimpleNamespace(
        prefill_decode_interval=shown["prefill_decode_interval"],
        prefill_decode_interval_min_bs=shown["prefill_decode_interval_min_bs"],
        _prefill_decode_interval_remaining=0,
        require_mlp_sync=False,
    )

    def schedule(n_running: int, rounds: int) -> str:
        """What stock schedules while prompt pieces always wait: P(refill), D(ecode) or an idle round."""
        order = ""
        for _ in range(rounds):
            defer = Scheduler._should_defer_prefill(state, SimpleNamespace(batch_size=lambda: n_running))
            order += ("D" if n_running else ".") if defer else "P"
            extend = SimpleNamespace(is_extend=lambda defer=defer: not defer)
            Scheduler._arm_prefill_decode_interval(state, None if order[-1] == "." else SimpleNamespace(forward_mode=extend))
        return order

    assert schedule(n_running=1, rounds=6) == "PDPDPD"
    assert schedule(n_running=0, rounds=4) == "PPPP"


@pytest.mark.parametrize("interval", [0, 4])
def test_a_prefill_decode_interval_that_the_user_set_stays(resolve, interval):
    shown = resolve("--kv-manager", "kvdrive", "--prefill-decode-interval", str(interval)).resolved_dict()
    assert shown["prefill_decode_interval"] == interval
    assert shown["prefill_decode_interval_min_bs"] == 0


def test_settings_that_agree_with_ours_are_accepted(resolve):
    resolve(
        "--kv-manager", "kvdrive", "--attention-backend", "kvdrive", "--page-size", "64", "--disable-radix-cache",
        "--disable-overlap-schedule", "--disable-cuda-graph", "--chunked-prefill-size", "320", "--schedule-policy", "lof",
    )  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["--kv-manager", "native"]])
def test_not_chosen_it_answers_none_of_its_hooks(resolve, flags, monkeypatch):
    from sglang.srt import runtime_context

    resolve(*flags)
    bag = SimpleNamespace(kv_manager="native")
    for answer in (lambda: bag, lambda: SimpleNamespace(), _unpublished):
        monkeypatch.setattr(runtime_context, "get_memory", answer)
        assert plugin._kv_pool_cls(None, None, kind="mha") is None
        assert plugin._allocator_cls(None, None) is None
        assert plugin._internal_state("state", None) is None
        assert plugin._no_fused_kv_write(lambda batch: batch, "stock") == "stock"


def _unpublished():
    raise ValueError("config namespace 'memory' not published")


def test_before_sglang_publishes_its_settings_kvdrive_is_not_chosen(monkeypatch):
    from sglang.srt import runtime_context

    fresh = runtime_context.RuntimeContext(parallel=runtime_context.ParallelContext())
    monkeypatch.setattr(runtime_context, "_CONTEXT", fresh)
    assert plugin.chosen() is False


def test_chosen_its_hooks_answer_for_the_kind_of_pool_we_serve(monkeypatch):
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_memory", lambda: SimpleNamespace(kv_manager="kvdrive"))
    monkeypatch.setitem(sys.modules, "sglang_kvdrive.adapter.pools", SimpleNamespace(KVDrivePool=int, KVDriveAllocator=str))
    assert plugin._kv_pool_cls(None, None, kind="mha") is int
    assert plugin._allocator_cls(None, None) is str
    assert plugin._no_fused_kv_write(lambda batch: batch, "stock") is False
    assert plugin._kv_pool_cls(None, None, kind="mla") is None


@pytest.mark.slow
def test_installed_but_not_chosen_every_resolved_setting_equals_a_start_without_the_plugin(resolve, model, tmp_path):
    ours = resolve("--device", "cpu").resolved_dict()
    kernels = tmp_path / "path" / "sgl_kernel"
    kernels.mkdir(parents=True)
    (kernels / "__init__.py").write_text(STUB)
    environment = {**os.environ, "SGLANG_PLUGINS": "none", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(kernels.parent)}
    flags = ["--model-path", model, "--skip-tokenizer-init", "--random-seed", "1", "--device", "cpu"]
    command = [sys.executable, "-c", RESOLVE, json.dumps(flags), str(tmp_path / "stock.json")]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    stock = json.loads((tmp_path / "stock.json").read_text())
    assert "kv_manager" not in stock
    ours = {name: value for name, value in ours.items() if name != "kv_manager" and not name.startswith("kvdrive_")}
    assert json.loads(json.dumps(ours, default=str)) == stock


@pytest.mark.slow
@pytest.mark.parametrize("start", [["-m", "sglang.launch_server"], ["-c", SERVE, "serve"]])
def test_each_command_line_knows_the_flags_and_stops_with_our_message(model, start):
    flags = ["--model-path", model, "--skip-tokenizer-init", "--kv-manager", "kvdrive", "--kvdrive-chunk-size", "3"]
    stopped = subprocess.run([sys.executable, *start, *flags], capture_output=True, text=True, check=False, timeout=120)
    assert stopped.returncode == 2
    assert "kvdrive cannot start:\n- --kvdrive-chunk-size is 3, it must be one of 1, 2, 4, 8" in stopped.stderr
    assert "Traceback" not in stopped.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("resolve")
def test_engine_builds_our_record_and_refuses_before_it_starts_a_process(model, monkeypatch):
    import atexit

    import sglang
    from sglang.srt.entrypoints.engine import Engine
    from sglang_kvdrive.adapter.args import KVDriveServerArgs

    assert Engine.server_args_class is KVDriveServerArgs
    monkeypatch.setattr(atexit, "register", lambda *_args: None)  # an Engine kills all children of its process at exit
    with pytest.raises(ConfigError, match="kvdrive-window is 0"):
        sglang.Engine(model_path=model, skip_tokenizer_init=True, kv_manager="kvdrive", kvdrive_window=0)


def test_an_activation_that_failed_is_remembered_because_sglang_swallows_it(monkeypatch):
    monkeypatch.setattr(plugin, "_STATE", plugin._State())
    assert "not loaded in this process" in plugin.faults()[0]

    def broken():
        raise AttributeError("no such seam")

    monkeypatch.setattr(plugin, "_add_flags", broken)
    with pytest.raises(AttributeError):
        plugin.activate()
    assert "failed to load (AttributeError: no such seam)" in plugin.faults()[0]


def test_a_hook_that_was_not_applied_is_named(resolve, monkeypatch):
    resolve(finish=False)
    assert plugin.faults() == []
    monkeypatch.setattr(plugin, "_STATE", plugin._State(active=True, targets=["sglang.no.such.target"]))
    assert plugin.faults() == ["the hook on sglang.no.such.target could not be applied"]


def test_the_start_up_block_names_changes_budget_thresholds_tiers_and_measurements():
    config = KVDriveConfig(budget=Budget(ratio=0.125), dense_below=580, hbm_bytes=48 * 2**20, dram_bytes=2**31)
    change = notice.SettingChange("disable_radix_cache", False, True, "repeated prefixes are prefilled again")
    block = notice.startup_block(
        changes=[change],
        config=config,
        device="cpu",
        context_len=8192,
        capacity_tokens=46603,
        token_bytes=46080,
        kernels="C++ (avx2)",
    )
    for part in (
        "48.0 MiB (50,331,648 bytes)",
        "2.0 GiB (2,147,483,648 bytes): 46,603 tokens",
        "12.5% (at least 512tok) per (layer, KV head): 1,024 of 8,192 tokens (12.5%)",
        "4 sink + 64 local + up to 256 pending tokens",
        "up to 580 tokens (prompt and generation) a request attends every token",
        "balanced, measured on SmolLM2-135M-Instruct",
        "kernels    C++ (avx2)",
        "disable_radix_cache  off -> on: repeated prefixes are prefilled again",
    ):
        assert part in block
    assert "auto" not in block
    assert "changed no SGLang setting" in notice.startup_block(
        changes=[], config=KVDriveConfig(), device="cpu", context_len=100, capacity_tokens=1, token_bytes=1
    )
