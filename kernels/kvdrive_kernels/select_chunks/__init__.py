"""Stage S in one call: score all groups, take the best, cut the last."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.select_chunks._cpp import select_chunks as native
from kvdrive_kernels.select_chunks.reference import select_chunks as reference

select_chunks = Kernel("select_chunks", native=native, cpu=reference)

__all__ = ["reference", "select_chunks"]
