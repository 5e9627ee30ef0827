"""Every test starts from the same seeds, and uninitialised memory is poison."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from kvsupport.poison import poisoned

# Shared machines stall for seconds: no deadlines. The same examples every time: a red run can be repeated.
settings.register_profile(
    "kvdrive",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("kvdrive")


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(request, monkeypatch):
    """`torch.empty` returns NaN, or numbers far out of range: who reads what was never written is found out.

    Tests that run SGLang are left alone: what stock code does with its own buffers is not ours to judge.
    """
    if request.node.get_closest_marker("sglang") is None:
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
