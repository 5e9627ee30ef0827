"""Door 1: the machine's memory and compute device. The only core module that may ever name `torch.cuda`."""

from __future__ import annotations

import torch


class CpuDevice:
    """A CPU whose "HBM" is a byte-budgeted arena in RAM."""

    name = "cpu"

    def allocate_hbm(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory; the kernel commits pages when they are first written."""
        return torch.empty(shape, dtype=dtype)

    def allocate_dram(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)
