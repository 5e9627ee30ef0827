"""Make uninitialised memory visible: NaN in floats, a number that is no valid position in integers."""

from __future__ import annotations

import functools

import torch


def poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poisoned(factory):
    """The same factory (`torch.empty`, `torch.empty_like`) with poison in what it returns."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        tensor = factory(*args, **kwargs)
        return poison(tensor) if tensor.device.type == "cpu" and tensor.layout is torch.strided else tensor

    return wrapped
