"""Capacity is that of all tiers: what fits is served, what does not is refused at once with both numbers.

The server holds 2,048 tokens in DRAM behind an arena of 1,456 tokens' bytes, with a context length of 8,192.
"""

from __future__ import annotations

import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import psutil
import pytest
from kvsupport.clients import AS_FAST, Connection, assert_same, body_of, generate, wait_for
from kvsupport.slot import SMALL_ARENA, SMALL_BUDGET, SMALL_CAPACITY, SMALL_PIECE
from kvsupport.texts import secret_prompt, story

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

REFUSED_SECONDS = 5
RECOVERED_SECONDS = 30
DISTURBED = 0.02
ATTENDED_BESIDE_BUDGET = 4 + 64 + 256 + 4
"""Sink, local and pending tokens, and the chunk that the newest token begins."""
SHORT = {
    n: partial(story, n, seed=n) for n in (1, 2, 3, 4, 5, SMALL_BUDGET // 2, SMALL_BUDGET - 1, SMALL_BUDGET, SMALL_BUDGET + 1)
}
STOCK_CALLS = {f"short {n}": generate(prompt, 16) for n, prompt in SHORT.items()}


@pytest.fixture
def server(kvdrive_small):
    """The server; afterwards it lives and holds nothing in any tier."""
    yield kvdrive_small
    kvdrive_small.assert_alive()
    kvdrive_small.wait_idle()


def refusal(status: int, answer) -> str:
    """The message of a refusal, whatever the endpoint wraps it in."""
    assert 400 <= status < 500, (status, answer)
    assert isinstance(answer, dict), answer
    error = answer.get("error", answer)
    return error["message"] if isinstance(error, dict) else str(error)


def post_timed(server, path: str, body: dict):
    begin = time.monotonic()
    status, answer = server.post(path, body)
    return status, answer, time.monotonic() - begin


def limited(prompt, max_new_tokens: int, **sampling) -> dict:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **sampling},
    }


def test_the_capacity_that_is_told_is_that_of_all_tiers(server):
    info = server.get("/server_info")[1]
    tiers = info["internal_states"][0]["kvdrive"]["tiers"]
    assert tiers["dram"]["total_tokens"] == SMALL_CAPACITY
    assert tiers["hbm"]["total_bytes"] < tiers["dram"]["total_bytes"]
    log = server.log.read_text(errors="replace")
    assert {int(n) for n in re.findall(r"max_total_num_tokens=(\d+)", log)} == {SMALL_CAPACITY}


def test_a_prompt_longer_than_the_arena_is_served_and_its_fact_found(server):
    n = 1900
    before = server.state()
    prompt = secret_prompt(n, "the lighthouse", 7431)
    assert len(prompt) > SMALL_ARENA
    answer = server.generate(prompt, 16)
    assert answer["meta_info"]["completion_tokens"] == 16
    assert "7431" in answer["text"]
    (report,) = answer["meta_info"]["kvdrive"]
    assert report["mode"] == "sparse"
    assert report["budget_tokens"] == SMALL_BUDGET
    assert SMALL_BUDGET < report["attended_tokens"] <= SMALL_BUDGET + ATTENDED_BESIDE_BUDGET < report["stored_tokens"]
    assert 0 < report["hit_rate"] < 1
    work = server.counted(before)
    for name in ("hits", "misses", "evictions", "seals", "bytes_fetched", "bytes_home_written", "bytes_streamed", "bytes_placed"):
        assert work[name] > 0, name


