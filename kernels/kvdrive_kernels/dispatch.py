"""Pick the implementation of an operation: by the device of its tensors, and on the cpu native or twin."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvdrive_kernels import native

NATIVE_DIM = 16
"""Head dimensions that are multiples of it fill whole vectors on every instruction set; the twins serve the others."""


class Kernel:
    """One operation with at most one implementation per device type, and on the cpu a native one beside the twin.

    Calling it runs the implementation registered for the device of the first tensor argument.

    Args:
        name: of the operation.
        native: the fast implementation on the cpu; its first argument is the loaded library.
        whole_vectors: the native one needs a first tensor whose last dimension is a multiple of `NATIVE_DIM`, and q of the
            dtype of K and V; the twin serves the rest.
        implementations: by device type. "cpu" is the twin, which runs where the native one cannot.

    Raises:
        NotImplementedError: the operation has no implementation for that device.
    """

    def __init__(self, name: str, *, native: Callable | None = None, whole_vectors: bool = True, **implementations: Callable):
        self.name = name
        self._native = native
        self._unit = NATIVE_DIM if whole_vectors else 1
        self._implementations: dict[str, Callable] = {}
        for device, function in implementations.items():
            self.register(device, function)

    def register(self, device: str, function: Callable) -> None:
        if device in self._implementations:
            raise ValueError(f"kernel {self.name} already has an implementation for {device}")
        self._implementations[device] = function

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._implementations)

    def __call__(self, *args, **kwargs):
        first = args[0] if args else next(a for a in kwargs.values() if isinstance(a, torch.Tensor))
        device = first.device.type
        if device == "cpu" and self._native is not None and self._fits(args or tuple(kwargs.values())):
            library = native.library()
            if library is not None:
                return self._native(library, *args, **kwargs)
        function = self._implementations.get(device)
        if function is None:
            raise NotImplementedError(f"kernel {self.name} has no implementation for device {device}, only for {self.devices}")
        return function(*args, **kwargs)

    def _fits(self, args: tuple) -> bool:
        """Whole vectors, and the second tensor, if it holds floats, of the first one's dtype: what the native versions take."""
        first, second = args[0], args[1] if len(args) > 1 else None
        same = not isinstance(second, torch.Tensor) or not second.is_floating_point() or second.dtype == first.dtype
        return first.shape[-1] % self._unit == 0 and same
