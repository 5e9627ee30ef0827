"""Copy chunks between flat stores of chunks."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.gather_chunks._cpp import gather_chunks as native
from kvdrive_kernels.gather_chunks.reference import gather_chunks as reference

gather_chunks = Kernel("gather_chunks", native=native, cpu=reference, whole_vectors=False)

__all__ = ["gather_chunks", "reference"]
