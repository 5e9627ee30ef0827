"""Requests of any length and number give everything back and let each other breathe; the server ends without a trace.

Every test ends with empty tiers; SGLang's strict memory checks run in the server's idle and busy loops and end it on a leak.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from kvsupport.clients import Connection, assert_unharmed, body_of, n_queued, probe
from kvsupport.slot import SMALL_PIECE, SMALL_RUNNING

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture
def server(kvdrive_small):
    """The server, unharmed afterwards."""
    expected = probe(kvdrive_small)
    yield kvdrive_small
    assert_unharmed(kvdrive_small, expected)


@pytest.mark.parametrize(
    ("name", "running", "n_groups", "n_requests"), [("kvdrive_small", SMALL_RUNNING, 4, 30), ("kvdrive_one", 1, 1, 20)]
)
def test_requests_of_any_length_leave_the_books_balanced_each_time(server_slot, name, running, n_groups, n_requests):
    """Twelve at once, in one piece or several, sealed or not; about every fourth reader leaves after a few of 100 tokens.

    Requests that ignore EOS are admitted only if they fit to their ends, so no prompt is prefilled twice.
    """
    server = server_slot.shared(name)
    expected = probe(server)
    draw = random.Random(13)
    most_running = most_queued = 0
    for _ in range(n_groups):
        before = server.state()
        jobs = []
        for _ in range(n_requests):
            n_read = draw.choice([None, None, None, draw.randint(1, 4)])
            n_new = 100 if n_read else draw.randint(1, 6)
            n_prompt = draw.randint(1, draw.choice([4, 30, 60, 60, 400]))
            jobs.append((body_of("/generate", n_prompt, n_new, seed=draw.randrange(99), stream=True), n_read))
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(read_some, server, *job) for job in jobs]
            while not all(future.done() for future in asked):
                most_running = max(most_running, server.state()["sequences"])
                most_queued = max(most_queued, n_queued(server))
                time.sleep(0.1)
        wanted = [body["sampling_params"]["max_new_tokens"] for body, _ in jobs]
        for n_new, (_, n_read), future in zip(wanted, jobs, asked, strict=True):
            assert 0 < future.result() < n_new if n_read else future.result() == n_new
        server.wait_idle()
        work = server.counted(before)
        assert work["prefill_tokens"] == sum(len(body["input_ids"]) for body, _ in jobs)
        assert work["decoded_tokens"] < sum(wanted) - n_requests, "everybody was served to the end"
        server.assert_alive()
    assert (running > 1) < most_running <= running
    assert most_queued > 0, "nobody had to wait: the test shows little"
    assert_unharmed(server, expected)


def read_some(server, body: dict, n_events: int | None) -> int:
    """Read a whole stream, or its first events and close. Returns how many tokens were read."""
    with Connection(server, "/generate", body) as connection:
        for i, event in enumerate(connection.events(), 1):
            n_tokens = event["meta_info"]["completion_tokens"]
            if i == n_events:
                break
    return n_tokens


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
