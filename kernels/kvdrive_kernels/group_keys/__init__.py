"""Spherical k-means of chunk means: the groups of the index (RetroInfer's recipe)."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.group_keys._cpp import group_keys as native
from kvdrive_kernels.group_keys.reference import group_keys as reference

group_keys = Kernel("group_keys", native=native, cpu=reference)

__all__ = ["group_keys", "reference"]
