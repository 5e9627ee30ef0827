"""A small HTTP client of a running server: `/server_info` and streamed chat completions. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang_kvdrive.errors import ConfigError, KVDriveError

INFO_TIMEOUT_S = 30.0
"""`/server_info` waits for the scheduler, which answers between two prefill pieces."""


class ServerError(KVDriveError):
    """The server cannot be reached or refused the request."""


@dataclass
class Answer:
    """What a stream was made of, filled while it runs."""

    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


class ServerClient:
    """One server. Every request has its own connection: closing it is how an answer is stopped."""

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = None
        port_is_bad = port is None and ":" in parts.netloc.rpartition("]")[2]
        if parts.scheme not in ("http", "https") or not parts.hostname or port_is_bad:
            raise ConfigError(f"--url is {url!r}, it must look like http://127.0.0.1:30000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._https = parts.scheme == "https"
        self._address = (parts.hostname, port)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def server_info(self) -> dict[str, Any]:
        connection = self._connect(INFO_TIMEOUT_S)
        try:
            return json.loads(self._open(connection, "GET", "/server_info").read())
        except ValueError:
            raise ServerError(f"{self.url}/server_info is not JSON: is this an SGLang server?") from None
        finally:
            connection.close()

    def kvdrive_state(self) -> dict[str, Any] | None:
        """KVDrive's part of `/server_info`; None when the server does not run with it."""
        states = self.server_info().get("internal_states") or [{}]
        return states[0].get("kvdrive")

    def stream_chat(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        """Yield the pieces of the answer. Closing the generator closes the connection, and the server aborts the request."""
        connection = self._connect(None)
        try:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            response = self._open(connection, "POST", "/v1/chat/completions", body)
            yield from _pieces(response, answer)
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} broke off: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(*self._address, timeout=timeout)

    def _open(self, connection, method: str, path: str, body: dict | None = None) -> http.client.HTTPResponse:
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"no answer from {self.url} ({error or type(error).__name__}): "
                "start a server (make serve), or name yours with --url"
            ) from None
        if response.status != 200:
            raise ServerError(f"{self.url}{path} answered {response.status}: {_reason(response.read())}")
        return response


def _pieces(response: http.client.HTTPResponse, answer: Answer) -> Iterator[str]:
    for line in response:
        name, _, data = line.strip().partition(b":")
        if name != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(f"the server stopped the answer: {_reason(data)}")
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or []:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := (choice.get("delta") or {}).get("content"):
                yield text


def _reason(payload: bytes) -> str:
    """The message inside an OpenAI style error, or the text as it is."""
    text = payload.decode(errors="replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        return text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
