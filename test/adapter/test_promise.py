"""The main promise: an HBM of one or two thousand tokens serves prompts of seven thousand, and what they say is found."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from kvsupport.texts import secret_prompt, token_ids
from sglang_kvdrive.config import config_from_flags
from sglang_kvdrive.layout import KVLayout

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CONTEXT = 8192
PROMPT = 7000
SPARSE = ("--kvdrive-dense-below", "0")
SMALLEST = ("--kvdrive-budget", "192tok", "--kvdrive-window", "1")
FACTS = {"defaults": ("Aldo", 48213), "smallest": ("Brenn", 90755)}


def minimum_bytes(**flags) -> int:
    layout = KVLayout(30, 9, 3, 64, torch.float32, config_from_flags(**flags).chunk_size)
    return config_from_flags(**flags).slots_of(layout, CONTEXT).total * layout.slot_bytes


@pytest.fixture(params=["smallest", "defaults"])
def arena(request):
    """(name, flags, arena in bytes, tokens it would hold if it held nothing but KV)."""
    if request.param == "defaults":
        return request.param, (), minimum_bytes(), 2048
    return request.param, SMALLEST, minimum_bytes(budget="192tok", window=1.0), 1024


def test_a_prompt_of_7k_tokens_is_served_from_the_smallest_arena_and_its_fact_is_found(arena, server_slot):
    name, flags, hbm, promised_tokens = arena
    assert hbm <= promised_tokens * 30 * 3 * 2 * 64 * 4
    server = server_slot.start(f"promise_{name}", flags=("--dtype", "float32", *SPARSE, *flags, "--kvdrive-hbm", f"{hbm}B"))
    state = server.state()
    assert state["minimum_hbm_bytes"] == hbm == state["tiers"]["hbm"]["total_bytes"]
    who, code = FACTS[name]
    before = server.state()
    answer = server.generate(secret_prompt(PROMPT, who, code), 12, timeout=900)
    assert str(code) in answer["text"], answer["text"]
    grown = server.counted(before)
    assert grown["attended_entries"] * 5 < grown["stored_entries"]
    for evidence in ("sparse_tokens", "seals", "hits", "misses", "evictions", "bytes_fetched", "bytes_streamed"):
        assert grown[evidence] > 0, evidence
    report = answer["meta_info"]["kvdrive"][0]
    assert report["mode"] == "sparse"
    assert report["attended_tokens"] < 900 < PROMPT < report["stored_tokens"]
    server.wait_idle()
    server.assert_alive()


def test_what_was_generated_more_than_a_thousand_tokens_ago_is_found(server_slot):
    """The server writes a fact itself, forced by a grammar, then 1,100 tokens of filler, and may then choose the digits."""
    server = server_slot.start("promise_defaults", flags=("--dtype", "float32", *SPARSE, "--kvdrive-hbm", f"{minimum_bytes()}B"))
    filler = " ".join(f"On day {day}, the sailor painted {day + 3} clocks near the harbour." for day in range(1, 42))
    before = "The secret code of Carsow is 73914. " + filler + " The secret code of Carsow is "
    counted = server.state()
    answer = server.generate(
        "Write a diary.\n",
        3 * len(token_ids(before)),  # under a grammar the model spells words with more tokens than a tokenizer would
        sampling={"regex": re.escape(before) + r"[0-9]{5}\.", "ignore_eos": False},
        timeout=900,
    )
    assert answer["text"].startswith(before)
    assert answer["meta_info"]["completion_tokens"] > 4 * 256 + 64
    assert answer["text"].removeprefix(before).startswith("73914"), answer["text"][-60:]
    grown = server.counted(counted)
    assert grown["seals"] >= 4
    assert grown["attended_entries"] < grown["stored_entries"]
    server.wait_idle()
    server.assert_alive()


def test_one_chunk_less_than_the_minimum_is_refused_with_both_numbers(model):
    minimum = minimum_bytes()
    layout = KVLayout(30, 9, 3, 64, torch.float32, config_from_flags().chunk_size)
    short = minimum - layout.slot_bytes
    command = (sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu", "--dtype", "float32",
               "--kv-manager", "kvdrive", "--kvdrive-hbm", f"{short}B", "--port", "1")  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode != 0
    output = ended.stdout + ended.stderr
    assert str(short) in output
    assert str(minimum) in output
