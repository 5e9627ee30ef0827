"""Prefill attention of prompt pieces over everything before them, at home."""

from kvdrive_kernels.attend_pieces._cpp import attend_pieces as native
from kvdrive_kernels.attend_pieces.reference import attend_pieces as reference
from kvdrive_kernels.dispatch import Kernel

attend_pieces = Kernel("attend_pieces", native=native, cpu=reference)

__all__ = ["attend_pieces", "reference"]
