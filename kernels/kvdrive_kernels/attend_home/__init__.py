"""Decode attention over chunks where they lie at home."""

from kvdrive_kernels.attend_home._cpp import attend_home as native
from kvdrive_kernels.attend_home.reference import attend_home as reference
from kvdrive_kernels.dispatch import Kernel

attend_home = Kernel("attend_home", native=native, cpu=reference)

__all__ = ["attend_home", "reference"]