def test_sequences_up_to_the_budget_equal_stock_alone_and_together(stock, server):
    before = server.state()
    for n in (1, 3, SMALL_BUDGET // 2, SMALL_BUDGET + 1):
        assert_same(generate(SHORT[n], 16)(server), stock[f"short {n}"])
    with ThreadPoolExecutor(len(SHORT)) as pool:
        answers = pool.map(lambda prompt: generate(prompt, 16)(server), SHORT.values())
        for n, answer in zip(SHORT, answers, strict=True):
            assert_same(answer, stock[f"short {n}"])
    work = server.counted(before)
    assert work["sparse_tokens"] == work["decoded_tokens"] > 0
    assert work["decode_steps"] < work["decoded_tokens"]
    assert work["misses"] > 0


def test_a_prompt_larger_than_all_tiers_is_refused_at_once_and_nobody_waits_for_it(server):
    lengths = {0.9: 1843, 1.2: 2458, 2: 4096, 6: 12288}
    expected = server.generate(story(80, seed=1), 8)["output_ids"]
    with ThreadPoolExecutor(8) as pool:
        shorts = [pool.submit(server.generate, story(80, seed=1), 8) for _ in range(2)]
        big = {n: pool.submit(post_timed, server, "/generate", limited(story(n), 8)) for n in lengths.values()}
        shorts += [pool.submit(server.generate, story(80, seed=1), 8) for _ in range(6)]
    for n, future in big.items():
        status, answer, seconds = future.result()
        if n < SMALL_CAPACITY:
            assert status == 200
            assert answer["meta_info"]["completion_tokens"] == 8
            continue
        message = refusal(status, answer)
        assert seconds < REFUSED_SECONDS, (n, seconds)
        numbers = [int(number) for number in re.findall(r"\d+", message.replace(",", ""))]
        assert n in numbers, message
        assert any(SMALL_CAPACITY - 64 <= number <= SMALL_CAPACITY or number == 8192 for number in numbers), message
    assert all(future.result()["output_ids"] == expected for future in shorts)


def test_a_chat_that_outgrows_all_tiers_is_refused_in_that_turn_and_the_server_goes_on(server):
    messages, statuses = [], []
    for turn in range(3):
        text = server.post("/detokenize", {"tokens": story(900, seed=turn)})[1]["text"]
        messages.append({"role": "user", "content": text + "\nHow many days were told? Answer briefly."})
        body = {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0}
        status, answer, seconds = post_timed(server, "/v1/chat/completions", body)
        statuses.append(status)
        if status != 200:
            assert seconds < REFUSED_SECONDS
            assert re.search(r"\d{4}", refusal(status, answer).replace(",", ""))
            break
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert statuses == [200, 200, 400]
    assert server.generate("One more", 4)["meta_info"]["completion_tokens"] == 4


def test_a_generation_that_does_not_fit_gets_the_tokens_that_fit_and_the_reason(server):
    prompt = story(1900)
    before = server.state()
    status, answer, _ = post_timed(server, "/generate", limited(prompt, 6000))
    assert status == 200, answer
    meta = answer["meta_info"]
    (report,) = meta["kvdrive"]
    clipped = report["clipped"]
    assert meta["finish_reason"]["type"] == "length"
    assert meta["completion_tokens"] == clipped["given_tokens"] == len(answer["output_ids"])
    assert SMALL_CAPACITY - 2 * 64 <= len(prompt) + clipped["given_tokens"] <= SMALL_CAPACITY
    assert clipped["asked_tokens"] == 6000
    assert str(SMALL_CAPACITY) in clipped["reason"]
    assert server.counted(before)["sparse_tokens"] == clipped["given_tokens"] - 1


def test_at_the_edge_of_the_capacity_there_is_a_token_or_a_refusal_but_never_an_empty_answer(server):
    outcomes = []
    for n in (1919, 1920, 1921, SMALL_CAPACITY - 1, SMALL_CAPACITY, SMALL_CAPACITY + 1):
        status, answer, seconds = post_timed(server, "/generate", limited(story(n), 2))
        outcomes.append(status)
        if status == 200:
            assert answer["meta_info"]["completion_tokens"] == 2
        else:
            assert seconds < REFUSED_SECONDS
            assert {str(n), str(SMALL_CAPACITY), "1920"} <= set(re.findall(r"\d+", refusal(status, answer)))
    assert outcomes == [200, 200, 400, 400, 400, 400]


def test_requests_that_outgrow_dram_together_are_retracted_and_all_finish(server):
    """Two large ones that each fit, but not together to their ends, and four short ones.

    Afterwards decoding takes exactly the same work and is as fast as it was, at once or within half a minute. (One server that
    users reported fell to a tenth of its speed with its first retraction and never came back.)
    """
    probes = [decode_probe(server) for _ in range(3)]
    before = server.state()
    large = story(864, seed=20)
    alone = server.generate(large, 24)["output_ids"]
    short = story(60, seed=30)
    short_alone = server.generate(short, 16)["output_ids"]
    to_the_end = {"ignore_eos": False, "min_new_tokens": 192}  # SGLang reserves the whole length of those that ignore EOS
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(server.generate, large, 192, sampling=to_the_end) for _ in range(2)]
        wait_for(server, "two large requests at once", lambda state: state["sequences"] == 2)
        quick = [pool.submit(server.generate, short, 16) for _ in range(4)]
    answers = [future.result() for future in futures]
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, "nothing was retracted: the test shows nothing"
    for answer in answers:
        assert answer["meta_info"]["completion_tokens"] == 192
        assert answer["output_ids"][:24] == alone
    assert [future.result()["output_ids"] for future in quick] == [short_alone] * 4
    assert server.counted(before)["bytes_streamed"] > 0
    server.wait_idle()
    assert_decodes_as_before(server, probes)


