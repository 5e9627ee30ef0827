"""Settings: what is accepted, and that every refusal names the value, the allowed range and the fix."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_kvdrive.config import (
    PRESETS,
    Budget,
    KVDriveConfig,
    config_from_flags,
    format_bytes,
    parse_size,
)
from sglang_kvdrive.errors import ConfigError
from sglang_kvdrive.layout import CHUNK_SIZES, KVLayout

LAYOUT = KVLayout(30, 9, 3, 64, torch.bfloat16)


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# -- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("2GiB", 2 << 30), ("2G", 2 << 30), ("2g", 2 << 30), ("2GB", 2 * 10**9), ("8gib", 8 << 30), ("512MiB", 512 << 20),
        ("1.5KiB", 1536), (" 64 MiB ", 64 << 20), ("300B", 300), ("1TiB", 1 << 40), ("1TB", 10**12), ("1b", 1),
    ],
)  # fmt: skip
def test_a_size_with_a_unit_is_read(text, n_bytes):
    assert parse_size(text, what="--kvdrive-dram") == n_bytes


@pytest.mark.parametrize("text", ["auto", "AUTO", " Auto "])
def test_auto_stays_auto(text):
    assert parse_size(text, what="--kvdrive-hbm") == "auto"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("8", "a number without a unit"), ("1024", "a number without a unit"), ("-1GiB", "not a size"), ("8 gibi", "not a size"),
        ("", "not a size"), ("GiB", "not a size"), ("1e9B", "not a size"), ("1,5GiB", "not a size"), ("nan", "not a size"),
        ("0GiB", "above 0"), ("0.5B", "above 0"),
    ],
)  # fmt: skip
def test_a_wrong_size_is_refused_with_value_and_spelling(text, fault):
    message = refusal(parse_size, text, what="--kvdrive-dram")
    assert message.startswith(f"--kvdrive-dram is {text!r}")
    assert fault in message
    assert "512MiB" in message
    assert "auto" in message


def test_bytes_are_printed_short_and_exact():
    assert format_bytes(300) == "300 B"
    assert format_bytes(48 << 20) == "48.0 MiB (50,331,648 bytes)"
    assert format_bytes(3 << 40).startswith("3.0 TiB")


# -- budget --------------------------------------------------------------------------------------------------------


def test_a_budget_is_a_share_or_a_number_of_tokens():
    assert Budget.parse("6.25%", floor_entries=0).budget_entries(16_000) == 1000
    assert Budget.parse("6.25%").budget_entries(1000) == 512
    assert Budget.parse("2048tok").budget_entries(10) == 2048
    assert Budget.parse("100%", floor_entries=0).budget_entries(777) == 777
    assert Budget.parse(" 1 tok ").budget_entries(10**6) == 1


def test_a_share_is_rounded_up_to_whole_entries():
    assert Budget.parse("6.25%", floor_entries=0).budget_entries(17) == 2
    assert Budget.parse("1.5625%", floor_entries=0).budget_entries(64) == 1


@pytest.mark.parametrize("share", ["0.00001%", "0.0000001%"])
def test_the_smallest_share_still_selects_something(share):
    assert Budget.parse(share, floor_entries=0).budget_entries(1000) >= 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("6.25", "a number without a unit"), ("2048", "a number without a unit"), ("0%", "outside the allowed range"),
        ("0.0%", "outside the allowed range"), ("100.1%", "outside the allowed range"), ("101%", "outside the allowed range"),
        ("0tok", "not a whole number"), ("1.5tok", "not a whole number"), ("-5%", "not a budget"), ("dense", "not a budget"),
        ("", "not a budget"), ("2048 tokens", "not a budget"),
    ],
)  # fmt: skip
def test_a_wrong_budget_is_refused_with_both_spellings(text, fault):
    message = refusal(Budget.parse, text)
    assert message.startswith(f"--kvdrive-budget is {text!r}")
    assert fault in message
    assert "6.25%" in message
    assert "2048tok" in message


# -- the config itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"chunk_size": 3}, "--kvdrive-chunk-size is 3, it must be one of 1, 2, 4, 8"),
        ({"chunk_size": 0}, "--kvdrive-chunk-size is 0, it must be one of 1, 2, 4, 8"),
        ({"window_multiple": 0.5}, "--kvdrive-window is 0.5, it must be between 1 and 64"),
        ({"window_multiple": float("nan")}, "--kvdrive-window is nan, it must be between 1 and 64"),
        ({"window_multiple": 65}, "--kvdrive-window is 65, it must be between 1 and 64"),
        ({"eviction": "random"}, "--kvdrive-eviction is 'random', it must be one of lookahead, lru, fifo"),
        ({"sink_tokens": -1}, "--kvdrive-sink-tokens is -1, it must be between 0 and 1024"),
        ({"local_tokens": 0}, "--kvdrive-local-tokens is 0, it must be between 1 and 8192"),
        ({"dense_below": -1}, "--kvdrive-dense-below is -1, it must be at least 0, or auto"),
        ({"pending_tokens": 100}, "pending_tokens is 100, it must be a multiple of an index page (256 tokens)"),
        ({"segment_tokens": 0}, "segment_tokens is 0, it must be a multiple of an index page (256 tokens)"),
        ({"tokens_per_group": 6, "chunk_size": 4}, "tokens_per_group is 6"),
        ({"tokens_per_group": 0}, "tokens_per_group is 0"),
        ({"groups_per_page": 0}, "groups_per_page is 0"),
        ({"kmeans_iterations": 0}, "kmeans_iterations 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_value_and_range(setting, expected):
    assert expected in refusal(KVDriveConfig, **setting)


def test_all_reasons_come_at_once():
    with pytest.raises(ConfigError) as caught:
        config_from_flags(
            preset="fastest", budget="6.25", budget_floor=-1, chunk_size=3, window=0, eviction="none", dense_below="some",
            hbm="8", dram="lots", sink_tokens=-1, local_tokens=0,
        )  # fmt: skip
    message = str(caught.value)
    for flag in ("preset", "budget", "budget-floor", "chunk-size", "window", "eviction", "dense-below", "hbm", "dram",
                 "sink-tokens", "local-tokens"):  # fmt: skip
        assert f"--kvdrive-{flag} is" in message
    assert len(caught.value.reasons) == 11


def test_flags_win_over_the_preset_and_the_preset_over_nothing():
    assert config_from_flags(preset="accurate").chunk_size == PRESETS["accurate"].chunk_size
    assert config_from_flags(preset="accurate", chunk_size=8).chunk_size == 8
    config = config_from_flags(budget="256tok", hbm="48MiB", dram="auto", dense_below="1000", window=1.5, eviction="lru")
    assert (str(config.budget), config.hbm_bytes, config.dram_bytes) == ("256tok", 48 << 20, None)
    assert (config.dense_below, config.window_multiple, config.eviction) == (1000, 1.5, "lru")


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "", "²"])
def test_a_wrong_dense_threshold_is_refused(text):
    message = refusal(config_from_flags, dense_below=text)
    assert f"--kvdrive-dense-below is {text!r}" in message
    assert "from 0 up, or auto" in message


def test_an_unknown_preset_is_refused_with_the_known_ones():
    message = refusal(config_from_flags, preset="turbo")
    assert message == f"--kvdrive-preset is 'turbo', it must be one of {', '.join(PRESETS)}"


def test_a_config_never_changes():
    config = KVDriveConfig()
    with pytest.raises(AttributeError):
        config.chunk_size = 8
    resolved = config.resolve(hbm_bytes=100)
    assert (config.hbm_bytes, resolved.hbm_bytes) == (None, 100)


def test_a_config_can_be_written_as_json():
    assert json.loads(json.dumps(KVDriveConfig().as_dict()))["budget"] == "6.25% (at least 512tok)"


# -- derived sizes -------------------------------------------------------------------------------------------------

CONFIGS = st.builds(
    KVDriveConfig,
    budget=st.one_of(
        st.builds(Budget, ratio=st.sampled_from([0.0156, 0.0625, 0.5, 1.0]), floor_entries=st.sampled_from([0, 7, 512])),
        st.builds(Budget, ratio=st.none(), entries=st.integers(1, 3000), floor_entries=st.just(0)),
    ),
    chunk_size=st.sampled_from(CHUNK_SIZES),
    sink_tokens=st.integers(0, 40),
    local_tokens=st.integers(1, 200),
    window_multiple=st.sampled_from([1, 1.5, 2, 4]),
    groups_per_page=st.just(4),
    pending_tokens=st.sampled_from([64, 256]),
)


@given(CONFIGS, st.integers(0, 20_000), st.integers(0, 300))
def test_a_longer_sequence_never_needs_fewer_slots(config, n_tokens, more):
    shorter, longer = config.slots_of(LAYOUT, n_tokens), config.slots_of(LAYOUT, n_tokens + more)
    for part in ("sink", "zone", "window", "index", "total"):
        assert getattr(shorter, part) <= getattr(longer, part)


@given(CONFIGS, st.integers(0, 20_000))
def test_a_window_holds_what_one_step_selects(config, n_tokens):
    indexed = (config.sealed_end(n_tokens) - config.sink_chunks * config.chunk_size) // config.chunk_size
    assert config.window_chunks(n_tokens) >= min(config.budget_chunks(n_tokens), indexed)


@given(CONFIGS, st.integers(1, 20_000))
def test_the_index_region_is_whole_chunks_between_sink_and_local(config, n_tokens):
    end, sink = config.sealed_end(n_tokens), config.sink_chunks * config.chunk_size
    assert end % config.chunk_size == 0
    assert end == sink or n_tokens - end in range(config.local_tokens, config.local_tokens + config.chunk_size)
    assert config.sink_tokens <= sink < config.sink_tokens + config.chunk_size
