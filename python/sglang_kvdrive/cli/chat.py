"""`kvdrive chat`: talk to a running server, watch it prefill, ask about its tiers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_kvdrive.errors import ConfigError, KVDriveError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_kvdrive.cli.client import Answer, ServerClient

HELP = """\
/file F    put the text of file F before the next question
/stats     what KVDrive does on this server: tiers, hit rate, bytes moved
/dense     switch full attention for the next questions on or off
/reset     forget the conversation
/quit      leave (so does Ctrl-D); Ctrl-C stops an answer"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("chat", help="talk to a running server", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--file", help="put the text of this file before the first question")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer in tokens (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default) repeats answers exactly, so that /dense can be compared"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_kvdrive.cli.client import ServerClient

    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}, it must be at least 1")
    if args.temperature < 0:
        raise ConfigError(f"--temperature is {args.temperature:g}, it must be at least 0")
    chat = Chat(ServerClient(args.url), Console(highlight=False, soft_wrap=True), args.max_tokens, args.temperature)
    if args.file:
        chat.attach(args.file)
    chat.greet()
    chat.loop()
    return 0


class Chat:
    """The conversation so far, and the commands."""

    def __init__(self, client: ServerClient, console: Console, max_tokens: int, temperature: float = 0.0):
        self._client = client
        self._console = console
        self._sampling = {"max_tokens": max_tokens, "temperature": temperature}
        self._messages: list[dict[str, str]] = []
        self._attached = ""
        self._dense = False

    def greet(self) -> None:
        """Raises ServerError when there is no server: better now than after the first question."""
        info = self._client.server_info()
        model = info.get("served_model_name") or info.get("model_path") or "unknown model"
        manager = "KVDrive" if self._client.kvdrive_state() is not None else "SGLang's own KV manager"
        self._print(f"{model} at {self._client.url}, KV cache managed by {manager}. /help lists the commands.")

    def loop(self) -> None:
        while True:
            try:
                line = self._console.input("[bold]> [/bold]").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._print("\n/quit leaves")
                continue
            if line == "/quit":
                return
            try:
                self.handle(line)
            except KVDriveError as error:
                self._print(str(error), style="red")

    def handle(self, line: str) -> None:
        """One line of input, a command or a question."""
        command, _, argument = line.partition(" ")
        if not line:
            return
        if command == "/file":
            self.attach(argument.strip())
        elif line == "/stats":
            self.show_stats()
        elif line == "/dense":
            self.toggle_dense()
        elif line == "/reset":
            self._messages, self._attached = [], ""
            self._print("the conversation is forgotten")
        elif line.startswith("/"):
            self._print(HELP if line == "/help" else f"{command} is not a command\n{HELP}")
        else:
            self.ask(line)

    def attach(self, name: str) -> None:
        if not name:
            raise ConfigError("/file needs the name of a text file: /file notes.txt")
        try:
            self._attached = Path(name).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{name} cannot be read: {reason}") from None
        self._print(f"{name}: {len(self._attached):,} characters go before the next question")

    def show_stats(self) -> None:
        from rich.table import Table

        state = self._client.kvdrive_state()
        if state is None:
            raise KVDriveError("this server does not run with KVDrive: start it with --kv-manager kvdrive")
        table = Table("name", "value", box=None, show_header=False)
        for name, value in flatten(state):
            table.add_row(name, value)
        self._console.print(table)

    def toggle_dense(self) -> None:
        state = self._client.kvdrive_state()
        if state is None or "per_request_budget" not in state:
            raise KVDriveError("this server does not offer per-request budgets, so /dense has no effect on it: "
                               "start one with --kvdrive-budget 100% to compare with full attention")  # fmt: skip
        self._dense = not self._dense
        self._print(f"full attention is {'on' if self._dense else 'off'} for the next questions")

    def ask(self, question: str) -> None:
        """Stream one answer. What came before a Ctrl-C stays in the conversation; a failed question does not."""
        content = f"{self._attached}\n\n{question}" if self._attached else question
        messages = [*self._messages, {"role": "user", "content": content}]
        body: dict[str, Any] = {"model": "default", "messages": messages, **self._sampling}
        if self._dense:
            body["custom_params"] = {"kvdrive": {"budget": "dense"}}
        text = self._stream(body)
        self._attached = ""
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _stream(self, body: dict[str, Any]) -> str:
        from sglang_kvdrive.cli.client import Answer
        from sglang_kvdrive.cli.progress import first_piece

        answer, begin, text = Answer(), time.monotonic(), ""
        stream = self._client.stream_chat(body, answer)
        try:
            text = first_piece(stream, self._client, self._console)
            waited = time.monotonic() - begin
            self._print(text, end="")
            for piece in stream:
                text += piece
                self._print(piece, end="")
            self._print("\n" + summary(answer, waited, time.monotonic() - begin), style="dim")
        except KeyboardInterrupt:
            self._print("\n(stopped)", style="dim")
        finally:
            stream.close()
        return text

    def _print(self, text: str, **kwargs: Any) -> None:
        self._console.print(text, markup=False, **kwargs)


def summary(answer: Answer, waited_s: float, total_s: float) -> str:
    """`(812 + 64 tokens, first after 3.1 s, 9.8 tokens/s)` and why the answer ended when it did not end by itself."""
    n_prompt, n_answer = answer.usage.get("prompt_tokens", 0), answer.usage.get("completion_tokens", 0)
    rate = (n_answer - 1) / (total_s - waited_s) if n_answer > 1 and total_s > waited_s else 0.0
    text = f"({n_prompt:,} + {n_answer:,} tokens, first after {waited_s:.1f} s, {rate:.1f} tokens/s)"
    return f"{text} cut off by --max-tokens" if answer.finish_reason == "length" else text


def flatten(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`{"hbm": {"used_bytes": 1}}` becomes `("hbm.used_bytes", "1")`."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, float):
            yield name, f"{value:.4g}"
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, f"{value:,}"
        else:
            yield name, str(value)
