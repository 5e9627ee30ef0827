"""Requests that end early, in any state and any number, give everything back; the server ends without a trace.

Every test ends with empty tiers; SGLang's strict memory checks run in the server's idle and busy loops and end it on a leak.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from kvsupport.clients import Connection, wait_for
from kvsupport.slot import SMALL_PIECE, SMALL_RUNNING
from kvsupport.texts import story

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GONE_SECONDS = 15
"""SGLang looks for closed connections of requests that do not stream every four seconds."""


@pytest.fixture
def server(kvdrive_small):
    """The server; afterwards it lives, holds nothing in any tier, and answers a probe as before."""
    expected = kvdrive_small.generate("The probe says", 12)["output_ids"]
    yield kvdrive_small
    kvdrive_small.wait_idle()
    assert kvdrive_small.generate("The probe says", 12)["output_ids"] == expected
    kvdrive_small.assert_alive()


def body_of(path: str, n_prompt: int, n_new: int, *, seed: int = 0, **options) -> dict:
    """A greedy request with exactly `n_prompt` tokens (about so many in a chat)."""
    if path == "/generate":
        sampling = {"max_new_tokens": n_new, "temperature": 0, "ignore_eos": True}
        return {"input_ids": story(n_prompt, seed), "sampling_params": sampling, **options}
    common = {"model": "default", "max_tokens": n_new, "temperature": 0, "ignore_eos": True, **options}
    if path == "/v1/completions":
        return {"prompt": story(n_prompt, seed), **common}
    from kvsupport.texts import tokenizer

    return {"messages": [{"role": "user", "content": tokenizer().decode(story(n_prompt, seed))}], **common}


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_while_its_answer_is_made_is_forgotten(server, path, stream):
    before = server.state()
    with Connection(server, path, body_of(path, 300, 1200, stream=stream)) as connection:
        if stream:
            next(connection.events())
        wait_for(server, "decoding", lambda state: state["decoded_tokens"] > before["decoded_tokens"])
    state = server.wait_idle(GONE_SECONDS)
    assert 0 < state["decoded_tokens"] - before["decoded_tokens"] < 1100, "it was served to its end"


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_during_prefill_is_forgotten(server, stream):
    before = server.state()
    with Connection(server, "/v1/completions", body_of("/v1/completions", 1900, 100, stream=stream)):
        wait_for(server, "prefilling", lambda state: state["prefill_tokens"] > before["prefill_tokens"])
    state = server.wait_idle(GONE_SECONDS)
    assert state["prefill_tokens"] > before["prefill_tokens"]
    assert state["decoded_tokens"] - before["decoded_tokens"] < 100


STORM = """
import json, sys, threading, urllib.request
url, bodies = sys.argv[1], json.load(sys.stdin)
def ask(body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request).read()
for body in bodies:
    threading.Thread(target=ask, args=(body,)).start()
