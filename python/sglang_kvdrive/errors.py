"""Every error this package raises on purpose. A message names the value, the limit and the fix."""

from __future__ import annotations

from collections.abc import Sequence


class KVDriveError(Exception):
    """Base of all errors raised by sglang_kvdrive."""


class ConfigError(KVDriveError, ValueError):
    """A setting cannot work. `reasons` holds every fault found, not just the first one."""

    def __init__(self, reasons: str | Sequence[str]):
        self.reasons = [reasons] if isinstance(reasons, str) else list(reasons)
        super().__init__("\n".join(f"- {reason}" for reason in self.reasons) if len(self.reasons) > 1 else self.reasons[0])


class CapacityError(KVDriveError):
    """A tier has no room for what was asked. The caller checked too late: admission must prevent this."""


class IntegrityError(KVDriveError):
    """The books of a tier or a window do not balance. Always a bug in this package."""
