"""Look before anything is installed: can this machine run the project? Every failure at once, each with its fix.

Standard library only. Started by `make`; exit code 1 when a check failed.
"""

import sys

if sys.version_info < (3, 7):  # noqa: UP036 - what this turns away cannot read the imports below
    sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": PYTHON=/path/to/python3.11 make ...")

import argparse
import os
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from sglang_kvdrive.cli import checks  # noqa: E402 - found through the line above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where the project will be installed")
    parser.add_argument("--installed", type=Path, help="a file that exists once the project is installed there")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", help="the port the server will listen on; not checked without it")
    args = parser.parse_args()

    results = run_checks(args.venv, args.installed, args.host, args.port)
    failed = [result for result in results if not result.ok]
    for result in failed or results:
        print(result.line(), file=sys.stderr if failed else sys.stdout)
    if failed:
        print(f"\n{len(failed)} of {len(results)} checks failed, nothing was installed or started.", file=sys.stderr)
    return 1 if failed else 0


def run_checks(venv, installed, host, port):
    results = [checks.check_platform(), checks.check_python(), checks.check_compiler()]
    if Path("/proc/meminfo").exists():
        results.append(checks.check_memory())
    if installed is None or not installed.exists():
        results.append(checks.check_disk(venv, checks.INSTALL_BYTES, "SGLang and PyTorch", "VENV=/other/disk/venv make ..."))
    if not any(model_cache().glob("models/*/config.json")):
        results.append(checks.check_disk(model_cache(), checks.MODEL_BYTES, "the model", "KVDRIVE_CACHE=/other/disk make ..."))
    if port is not None:
        results.append(checks.check_port(host, port))
    return results


def model_cache() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-kvdrive"
    return Path(os.environ.get("KVDRIVE_CACHE") or default)


if __name__ == "__main__":
    sys.exit(main())