"""


@pytest.mark.parametrize("seconds", [1, 4])
def test_a_killed_load_client_leaves_nothing_behind(server, seconds):
    """Sixteen requests of which about four fit; queued, between pieces and decoding when their client dies."""
    import json

    before = server.state()
    bodies = [body_of("/generate", 400, 300, seed=i, stream=i % 2 == 0) for i in range(16)]
    client = subprocess.Popen([sys.executable, "-c", STORM, server.url + "/generate"], stdin=subprocess.PIPE, text=True)
    with client:
        client.stdin.write(json.dumps(bodies))
        client.stdin.close()
        wait_for(server, "busy", lambda state: state["sequences"] >= 2)
        time.sleep(seconds)
        client.send_signal(signal.SIGKILL)
    state = server.wait_idle(2 * GONE_SECONDS)
    assert 0 < state["prefill_tokens"] - before["prefill_tokens"] < 16 * 400, "every prompt was prefilled: nothing was aborted"


def test_abort_all_ends_every_request_and_no_token_follows(server):
    bodies = [body_of("/generate", 300, 600, seed=i, stream=True) for i in range(6)]
    begun = threading.Semaphore(0)

    def follow(body: dict) -> list[dict]:
        events = []
        with Connection(server, "/generate", body) as connection:
            for event in connection.events():
                events.append(event)
                begun.release()
        return events

    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(follow, body) for body in bodies]
        assert begun.acquire(timeout=60)
        assert server.post("/abort_request", {"abort_all": True})[0] == 200
    for future in streams:
        reasons = [event["meta_info"]["finish_reason"] for event in future.result()]
        assert reasons[-1]["type"] == "abort"
        assert not any(reasons[:-1])


def test_aborting_twice_or_an_unknown_request_harms_nobody(server):
    stays = body_of("/generate", 100, 20, seed=1)
    expected = server.post("/generate", stays)[1]["output_ids"]
    with (
        ThreadPoolExecutor(1) as pool,
        Connection(server, "/generate", body_of("/generate", 300, 600, rid="once", stream=True)) as c,
    ):
        events = c.events()
        next(events)
        neighbour = pool.submit(server.post, "/generate", stays)
        for rid in ("once", "once", "never-heard-of"):
            assert server.post("/abort_request", {"rid": rid})[0] == 200
        assert list(events)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert neighbour.result()[1]["output_ids"] == expected


def test_sixty_requests_of_any_length_leave_the_books_balanced_each_time(server):
    draw = random.Random(13)
    most = 0
    for _ in range(3):
        before = server.state()
        jobs = []
        for _ in range(20):
            body = body_of("/generate", draw.randint(1, 120), draw.randint(1, 10), seed=draw.randrange(99))
            jobs.append((body, draw.choice([None, None, None, draw.randint(1, 4)])))
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(read_some, server, *job) for job in jobs]
            while not all(future.done() for future in asked):
                most = max(most, server.state()["sequences"])
                time.sleep(0.1)
        assert all(future.result() > 0 for future in asked)
        state = server.wait_idle()
        assert state["prefill_tokens"] - before["prefill_tokens"] >= sum(len(body["input_ids"]) for body, _ in jobs)
        server.assert_alive()
    assert 1 < most <= SMALL_RUNNING


def read_some(server, body: dict, n_events: int | None) -> int:
    """Read a whole stream, or its first events and close. Returns how many were read."""
    with Connection(server, "/generate", {**body, "stream": True}) as connection:
        for i, _ in enumerate(connection.events(), 1):
            if i == n_events:
                break
        return len(connection.times)


def test_a_running_stream_gets_a_token_with_every_piece_of_another_prompt(server):
    n_prompt = 1500
    n_pieces = -(-n_prompt // SMALL_PIECE)
    with ThreadPoolExecutor(1) as pool, Connection(server, "/generate", body_of("/generate", 60, 300, stream=True)) as stream:
        events = stream.events()
        for _ in range(4):
            next(events)
        before = server.state()
        begin = time.monotonic()
        long = pool.submit(server.post, "/generate", body_of("/generate", n_prompt, 1, seed=5))
        while not long.done():
            next(events)
        end = time.monotonic()
        work = server.counted(before)
    status, answer = long.result()
    assert status == 200
    assert answer["meta_info"]["prompt_tokens"] == n_prompt
    assert work["prefill_tokens"] == n_prompt
    assert work["bytes_streamed"] > 0  # it did come in pieces
    during = [t for t in stream.times if begin < t < end]
    gaps = [b - a for a, b in zip([begin, *during], [*during, end], strict=True)]
    assert len(during) >= n_pieces - 1, (len(during), n_pieces, gaps)
    assert max(gaps) < 0.5 * (end - begin), gaps


def test_sigterm_ends_every_process_and_frees_port_and_shared_memory(server_slot, kvdrive_small):
    """Last of its server's tests: the next one that wants it has to start it again."""
    family = kvdrive_small.tree()
    assert len(family) >= 3
    segments = {path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid()}
    kvdrive_small.process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [process.cmdline() for process in alive]
    kvdrive_small.process.wait(timeout=5)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", kvdrive_small.port))
    after = {path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid()}
    assert not after - segments
    server_slot.stop()
