"""Rotary position embedding of query and key heads."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.rotate_heads._cpp import rotate_heads as native
from kvdrive_kernels.rotate_heads.reference import rotate_heads as reference

rotate_heads = Kernel("rotate_heads", native=native, whole_vectors=False, cpu=reference)

__all__ = ["reference", "rotate_heads"]
