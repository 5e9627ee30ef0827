"""From which length on is sparse attention faster than attending everything, on this device? Measured at start."""

from __future__ import annotations

from sglang_kvdrive.config import KVDriveConfig
from sglang_kvdrive.layout import KVLayout


def break_even_tokens(layout: KVLayout, config: KVDriveConfig, context_len: int) -> int:
    return 0
