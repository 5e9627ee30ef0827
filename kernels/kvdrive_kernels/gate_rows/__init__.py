"""SwiGLU's gate."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.gate_rows._cpp import gate_rows as native
from kvdrive_kernels.gate_rows.reference import gate_rows as reference

gate_rows = Kernel("gate_rows", native=native, cpu=reference)

__all__ = ["gate_rows", "reference"]
