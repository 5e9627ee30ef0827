"""Calls to a server as values: made once to stock SGLang, made again to ours, and compared."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvsupport.server import Server
from kvsupport.texts import story, tokenizer

Call = Callable[[Server], Any]
"""Asks a server something and returns plain data that another server can be held to."""

LOGPROB_TOLERANCE = 1e-4
AS_FAST = 1.2
"""How many times as long as on a quiet server something may take that disturbed nobody."""

_META = (
    "finish_reason", "prompt_tokens", "completion_tokens", "input_token_logprobs", "output_token_logprobs",
    "input_top_logprobs", "output_top_logprobs",
)  # fmt: skip


class Recording:
    """Answers by the names of their calls. A call that failed there fails the test that asks for it."""

    def __init__(self, answers: dict):
        self._answers = answers

    def __getitem__(self, name: str):
        answer = self._answers[name]
        if isinstance(answer, Exception):
            raise AssertionError(f"the reference could not be asked {name!r}") from answer
        return answer


def record(start: Callable[[], Server], calls: dict[str, Call]) -> Recording:
    """Make all calls, one after the other, to the server that `start` returns."""
    server = start()
    answers = {}
    for name, call in calls.items():
        try:
            answers[name] = call(server)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            answers[name] = error
        if server.process.poll() is not None:
            raise RuntimeError(f"the reference ended at the call {name!r} or shortly before:\n{server.tail(1000)}")
    return Recording(answers)


def ask(path: str, body: dict) -> Call:
    """A call that returns status and the essence of the answer."""

    def call(server: Server) -> dict:
        status, answer = server.post(path, body)
        return {"status": status, "answer": essence(answer) if status == 200 else None}

    return call


def ask_stream(path: str, body: dict) -> Call:
    """The same as a stream; equals what `ask` returns for the same body."""

    def call(server: Server) -> dict:
        with Connection(server, path, {**body, "stream": True}) as connection:
            events = list(connection.events())
            if connection.status != 200:
                return {"status": connection.status, "answer": None}
            assert connection.done, f"{path}: the stream ended without [DONE]"
        return {"status": 200, "answer": _joined_generate(events) if path == "/generate" else _joined_choices(events)}

    return call


def generate(prompt, max_new_tokens: int = 12, *, sampling: dict | None = None, stream: bool = False, **options) -> Call:
    """`/generate`, greedy, ignoring EOS unless told otherwise.

    Args:
        prompt: a text, token ids, a list of texts, or a function that returns one of these when the call is made.
    """
    settings = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **(sampling or {})}

    def call(server: Server) -> dict:
        given = prompt() if callable(prompt) else prompt
        key = "text" if isinstance(given, str) or isinstance(given[0], str) else "input_ids"
        return (ask_stream if stream else ask)("/generate", {key: given, "sampling_params": settings, **options})(server)

    return call


def body_of(path: str, n_prompt: int, n_new: int, *, seed: int = 0, **options) -> dict:
    """A greedy request with exactly `n_prompt` tokens (about so many in a chat)."""
    if path == "/generate":
        sampling = {"max_new_tokens": n_new, "temperature": 0, "ignore_eos": True}
        return {"input_ids": story(n_prompt, seed), "sampling_params": sampling, **options}
    common = {"model": "default", "max_tokens": n_new, "temperature": 0, "ignore_eos": True, **options}
    if path == "/v1/completions":
        return {"prompt": story(n_prompt, seed), **common}
    return {"messages": [{"role": "user", "content": tokenizer().decode(story(n_prompt, seed))}], **common}


def essence(answer):
    """What must not depend on who serves: no ids, no times."""
    if isinstance(answer, list):
        return [essence(item) for item in answer]
    if "meta_info" in answer:
        meta = {name: answer["meta_info"][name] for name in _META if name in answer["meta_info"]}
        return {"text": answer.get("text"), "output_ids": answer.get("output_ids"), **meta}
    if "choices" in answer:
        usage = answer.get("usage") or {}
        return {
            "choices": [
                {
                    "index": choice["index"],
                    "text": choice["text"] if "text" in choice else choice["message"]["content"],
                    "finish_reason": choice["finish_reason"],
                    "matched_stop": choice.get("matched_stop"),
                    "logprobs": choice.get("logprobs"),
                }
                for choice in answer["choices"]
            ],
            "usage": {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        }
    return answer


def differences(ours, theirs, at: str = "") -> Iterator[str]:
    """Where two answers differ; numbers with a fraction may differ by `LOGPROB_TOLERANCE`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys(), key=str):
            if name not in ours or name not in theirs:
                yield f"{at}.{name}: only in {'ours' if name in ours else 'theirs'}"
            else:
                yield from differences(ours[name], theirs[name], f"{at}.{name}")
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{at}: {len(ours)} items instead of {len(theirs)}: {ours!r:.300} != {theirs!r:.300}"
        for i, pair in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(*pair, f"{at}[{i}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not abs(ours - theirs) <= LOGPROB_TOLERANCE:
            yield f"{at}: {ours} != {theirs}"
    elif ours != theirs:
        yield f"{at}: {ours!r:.300} != {theirs!r:.300}"


def assert_same(ours, theirs) -> None:
    found = list(differences(ours, theirs))
    assert not found, "\n".join(found[:12])


def wait_for(server: Server, what: str, holds: Callable[[dict], bool], seconds: float = 60) -> dict:
    """Poll our state until `holds(state)`."""
    deadline = time.monotonic() + seconds
    while not holds(state := server.state()):
        assert time.monotonic() < deadline, f"not {what} after {seconds} s: {state}"
    return state


def _joined_generate(events: list[dict]) -> dict | list:
    """The last event of each choice carries everything; those before must be its beginnings."""
    last: dict[int, dict] = {}
    for event in events:
        index = event.get("index", 0)
        if index in last:
            earlier = last[index]["text"].rstrip("\ufffd")
            assert event["text"].startswith(earlier), f"{event['text']!r} does not continue {earlier!r}"
        last[index] = event
    answers = [essence(last[index]) for index in sorted(last)]
    return answers if len(answers) > 1 else answers[0]


def _joined_choices(events: list[dict]) -> dict:
    choices: dict[int, dict] = {}
    usage = {}
    for event in events:
        usage = event.get("usage") or usage
        for part in event["choices"]:
            empty = {"index": part["index"], "text": "", "finish_reason": None, "matched_stop": None, "logprobs": None}
            choice = choices.setdefault(part["index"], empty)
            choice["text"] += (part["text"] if "text" in part else part["delta"].get("content")) or ""
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            choice["matched_stop"] = part.get("matched_stop") or choice["matched_stop"]
    usage = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


@dataclass
class Connection:
    """A request whose connection the test holds in its hand: read it event by event, or walk away from it."""

    server: Server
    path: str
    body: dict
    timeout: float = 300
    status: int | None = None
    done: bool = False
    times: list[float] = field(default_factory=list)
    """When each event arrived."""

    def __post_init__(self) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=self.timeout)
        self._http.request("POST", self.path, json.dumps(self.body), {"content-type": "application/json"})
        self._response = None

    def events(self) -> Iterator[dict]:
        """Parsed `data:` events until `[DONE]`. A refusal has none; `status` tells."""
        self._response = self._response or self._http.getresponse()
        self.status = self._response.status
        while line := self._response.readline():
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip().decode()
            if text == "[DONE]":
                self.done = True
                return
            self.times.append(time.monotonic())
            yield json.loads(text)

    def close(self) -> None:
        if self._response is not None:
            with contextlib.suppress(OSError):
                self._response.close()
        self._http.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error) -> None:
        self.close()


def first_token_seconds(server: Server) -> float:
    """From asking to the first token of a short prompt."""
    begin = time.monotonic()
    with Connection(server, "/generate", body_of("/generate", 120, 1, seed=60, stream=True)) as connection:
        next(connection.events())
        return connection.times[0] - begin


def n_queued(server: Server) -> int:
    """Requests that SGLang holds in its queue and that hold nothing yet."""
    status, answer = server.get("/v1/loads")
    assert status == 200, answer
    return answer["loads"][0]["num_waiting_reqs"]


def probe(server: Server) -> list[int]:
    """Tokens of a prompt that is long enough to be sealed and to need a window."""
    return server.generate(story(340, seed=62), 4)["output_ids"]


def assert_unharmed(server: Server, expected: list[int]) -> None:
    """It lives, holds nothing in any tier, and answers the `probe` as before."""
    server.wait_idle()
    assert probe(server) == expected
    server.wait_idle()
    server.assert_alive()
