"""What others build on keeps its name."""

import dataclasses
import importlib
import inspect

import pytest
from sglang_kvdrive import errors, values
from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.engine import KVDriveEngine
from sglang_kvdrive.stats import EngineStats

ENGINE = {
    "begin", "expect", "extend", "begin_prefill", "prefill", "begin_step", "decode", "release", "clear", "slots_needed",
    "slots_held", "can_step", "slots_outstanding", "slots_promised", "sequence_stats", "check_integrity",
}  # fmt: skip

OPERATIONS = {
    "attend_home", "attend_pieces", "attend_prefix", "attend_slots", "fill_chunks", "gather_chunks", "group_keys", "mean_keys",
    "merge_state", "probe_books", "probe_window", "score_groups", "select_chunks", "store_tokens",
}  # fmt: skip


def public(thing) -> set[str]:
    return {name for name, _ in inspect.getmembers(thing, inspect.isfunction) if not name.startswith("_")}


def test_the_engine_has_these_methods_and_no_others():
    assert public(KVDriveEngine) == ENGINE


def test_a_config_has_these_settings():
    assert {f.name for f in dataclasses.fields(KVDriveConfig)} == {
        "preset", "budget", "chunk_size", "sink_tokens", "local_tokens", "pending_tokens", "segment_tokens", "tokens_per_group",
        "groups_per_page", "kmeans_iterations", "window_multiple", "eviction", "dense_below", "hbm_bytes", "dram_bytes",
        "in_place",
    }  # fmt: skip


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_operation_exports_itself_and_its_twin(operation):
    assert set(importlib.import_module(f"kvdrive_kernels.{operation}").__all__) == {operation, "reference"}


def test_every_error_is_ours():
    found = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, Exception)]
    assert {e.__name__ for e in found} == {"KVDriveError", "ConfigError", "CapacityError", "IntegrityError"}
    assert all(issubclass(e, errors.KVDriveError) for e in found)


def test_values_are_frozen():
    for kind in (values.Selection, values.Lookup, values.SequenceStats):
        assert kind.__dataclass_params__.frozen


def test_counters_are_plain_integers_that_start_at_zero():
    assert set(EngineStats().as_dict().values()) == {0}


def test_everything_public_in_the_engine_is_documented():
    undocumented = [n for n in ENGINE - {"slots_held", "sequence_stats"} if not getattr(KVDriveEngine, n).__doc__]
    assert undocumented == []
