"""A few rows times a large matrix."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.project_rows._cpp import project_rows as native
from kvdrive_kernels.project_rows.reference import project_rows as reference

project_rows = Kernel("project_rows", native=native, cpu=reference)

__all__ = ["project_rows", "reference"]
