"""Platform entry point: make SGLang importable on a machine without an accelerator.

SGLang activates every `sglang.srt.platforms` entry point in every process, before it imports `sgl_kernel` and before it
asks whether it runs on a CPU. `sgl_kernel` wheels from the package index hold CUDA code only, so on a CPU their import
fails, and with it every SGLang start (also with SGLANG_USE_CPU_ENGINE=1). That is the one case in which this module acts:

- an accelerator is present: nothing happens;
- `sgl_kernel` imports (a CPU build, or somebody else's stand-in): nothing happens;
- otherwise a stand-in satisfies the imports and SGLANG_USE_CPU_ENGINE=1 is set, unless the user set it to something else.

No start that works without this module passes through it, so an installed but unused plugin changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types

_PACKAGE = "sgl_kernel"
_CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"


def activate() -> None:
    """Entry point. Returns None: we claim no platform, SGLang then takes its own CPU platform."""
    if has_accelerator() or _real_kernels_import():
        return
    sys.modules[_PACKAGE] = stand_in()
    os.environ.setdefault(_CPU_SWITCH, "1")


def has_accelerator() -> bool:
    """Whether torch sees any device that SGLang would serve on instead of the CPU."""
    import torch

    if torch.cuda.is_available():
        return True
    for name in ("xpu", "npu", "hpu", "musa", "mps"):
        module = getattr(torch, name, None)
        available = getattr(module, "is_available", None)
        if available is not None and available():
            return True
    return False


def stand_in() -> types.ModuleType:
    """A module named `sgl_kernel` whose every name can be imported and none can be called."""
    module = types.ModuleType(_PACKAGE, "Stand-in of sglang_kvdrive for sgl_kernel on a machine without an accelerator.")
    module.__path__ = []  # a package without submodules: `from sgl_kernel.x import y` stays an ImportError
    module.__spec__ = importlib.machinery.ModuleSpec(_PACKAGE, None, is_package=True)
    module.__kvdrive_stand_in__ = True

    def missing_name(name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_args, **_kwargs):
            raise NotImplementedError(
                f"sgl_kernel.{name} needs an accelerator or a CPU build of sgl_kernel; "
                "the installed one cannot be imported here (see `kvdrive doctor`)"
            )

        return unavailable

    module.__getattr__ = missing_name
    return module


def _real_kernels_import() -> bool:
    """Try the real package. A failed import leaves submodules behind: remove them, or the stand-in would look half real."""
    if _PACKAGE in sys.modules:
        return True
    before = set(sys.modules)
    try:
        importlib.import_module(_PACKAGE)
    except Exception:  # whatever the wheel's loader raises, the import did not work
        for name in set(sys.modules) - before:
            if name == _PACKAGE or name.startswith(_PACKAGE + "."):
                del sys.modules[name]
        return False
    return True
