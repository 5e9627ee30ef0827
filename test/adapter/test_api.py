"""The HTTP API under kvdrive answers what stock SGLang answers, through index, selection and window.

The server attends 100% of the stored tokens, sparsely: any token lost, mixed up or read from a wrong place changes answers.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from kvsupport.clients import Connection, ask, ask_stream, assert_same, generate
from kvsupport.texts import PASSAGE

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

README = Path(__file__).parents[2] / "README.md"
QUESTION = PASSAGE + "Question: Which town has a bridge?\nAnswer:"
CHAT = [{"role": "user", "content": PASSAGE + "Which town has a bridge? Answer in one sentence."}]
CITY = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 12}, "arches": {"type": "integer"}},
        "required": ["town", "arches"], "additionalProperties": False}  # fmt: skip


def completion(prompt=QUESTION, **options) -> tuple[str, dict]:
    return "/v1/completions", {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 12, **options}


def chat(messages=None, **options) -> tuple[str, dict]:
    return "/v1/chat/completions", {
        "model": "default",
        "messages": messages or CHAT,
        "temperature": 0,
        "max_tokens": 12,
        **options,
    }


STREAMED = {
    "generate": ("/generate", {"text": QUESTION, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}),
    "completion": completion(stop=["\n\n"]),
    "chat": chat(),
}
USAGE = {"stream_options": {"include_usage": True}}
PLAIN = {
    "n=2": generate(QUESTION, sampling={"n": 2}),
    "n=2 chat": ask(*chat(n=2)),
    "batch": generate([QUESTION, PASSAGE, QUESTION[:300]]),
    "batch of completions": ask(*completion([QUESTION, PASSAGE])),
    "logprobs": generate(QUESTION, return_logprob=True, logprob_start_len=0, top_logprobs_num=3),
    "logprobs of a chat": ask(*chat(logprobs=True, top_logprobs=2)),
    "regex": generate(PASSAGE + "The phone number of the mill is ", sampling={"regex": r"\d{3}-\d{4}", "ignore_eos": False}),
    "JSON schema": ask(*chat(max_tokens=40, response_format={"type": "json_schema",
                                                            "json_schema": {"name": "city", "schema": CITY}})),
    "frequency penalty": generate(QUESTION, 20, sampling={"frequency_penalty": 0.8}),
    "presence penalty": generate(QUESTION, 20, sampling={"presence_penalty": 0.8}),
    "repetition penalty": generate(QUESTION, 20, sampling={"repetition_penalty": 1.3}),
    "minimum of new tokens": generate(QUESTION, 20, sampling={"min_new_tokens": 16, "ignore_eos": False}),
    "logit bias": ask(*completion(logit_bias={"35640": -100, "198": -100})),
}  # fmt: skip


def forked_program(server) -> dict:
    """An `sgl.function` that reads a text once and asks it two things at the same time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SGLang's frontend language and what it imports
        import sglang as sgl

        @sgl.function
        def program(s):
            s += PASSAGE
            forks = s.fork(2)
            for fork, place in zip(forks, ("first", "third"), strict=True):
                fork += f"The {place} town is called" + sgl.gen("town", max_tokens=6, temperature=0, ignore_eos=True)
            s += f"Towns:{forks[0]['town']};{forks[1]['town']}. The river is" + sgl.gen("river", max_tokens=6, temperature=0)
            s["towns"] = [fork["town"] for fork in forks]

        state = program.run(backend=sgl.RuntimeEndpoint(server.url))
        return {"towns": state["towns"], "river": state["river"], "text": state.text()}


def two_turns(server) -> list:
    """A session: the second turn sends only what is new."""
    status, session = server.post("/open_session", {"capacity_of_str_len": 8192})
    assert status == 200, session
    answers, rid = [], None
    for text in (QUESTION, " And which town has a fair? Answer:"):
        answer = server.generate(text, 10, session_params={"id": session, "rid": rid})
        rid = answer["meta_info"]["id"]
        answers.append({"text": answer["text"], "prompt_tokens": answer["meta_info"]["prompt_tokens"]})
    assert server.post("/close_session", {"session_id": session})[0] == 200
    return answers


STOCK_CALLS = {
    **{f"whole {name}": ask(*call) for name, call in STREAMED.items()},
    **PLAIN,
    "sgl.function": forked_program,
    "session": two_turns,
}