def test_requests_whose_windows_outgrow_the_arena_are_retracted_and_answer_as_those_that_were_not(server):
    """Short prompts have no window yet; all at once they get one when their first 256 generated tokens are sealed.

    They queue behind a long prompt, so that one prefill pass admits them together. Up to the end no token falls out of
    the budget, so that a retraction may not change a single token.
    """
    before = server.state()
    prompts = limited([story(60, seed=40)] * 4, 272)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(server.generate, story(6 * SMALL_PIECE, seed=41), 1)
        wait_for(server, "prefilling", lambda state: state["prefill_tokens"] > before["prefill_tokens"])
        status, answers = server.post("/generate", prompts, timeout=600)
        assert ahead.result()["meta_info"]["completion_tokens"] == 1
    assert status == 200
    retractions = sorted(answer["meta_info"]["num_retractions"] for answer in answers)
    assert retractions[0] == 0 < retractions[-1], f"some must be retracted and some must not: {retractions}"
    assert [answer["output_ids"] for answer in answers] == [answers[0]["output_ids"]] * 4
    work = server.counted(before)
    assert work["attended_entries"] == work["stored_entries"]
    assert work["seals"] >= 4
    assert work["misses"] > 0


@dataclass(frozen=True)
class DecodeProbe:
    """One stream on an otherwise idle server."""

    seconds: float
    """Median between two tokens."""
    work: dict
    """What its tokens took."""
    disturbance: float
    """Processors that others used meanwhile: other programs here, and other machines on the same hardware."""


def decode_probe(server) -> DecodeProbe:
    """A stream that is long enough to be sealed and to need a window."""
    family = [psutil.Process(), *server.tree()]
    before, used, begin = server.state(), processor_seconds(family), time.monotonic()
    with Connection(server, "/generate", body_of("/generate", 340, 24, seed=61, stream=True)) as connection:
        for _ in connection.events():
            pass
    others = (processor_seconds(family) - used) / (time.monotonic() - begin)
    seconds = statistics.median(b - a for a, b in zip(connection.times, connection.times[1:], strict=False))
    work = server.counted(before)
    counters = ("decode_steps", "attended_entries", "hits", "misses", "bytes_fetched", "bytes_appended", "bytes_home_written")
    return DecodeProbe(seconds, {name: work[name] for name in counters}, others)


def processor_seconds(family: list[psutil.Process]) -> float:
    """What everybody but `family` used so far; what the hypervisor gave to others counts as used."""
    machine = psutil.cpu_times()
    ours = sum(sum(process.cpu_times()[:2]) for process in family)
    return machine.user + machine.nice + machine.system + getattr(machine, "steal", 0) - ours


def assert_decodes_as_before(server, before: list[DecodeProbe]) -> None:
    """The same work, and within half a minute the same speed, best against best.

    A machine that others disturb has moods in which everything takes up to twice as long, for minutes. Half a minute is given
    to be as fast to 20%; after that, twice as long is allowed (a neighbour that only uses up memory bandwidth was seen to cost
    half, and no clock here shows it), three times where others took processors. What this looks for is tenfold.
    """
    after: list[DecodeProbe] = []
    quiet = min(probe.seconds for probe in before)
    deadline = time.monotonic() + RECOVERED_SECONDS
    while not after or (min(probe.seconds for probe in after) > AS_FAST * quiet and time.monotonic() < deadline):
        after.append(decode_probe(server))
        assert after[-1].work == before[0].work
    assert before[0].work["misses"] > 0
    disturbed = any(probe.disturbance > DISTURBED for probe in before + after)
    limit = 3 if disturbed else 2
    assert min(probe.seconds for probe in after) <= limit * quiet, (before, after)
