"""Pick the implementation of an operation by the device of its tensors. No silent fallback."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Kernel:
    """One operation with at most one implementation per device type.

    Calling it runs the implementation registered for the device of the first tensor argument.

    Raises:
        NotImplementedError: the operation has no implementation for that device.
    """

    def __init__(self, name: str, **implementations: Callable):
        self.name = name
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
        device = next(a.device.type for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        function = self._implementations.get(device)
        if function is None:
            raise NotImplementedError(f"kernel {self.name} has no implementation for device {device}, only for {self.devices}")
        return function(*args, **kwargs)
