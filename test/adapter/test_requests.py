"""Requests at the edges, as users report them: odd lengths, empty prompts, many neighbours, stop strings, extreme limits.

The same server as in `test_api.py`: all is attended, sparsely, and must equal stock SGLang.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from kvsupport.clients import ask, ask_stream, assert_same, generate
from kvsupport.texts import PASSAGE, instruction_last, secret_prompt

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LAST = {n: partial(instruction_last, n, 1000 + n, seed=n) for n in (197, 198, 199, 319, 321, 385, 643)}
"""Around chunks of 4, blocks of 64 and prefill pieces of 320."""
SECRETS = {n: partial(secret_prompt, n, f"room {n}", 4000 + 7 * n, seed=n) for n in (40, 60, 100, 200, 330, 500, 700, 1000)}

COUNTING = PASSAGE + "one two three four five six seven eight nine ten\n" * 3 + "one two three"
STOPS = {
    "one token": " six",
    "four tokens": " six seven eight nine",
    "split over tokens": "ix sev",
    "list of four": ["zebra", "ven ei", " nine", "ten"],
}
SCRIPTS = {
    "Chinese": (PASSAGE + "一、二、三、四、五、六、七、八、九、十。\n一、二、三、四、", "、七"),
    "emoji with joiners": (PASSAGE + "👩‍👩‍👧‍👦 🏳️‍🌈 👩‍👩‍👧‍👦 🏳️‍🌈 👩‍👩‍👧‍👦 🏳️‍🌈 👩‍👩‍👧‍👦", "🌈"),
    "Arabic": (PASSAGE + "مدرسة كتاب قلم سيف\n" * 3 + "مدرسة كتاب", "سيف"),
    "NUL": (PASSAGE + "a\0b\0c\0a\0b\0c\0a\0b", "\0c"),
}

SHORT = {"max_new_tokens": 4, "temperature": 0}
NOTHING = {
    "empty text": ("/generate", {"text": ""}),
    "list of an empty text": ("/generate", {"text": [""]}),
    "an empty and a good text": ("/generate", {"text": ["", "a"]}),
    "no token ids": ("/generate", {"input_ids": []}),
    "an empty list of token ids": ("/generate", {"input_ids": [[]]}),
    "neither text nor ids": ("/generate", {}),
    "empty completion": ("/v1/completions", {"model": "default", "prompt": ""}),
    "completion without prompts": ("/v1/completions", {"model": "default", "prompt": []}),
}
"""Requests without a single token. Stock SGLang ends at the first one, so that there is nothing to compare with."""
ODD = {
    "only BOS": ask("/generate", {"input_ids": [1], "sampling_params": SHORT}),
    "no texts": ask("/generate", {"text": [], "sampling_params": SHORT}),
    "a space": ask("/generate", {"text": " ", "sampling_params": SHORT}),
    "lone surrogate": ask("/generate", {"text": "a\ud800b", "sampling_params": SHORT}),
    "empty chat content": ask("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": ""}],
                                                       "max_tokens": 4, "temperature": 0}),
    "chat without messages": ask("/v1/chat/completions", {"model": "default", "messages": [], "max_tokens": 4, "temperature": 0}),
}  # fmt: skip

LIMITS = {str(limit): limit for limit in (0, 1, 2, 10**6, -1, None, "5", "five")}
LIMITED_PATHS = ("/generate", "/v1/completions")
STOP_SOON = [" nine", "\n"]


def limited(path: str, limit) -> tuple[str, dict]:
    """A request whose stop strings end it after a few tokens, if the limit does not."""
    prompt = COUNTING.rstrip()
    if path == "/generate":
        return path, {"text": prompt, "sampling_params": {"max_new_tokens": limit, "temperature": 0, "stop": STOP_SOON}}
    return path, {"model": "default", "prompt": prompt, "max_tokens": limit, "temperature": 0, "stop": STOP_SOON}


def exactly_the_rest(server) -> list:
    """As many new tokens as the context has left, and one more."""
    path, body = limited("/v1/completions", 1)
    used = server.post(path, body)[1]["usage"]["prompt_tokens"]
    return [ask(path, {**body, "max_tokens": 8192 - used + more})(server) for more in (-1, 0, 1)]


STOCK_CALLS = {
    **{f"instruction last {n}": generate(prompt, 8) for n, prompt in LAST.items()},
    **{f"secret {n}": generate(prompt, 8) for n, prompt in SECRETS.items()},
    **{f"stop {name}": generate(COUNTING, sampling={"stop": stop}) for name, stop in STOPS.items()},
    **{f"script {name}": generate(prompt, 12) for name, (prompt, _) in SCRIPTS.items()},
    **{f"stop in {name}": generate(prompt, 12, sampling={"stop": stop}) for name, (prompt, stop) in SCRIPTS.items()},
    **{f"odd {name}": call for name, call in ODD.items()},
    **{
        f"limit {name} of {path}": ask(*limited(path, n))
        for name, n in LIMITS.items()
        for path in ("/generate", "/v1/completions")
    },
    "the rest": exactly_the_rest,
    "n=4": generate(partial(secret_prompt, 200, "the tower", 5512), 4, sampling={"n": 4}),
}


def work_of(server, before: dict) -> dict:
    """What the server did since; every decoded token was sparse and nothing was left out."""
    server.assert_alive()
    server.wait_idle()
    work = server.counted(before)
    assert work["sparse_tokens"] == work["decoded_tokens"]
    assert work["attended_entries"] == work["stored_entries"]
    return work


def test_an_instruction_in_the_last_tokens_is_followed_at_any_length(stock, kvdrive_fp32):
    before = kvdrive_fp32.state()
    for n, prompt in LAST.items():
        answer = generate(prompt, 8)(kvdrive_fp32)
        assert_same(answer, stock[f"instruction last {n}"])
        assert str(1000 + n) in answer["answer"]["text"], (n, answer)
    work = work_of(kvdrive_fp32, before)
    assert work["misses"] > 0
    assert work["bytes_streamed"] > 0  # prompts of more than one piece read their first pieces back


def test_eight_prompts_at_once_answer_as_each_alone(stock, kvdrive_fp32):
    before = kvdrive_fp32.state()
    with ThreadPoolExecutor(len(SECRETS)) as pool:
        answers = dict(zip(SECRETS, pool.map(lambda prompt: generate(prompt, 8)(kvdrive_fp32), SECRETS.values()), strict=True))
    for n, answer in answers.items():
        assert_same(answer, stock[f"secret {n}"])
    told = [n for n in SECRETS if str(4000 + 7 * n) in answers[n]["answer"]["text"]]
    assert len(told) >= 6, f"secrets told only at {told}: {[a['answer']['text'] for a in answers.values()]}"
    work = work_of(kvdrive_fp32, before)
    assert work["decode_steps"] < work["decoded_tokens"], "the requests never shared a step"
    assert work["misses"] > 0


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_string_ends_the_answer_where_stock_ends_it(stock, kvdrive_fp32, name):
    before = kvdrive_fp32.state()
    answer = generate(COUNTING, sampling={"stop": STOPS[name]})(kvdrive_fp32)
    assert_same(answer, stock[f"stop {name}"])
    assert_same(generate(COUNTING, sampling={"stop": STOPS[name]}, stream=True)(kvdrive_fp32), answer)
    assert answer["answer"]["finish_reason"]["type"] == "stop"
    stops = [STOPS[name]] if isinstance(STOPS[name], str) else STOPS[name]
    assert not any(stop in answer["answer"]["text"] for stop in stops)
    assert work_of(kvdrive_fp32, before)["misses"] > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_other_scripts_arrive_whole_streamed_or_not(stock, kvdrive_fp32, name):
    before = kvdrive_fp32.state()
    prompt, stop = SCRIPTS[name]
    for key, options in ((f"script {name}", {}), (f"stop in {name}", {"sampling": {"stop": stop}})):
        answer = generate(prompt, 12, **options)(kvdrive_fp32)
        assert_same(answer, stock[key])
        assert_same(generate(prompt, 12, stream=True, **options)(kvdrive_fp32), answer)
    assert stop not in answer["answer"]["text"]
    assert work_of(kvdrive_fp32, before)["misses"] > 0


def test_degenerate_prompts_end_as_in_stock_and_leave_neighbours_alone(stock, kvdrive_fp32):
    before = kvdrive_fp32.state()
    neighbours = (200, 500)
    with ThreadPoolExecutor(len(neighbours) + 4) as pool:
        good = {n: pool.submit(generate(SECRETS[n], 8), kvdrive_fp32) for n in neighbours}
        nothing = {name: pool.submit(kvdrive_fp32.post, path, body) for name, (path, body) in NOTHING.items()}
        odd = {name: pool.submit(call, kvdrive_fp32) for name, call in ODD.items()}
    for name, future in nothing.items():
        status, answer = future.result()
        assert 400 <= status < 500, (name, answer)
        assert isinstance(answer, dict), (name, answer)
    for name, future in odd.items():
        assert_same({name: future.result()}, {name: stock[f"odd {name}"]})
    for n, future in good.items():
        assert_same(future.result(), stock[f"secret {n}"])
    assert work_of(kvdrive_fp32, before)["misses"] > 0


def test_a_token_id_that_the_model_lacks_is_refused(kvdrive_fp32):
    """Stock SGLang looks it up in the embedding and ends, so that there is nothing to compare with."""
    for unknown in (49152, 10**6, -1):
        status, answer = kvdrive_fp32.post("/generate", {"input_ids": [5, unknown, 7], "sampling_params": SHORT})
        assert status == 400, answer
        assert str(unknown) in str(answer)
    kvdrive_fp32.assert_alive()
    kvdrive_fp32.wait_idle()


@pytest.mark.parametrize("path", LIMITED_PATHS)
def test_any_limit_of_new_tokens_ends_as_in_stock(stock, kvdrive_fp32, path):
    for name, limit in LIMITS.items():
        assert_same({name: ask(*limited(path, limit))(kvdrive_fp32)}, {name: stock[f"limit {name} of {path}"]})
        kvdrive_fp32.wait_idle()
    kvdrive_fp32.assert_alive()


def test_exactly_the_rest_of_the_context_is_allowed_and_one_more_is_not(stock, kvdrive_fp32):
    answers = exactly_the_rest(kvdrive_fp32)
    assert_same(answers, stock["the rest"])
    kvdrive_fp32.wait_idle()


def test_four_answers_to_one_long_prompt_are_each_those_of_stock(stock, kvdrive_fp32):
    before = kvdrive_fp32.state()
    path, body = "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "n": 4}}
    body["input_ids"] = secret_prompt(200, "the tower", 5512)
    answer = ask(path, body)(kvdrive_fp32)
    assert_same(answer, stock["n=4"])
    assert len(answer["answer"]) == 4
    assert_same(ask_stream(path, body)(kvdrive_fp32), answer)
    assert work_of(kvdrive_fp32, before)["prefill_tokens"] >= 2 * 4 * 200  # no prefix is shared: each answer prefills
