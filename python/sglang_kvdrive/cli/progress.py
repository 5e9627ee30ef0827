"""What the user sees between a question and the first token, which for a long prompt is most of the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_kvdrive.errors import KVDriveError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_kvdrive.cli.client import ServerClient

POLL_SECONDS = 1.0


def first_piece(stream: Iterator[str], client: ServerClient, console: Console) -> str:
    """Wait for the first piece of an answer ("" when it is empty), with the time and the tokens prefilled so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    finished = threading.Event()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("prefill", total=None)
        poller = threading.Thread(target=_poll, args=(client, progress, task, finished), daemon=True)
        poller.start()
        try:
            return next(stream, "")
        finally:
            finished.set()


def _poll(client: ServerClient, progress: Progress, task: Any, finished: threading.Event) -> None:
    """A server that does not answer, or has no figures, leaves the clock alone."""
    while not finished.wait(POLL_SECONDS):
        try:
            figures = prefill_figures(client.kvdrive_state())
        except KVDriveError:
            continue
        if figures is not None:
            done, total = figures
            progress.update(task, completed=done, total=total, description=f"prefill {done:,} of {total:,} tokens")


def prefill_figures(state: dict[str, Any] | None) -> tuple[int, int] | None:
    """(tokens done, tokens to do) over all requests in prefill; None when the server says nothing."""
    prefill = (state or {}).get("prefill")
    if not isinstance(prefill, dict) or not prefill.get("total_tokens"):
        return None
    return int(prefill.get("done_tokens", 0)), int(prefill["total_tokens"])
