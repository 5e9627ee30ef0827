"""The `kvdrive` command. Every subcommand lives in its own module and imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_kvdrive import __version__
from sglang_kvdrive.cli import chat, doctor, model, plan
from sglang_kvdrive.errors import KVDriveError

BAD_INPUT = 2
COMMANDS = (model, doctor, plan, chat)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvdrive", description="Tools around the KVDrive KV manager for SGLang.")
    parser.add_argument("--version", action="version", version=f"kvdrive {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Errors raised on purpose become one message and exit code 2, never a traceback."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KVDriveError as error:
        print(f"kvdrive {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
