"""`kvdrive doctor`: can this installation serve with KVDrive? One line per check, with what to do about a failure."""

from __future__ import annotations

import argparse
import sys
import warnings
from importlib import metadata

from sglang_kvdrive.cli import checks
from sglang_kvdrive.cli.checks import Check

SGLANG_VERSION = "0.5.23"


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("doctor", help="check this installation", description=__doc__)
    parser.add_argument("--model", help="also print this model's native context and arguments for a longer one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    results = run_checks()
    for result in results:
        print(result.line())
    failed = sum(not result.ok for result in results)
    print(f"\n{failed} of {len(results)} checks failed." if failed else f"\nAll {len(results)} checks passed.")
    if args.model:
        sys.stdout.flush()
        print(f"\n{describe_context(args.model)}")
    return 1 if failed else 0


def run_checks() -> list[Check]:
    from kvdrive_kernels.native import cache_dir

    return [
        checks.check_platform(),
        checks.check_python(),
        check_sglang(),
        *check_seams(),
        checks.check_compiler(),
        check_kernels(),
        checks.check_memory(),
        checks.check_disk(cache_dir(), checks.MODEL_BYTES, "models and compiled kernels", "KVDRIVE_CACHE=/other/disk"),
    ]


def check_kernels() -> Check:
    """Compile the CPU kernels, if that was not done yet, and load them."""
    from kvdrive_kernels import native

    fix = "install g++; without it everything runs in PyTorch, correct and several times slower"
    try:
        loaded = native.library()
    except native.BuildError as error:
        return Check("cpu kernels", False, str(error), fix)
    if loaded is None:
        asked = native.chosen() == "torch"
        return Check("cpu kernels", asked, "PyTorch" + (", as KVDRIVE_KERNELS says" if asked else ": the build failed"), fix)
    return Check("cpu kernels", True, f"native, vectors of {8 * int(loaded.vector_bytes())} bits", fix)


def check_sglang() -> Check:
    fix = f"pip install sglang=={SGLANG_VERSION}"
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Check("sglang", False, "not installed", fix)
    detail = version if version == SGLANG_VERSION else f"{version}, KVDrive hooks into {SGLANG_VERSION} only"
    return Check("sglang", version == SGLANG_VERSION, detail, fix)


def check_seams() -> list[Check]:
    """The places in SGLang that KVDrive hangs on. A seam is gone when SGLang was patched or is another version."""
    fix = f"reinstall the tested version: pip install --force-reinstall --no-deps sglang=={SGLANG_VERSION}"
    try:
        from sglang_kvdrive.adapter.seams import check_seams as look

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing SGLang warns about every accelerator this machine lacks
            return [Check(f"seam {seam.name}", seam.ok, seam.detail, fix) for seam in look()]
    except ImportError as error:
        return [Check("seams", False, f"cannot be checked: {error}", fix)]


def describe_context(model: str) -> str:
    from sglang_kvdrive.cli.modelinfo import longer_context_arguments, read_model_info

    info = read_model_info(model)
    lines = [f"{model}: native context {info.native_context:,} tokens, positions scaled: {info.rope_type}"]
    for factor in (2, 4):
        arguments = longer_context_arguments(info, factor)
        if arguments is None:
            lines.append("This model scales its positions already: its native context is the longest it was made for.")
            break
        longer = f"{info.native_context * factor:,} tokens (YaRN x{factor}; answers may get worse, also on short prompts)"
        lines.append(f"for {longer}, add:")
        lines.append(f"  {arguments}")
    return "\n".join(lines)
