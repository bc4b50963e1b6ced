"""Errors that end a run with one message."""

from __future__ import annotations

from dflash_core.redaction import redact


class UserError(ValueError):
    """A user's mistake: the message names the field or the file and line, the value, and what is allowed.

    Secrets in the message are hidden.
    """

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; a library's may have several."""
    return " ".join(str(error).split()) or type(error).__name__


class Stopped(Exception):
    """The run was asked to stop; all ranks agreed, and the state is saved as far as possible."""


class RunFailed(RuntimeError):
    """The run cannot continue, but its checkpoints stay valid: out of memory, too many non-finite steps."""
