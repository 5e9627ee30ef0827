"""Mean key of every chunk: what a chunk looks like to the index."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.mean_keys.reference import mean_keys as reference

mean_keys = Kernel("mean_keys", cpu=reference)

__all__ = ["mean_keys", "reference"]
