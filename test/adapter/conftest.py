"""Servers for the tests that need one. They run one after the other, never side by side."""

from __future__ import annotations

import pytest
from kvsupport.clients import record
from kvsupport.slot import SERVERS, ServerSlot


def pytest_collection_modifyitems(items):
    """Tests with a server come last, grouped by server, so that each server starts once.

    A test's server is the one of `SERVERS` that a fixture or a parameter of the test is called.
    """
    order = list(SERVERS)

    def rank(item):
        fixtures = getattr(item, "fixturenames", ())
        if "server_slot" not in fixtures:
            return -1
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = {*fixtures, *(value for value in parameters if isinstance(value, str))}
        return next((order.index(name) for name in order if name in names), len(order))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def model():
    """Folder of the small model."""
    from sglang_kvdrive.cli.model import ensure_smollm2

    return ensure_smollm2()


@pytest.fixture(scope="session")
def tokenizer(model):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
def server_slot(model, tmp_path_factory):
    """The one place for a running server: `server_slot.start(name, flags=...)` stops the one before."""
    slot = ServerSlot(model, tmp_path_factory.mktemp("servers"))
    yield slot
    slot.stop()


@pytest.fixture(scope="session")
def stock(request, server_slot):
    """Answers of stock SGLang in fp32 to every `STOCK_CALLS` (name to `Call`) of the test modules that run.

    The server is asked everything at once, one call after the other, and stopped.
    """
    calls: dict = {}
    for module in dict.fromkeys(getattr(item, "module", None) for item in request.session.items):
        ours = getattr(module, "STOCK_CALLS", {})
        assert not calls.keys() & ours.keys(), f"named twice: {sorted(calls.keys() & ours.keys())}"
        calls |= ours
    recording = record(lambda: server_slot.shared("stock_fp32"), calls)
    server_slot.stop()
    return recording


@pytest.fixture
def kvdrive_fp32(server_slot, request):
    """Budget 100%, nothing dense, fp32: everything through the sparse path and everything exact."""
    if "stock" in request.fixturenames:
        request.getfixturevalue("stock")  # before our server starts, or it would have to start twice
    return server_slot.shared("kvdrive_fp32")


@pytest.fixture
def kvdrive_small(server_slot, request):
    """2,048 tokens in all tiers, an arena smaller than that, budget 288 tokens, pieces of 256, fp32."""
    if "stock" in request.fixturenames:
        request.getfixturevalue("stock")
    return server_slot.shared("kvdrive_small")
