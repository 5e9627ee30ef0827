"""Merge partial attention results by their log-sum-exp."""

from kvdrive_kernels.merge_state.reference import merge_state as reference
from kvdrive_kernels.dispatch import Kernel

merge_state = Kernel("merge_state", cpu=reference)

__all__ = ["merge_state", "reference"]
