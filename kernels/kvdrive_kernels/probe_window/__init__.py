"""Hit or miss, and which resident chunks give way: the books of a window for one step."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.probe_window.reference import probe_window as reference

probe_window = Kernel("probe_window", cpu=reference)

__all__ = ["probe_window", "reference"]
