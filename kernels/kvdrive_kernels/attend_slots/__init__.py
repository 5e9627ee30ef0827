"""Decode attention over chunks that lie in the slots of an arena."""

from kvdrive_kernels.attend_slots._cpp import attend_slots as native
from kvdrive_kernels.attend_slots.reference import attend_slots as reference
from kvdrive_kernels.dispatch import Kernel

attend_slots = Kernel("attend_slots", native=native, cpu=reference)

__all__ = ["attend_slots", "reference"]
