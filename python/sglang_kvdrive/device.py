"""Door 1: the machine's memory and compute device. The only core module that may ever name `torch.cuda`."""

from __future__ import annotations

import ctypes
import mmap

import torch

LARGE_PAGE = 2 << 20


class CpuDevice:
    """A CPU whose "HBM" is a byte-budgeted arena in RAM.

    Memory comes uninitialised; the kernel commits pages when they are first written.
    """

    name = "cpu"

    def allocate_hbm(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _in_large_pages(torch.empty(shape, dtype=dtype))

    def allocate_dram(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _in_large_pages(torch.empty(shape, dtype=dtype))


def _in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for 2 MiB pages: selected chunks lie far apart, and with 4 KiB pages most of them cost a walk of the page table.

    Only advice, and only for whole pages: where the kernel has none to give, everything works as without.
    """
    begin = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // LARGE_PAGE * LARGE_PAGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    return tensor
