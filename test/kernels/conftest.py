"""Every kernel test runs with the PyTorch twins and with the C++ kernels, as wide as vectors get."""

from __future__ import annotations

import pytest
from kvdrive_kernels import native

WIDE = ("-DKVDRIVE_VECTOR_BYTES=64",)
"""The code of AVX-512, which any CPU with AVX2 can run as pairs of vectors."""


@pytest.fixture(params=["torch", "best", "wide", "generic"], autouse=True)
def kernels(request, monkeypatch):
    """Which implementation runs."""
    from tvm_ffi import load_module

    levels = {"best": (native.best_level(),), "wide": (native.best_level(), WIDE), "generic": ("generic",)}
    found = load_module(str(native.build(*levels[request.param]))) if request.param in levels else None
    monkeypatch.setattr(native, "library", lambda: found)
    return request.param