@pytest.fixture
def server(kvdrive_fp32):
    """The server, and afterwards the evidence: every decoded token was sparse, fetched chunks, and attended everything."""
    before = kvdrive_fp32.state()
    yield kvdrive_fp32
    kvdrive_fp32.assert_alive()
    kvdrive_fp32.wait_idle()
    work = kvdrive_fp32.counted(before)
    assert work["sparse_tokens"] == work["decoded_tokens"] > 0
    assert work["attended_entries"] == work["stored_entries"] > 0
    assert work["misses"] > 0
    assert work["bytes_fetched"] > 0


@pytest.mark.parametrize("name", PLAIN)
def test_the_answer_equals_stock(stock, server, name):
    assert_same(PLAIN[name](server), stock[name])


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_says_what_a_whole_answer_says(stock, server, name):
    path, body = STREAMED[name]
    whole = ask(path, body)(server)
    assert_same(whole, stock[f"whole {name}"])
    assert_same(ask_stream(path, {**body, **(USAGE if path.startswith("/v1") else {})})(server), whole)


def test_a_program_that_forks_equals_stock(stock, server):
    assert_same(forked_program(server), stock["sgl.function"])


def test_a_session_of_two_turns_equals_stock(stock, server):
    answers = two_turns(server)
    assert_same(answers, stock["session"])
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + 10


def test_a_flush_changes_no_answer_and_is_refused_while_a_request_runs(server):
    before = server.generate(QUESTION, 24)["text"]
    assert server.request("/flush_cache", method="POST")[0] == 200
    body = {"text": QUESTION, "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}, "stream": True}
    with Connection(server, "/generate", body) as connection:
        events = connection.events()
        next(events)
        assert server.request("/flush_cache", method="POST")[0] == 400
        assert list(events)[-1]["text"] == before
    assert server.generate(QUESTION, 24)["text"] == before


def test_every_answer_tells_how_it_was_served(server):
    path, body = STREAMED["generate"]
    whole = server.post(path, body)[1]["meta_info"]
    with Connection(server, path, {**body, "stream": True}) as connection:
        last = list(connection.events())[-1]["meta_info"]
    spoken = server.post(*chat(return_meta_info=True))[1]["choices"][0]["meta_info"]
    for meta in (whole, last, spoken):
        (report,) = meta["kvdrive"]
        assert report["mode"] == "sparse"
        assert report["budget_tokens"] >= meta["prompt_tokens"]
        assert report["steps"] == meta["completion_tokens"] - 1
        assert report["attended_tokens"] == report["stored_tokens"] > meta["prompt_tokens"]
        assert 0 < report["hit_rate"] < 1


def test_metrics_are_those_the_readme_lists(server):
    named = set(re.findall(r"^\| `(sglang:kvdrive_\w+)`", README.read_text(), flags=re.MULTILINE))
    server.generate(QUESTION, 4)
    state = server.wait_idle()
    text = server.get("/metrics")[1]
    values = dict(re.findall(r"^(sglang:kvdrive_\w+)(?:\{[^}]*\})? (\S+)$", text, flags=re.MULTILINE))
    assert named == set(values)
    for name in ("decoded_tokens", "sparse_tokens", "hits", "misses", "bytes_fetched", "bytes_home_written"):
        assert float(values[f"sglang:kvdrive_{name}_total"]) == state[name] > 0
    assert float(values["sglang:kvdrive_hbm_total_bytes"]) == state["tiers"]["hbm"]["total_bytes"] > 0
    assert float(values["sglang:kvdrive_dram_used_bytes"]) == 0


def test_server_info_shows_every_flag_and_our_state(server):
    server.generate(QUESTION, 4)
    info = server.get("/server_info")[1]
    given = {"kv_manager": "kvdrive", "kvdrive_budget": "100%", "kvdrive_dense_below": "0", "kvdrive_hbm": "2GiB"}
    assert {name: info[name] for name in given} == given
    for name in (
        "dram",
        "preset",
        "budget_floor",
        "chunk_size",
        "window",
        "eviction",
        "sink_tokens",
        "local_tokens",
        "log_interval",
    ):
        assert f"kvdrive_{name}" in info
    state = info["internal_states"][0]["kvdrive"]
    assert state["tiers"]["dram"]["total_tokens"] * 46080 == state["tiers"]["dram"]["total_bytes"]
    assert state["config"]["budget"].startswith("100%")
    assert state["minimum_hbm_bytes"] <= state["tiers"]["hbm"]["total_bytes"]
    assert 0 < state["hit_rate"] < 1
