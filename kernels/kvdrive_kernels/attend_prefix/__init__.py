"""Prefill attention: a piece of new tokens over itself (causal) or over earlier tokens (full)."""

from kvdrive_kernels.attend_prefix.reference import attend_prefix as reference
from kvdrive_kernels.dispatch import Kernel

attend_prefix = Kernel("attend_prefix", cpu=reference)

__all__ = ["attend_prefix", "reference"]
