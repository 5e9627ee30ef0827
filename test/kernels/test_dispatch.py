"""The device of the tensors decides which implementation runs; nothing falls back in silence."""

import importlib
import pkgutil

import kvdrive_kernels
import pytest
import torch
from kvdrive_kernels.dispatch import Kernel

OPERATIONS = sorted(m.name for m in pkgutil.iter_modules(kvdrive_kernels.__path__) if m.ispkg)


@pytest.fixture
def kernels():
    """These tests choose for themselves."""


def test_an_unknown_device_raises_and_names_the_known_ones():
    kernel = Kernel("double", cpu=lambda x: 2 * x)
    with pytest.raises(NotImplementedError, match=r"kernel double has no implementation for device meta, only for .*cpu"):
        kernel(torch.zeros(1, device="meta"))


def test_a_second_implementation_for_a_device_is_refused():
    kernel = Kernel("double", cpu=lambda x: 2 * x)
    with pytest.raises(ValueError, match="kernel double already has an implementation for cpu"):
        kernel.register("cpu", lambda x: x + x)
    assert kernel(torch.ones(1)).item() == 2


def test_a_registered_device_is_used():
    kernel = Kernel("name", cpu=lambda _: "cpu")
    kernel.register("meta", lambda _: "meta")
    assert kernel.devices == ("cpu", "meta")
    assert kernel(torch.zeros(1, device="meta")) == "meta"
    assert kernel(torch.zeros(1)) == "cpu"


def test_arguments_may_be_named():
    kernel = Kernel("double", cpu=lambda x, times: times * x)
    assert kernel(x=torch.ones(1), times=3).item() == 3
    assert kernel(times=3, x=torch.ones(1)).item() == 3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_plain_twin_on_the_cpu(operation):
    package = importlib.import_module(f"kvdrive_kernels.{operation}")
    kernel = getattr(package, operation)
    assert isinstance(kernel, Kernel)
    assert kernel.name == operation
    assert "cpu" in kernel.devices
    assert package.reference.__doc__.strip()
