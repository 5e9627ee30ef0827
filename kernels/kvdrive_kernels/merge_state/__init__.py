"""Merge partial attention results by their log-sum-exp."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.merge_state.reference import merge_state as reference

merge_state = Kernel("merge_state", cpu=reference)

__all__ = ["merge_state", "reference"]
