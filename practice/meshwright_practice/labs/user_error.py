"""An exception that came out of a user's code, in plain values that pass from rank to grader. Torch-free."""

from __future__ import annotations

import traceback as tracebacks
from dataclasses import dataclass

from meshwright.errors import describe_exception, is_peer_loss


@dataclass(frozen=True)
class UserError:
    """The class of the exception, its text, and the innermost line of the user's file; 0 if that is not known."""

    kind: str
    text: str
    line: int
    peer_loss: bool = False
    """whether it only says that another rank has left"""

    @classmethod
    def from_exception(cls, error: BaseException, path: str) -> UserError:
        lines = [frame.lineno for frame in tracebacks.extract_tb(error.__traceback__) if frame.filename == path]
        line = lines[-1] if lines else None
        return cls(type(error).__name__, describe_exception(error), line or 0, is_peer_loss(error))
