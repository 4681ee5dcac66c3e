"""Errors and exit codes of the command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager

from muster.errors import MusterError, RequestError, UnreachableError
from muster.spec import Failure

EXIT_FAILED = 1  #: what was asked for failed or was refused; the cause is on standard error
EXIT_USAGE = 2  #: bad input: nothing was done
EXIT_UNREACHABLE = 3  #: no coordinator at the address
EXIT_INTERRUPTED = 130  #: Ctrl-C
SIGNAL_EXIT_BASE = 128  #: plus the signal's number, as shells have it


class InterruptedBySignalError(Exception):
    """A signal ended the command, after its cleanup. `number` is the first signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code_of(error: MusterError) -> int:
    """The exit code that an error ends a command with; a coordinator's refusal counts as the error behind it."""
    if isinstance(error, UnreachableError):
        return EXIT_UNREACHABLE
    failure = getattr(error, "failure", None)
    kind = failure.kind if isinstance(failure, Failure) else error.kind
    return EXIT_USAGE if kind == RequestError.kind else EXIT_FAILED


def show_error(error: MusterError) -> None:
    """Write the error and its remedy to standard error."""
    sys.stderr.write(f"muster: {error.message}\n")
    if error.remedy:
        sys.stderr.write(f"  {error.remedy}\n")


def show_note(text: str) -> None:
    """Write a line for a person to standard error, where it does not mix with results."""
    sys.stderr.write(f"muster: {text}\n")
    sys.stderr.flush()


def show_failure(failure: Failure, log_lines: int = 12) -> None:
    """Write why something failed, and the last that the rank printed, to standard error."""
    sys.stderr.write(f"muster: {failure.sentence()}\n")
    tail = failure.log_tail[-log_lines:]
    if tail:
        sys.stderr.write(f"  the last lines of rank {failure.rank}:\n")
        sys.stderr.writelines(f"    {line}\n" for line in tail)
    sys.stderr.flush()


@contextmanager
def bare_errors() -> Generator[None]:
    """Let the first error of a task group out alone: the others are its echoes."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            inner: tuple[BaseException, ...] = error.exceptions
            error = inner[0]
        raise error from None
