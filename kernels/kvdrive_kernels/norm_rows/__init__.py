"""RMS norm of rows, with the residual added first."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.norm_rows._cpp import norm_rows as native
from kvdrive_kernels.norm_rows.reference import norm_rows as reference

norm_rows = Kernel("norm_rows", native=native, cpu=reference)

__all__ = ["norm_rows", "reference"]
