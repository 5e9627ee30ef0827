"""Walk the groups by score until exactly K chunks are chosen; the last group is cut by chunk score."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.fill_chunks.reference import fill_chunks as reference

fill_chunks = Kernel("fill_chunks", cpu=reference)

__all__ = ["fill_chunks", "reference"]
