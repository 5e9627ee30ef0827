"""Stage H in one call: match a selection with the books of the windows and enter it."""

from kvdrive_kernels.dispatch import Kernel
from kvdrive_kernels.probe_books._cpp import probe_books as native
from kvdrive_kernels.probe_books.reference import probe_books as reference

probe_books = Kernel("probe_books", native=native, cpu=reference, whole_vectors=False)

__all__ = ["probe_books", "reference"]
