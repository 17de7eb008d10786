"""Every error that a user can meet.

    HarnessError                what is wrong, where, and what to do
    ├── UsageError              the command line or a TOML file asks for something that does not exist (exit 2)
    └── Refused                 going on would make a wrong number (exit 3)
        ├── PanelError          a panel or its seal
        ├── CheckpointError     a checkpoint's files or tensors
        ├── CaptureError        a stored teacher
        ├── EngineError         what an engine returned, or would not do
        ├── ScoreError          numbers that cannot be scored
        ├── IncomparableError   two results that do not belong in one table
        └── StorageError        disk full, a locked folder, a half-written file

Exit codes: 0 ok, 1 a bar not met, 2 usage, 3 refused.
"""

from __future__ import annotations

from harness.shown import without_secrets


class HarnessError(Exception):
    """One line for the user: ``what`` is wrong and where; ``repair`` says what to do. No secret is in either."""

    exit_code = 3

    def __init__(self, what: str, repair: str) -> None:
        self.what, self.repair = without_secrets(what), without_secrets(repair)
        super().__init__(f"{self.what}\n  repair: {self.repair}")


class UsageError(HarnessError):
    exit_code = 2


class Refused(HarnessError):
    pass


class PanelError(Refused):
    pass


class CheckpointError(Refused):
    pass


class CaptureError(Refused):
    pass


class EngineError(Refused):
    pass


class ScoreError(Refused):
    pass


class IncomparableError(Refused):
    pass


class StorageError(Refused):
    pass
