"""New keys and values go to their chunks, at home or in the arena."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.store_tokens._cpp import store_tokens as native
from kvdrive_kernels.store_tokens.reference import store_tokens as reference

store_tokens = Kernel("store_tokens", native=native, cpu=reference)

__all__ = ["reference", "store_tokens"]
