"""The platform entry point acts only where SGLang could not start anyway."""

import importlib
import importlib.util
import os
import sys

import pytest
from sglang_kvdrive.adapter import bootstrap

KERNELS = "sgl_kernel"
SWITCH = "SGLANG_USE_CPU_ENGINE"


@pytest.fixture
def no_kernels(monkeypatch):
    """A process that has not imported sgl_kernel, without the environment switch, on a machine without an accelerator."""
    for name in [name for name in sys.modules if name == KERNELS or name.startswith(KERNELS + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(bootstrap, "has_accelerator", lambda: False)


def plant(monkeypatch, folder, text):
    """A package sgl_kernel with a submodule that wins over an installed one."""
    (folder / KERNELS).mkdir()
    (folder / KERNELS / "__init__.py").write_text(f"import {KERNELS}.loader\n{text}\n")
    (folder / KERNELS / "loader.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("no_kernels")
def test_nothing_happens_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(bootstrap, "has_accelerator", lambda: True)
    assert bootstrap.activate() is None
    assert KERNELS not in sys.modules
    assert SWITCH not in os.environ


@pytest.mark.usefixtures("no_kernels")
def test_nothing_happens_where_the_real_kernels_import(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "real = True")
    assert bootstrap.activate() is None
    assert sys.modules[KERNELS].real
    assert SWITCH not in os.environ


@pytest.mark.usefixtures("no_kernels")
def test_kernels_that_fail_to_import_are_replaced_and_leave_nothing_behind(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "raise ImportError('libcuda.so.1: cannot open shared object file')")
    assert bootstrap.activate() is None
    assert sys.modules[KERNELS].__kvdrive_stand_in__
    assert KERNELS + ".loader" not in sys.modules
    assert os.environ[SWITCH] == "1"


@pytest.mark.usefixtures("no_kernels")
def test_a_switch_that_the_user_set_stays(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "raise ImportError")
    monkeypatch.setenv(SWITCH, "0")
    bootstrap.activate()
    assert os.environ[SWITCH] == "0"


@pytest.mark.usefixtures("no_kernels")
def test_activating_twice_keeps_the_first_stand_in(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "raise ImportError")
    bootstrap.activate()
    first = sys.modules[KERNELS]
    bootstrap.activate()
    assert sys.modules[KERNELS] is first


@pytest.mark.usefixtures("no_kernels")
def test_the_stand_in_can_be_imported_from_but_not_called(monkeypatch):
    monkeypatch.setitem(sys.modules, KERNELS, bootstrap.stand_in())
    kernel = getattr(importlib.import_module(KERNELS), "silu_and_mul")  # noqa: B009, what `from x import y` does
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul needs an accelerator"):
        kernel()
    with pytest.raises(ImportError):
        importlib.import_module(KERNELS + ".flash_attn")
    assert importlib.util.find_spec(KERNELS) is not None


def test_this_machine_answers_the_accelerator_question():
    assert bootstrap.has_accelerator() in (True, False)
