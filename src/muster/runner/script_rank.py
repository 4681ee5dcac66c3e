"""A rank that runs the user's own Python file, as `mlx.launch` would."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path

from muster.errors import ScriptError
from muster.rank_protocol import Form, PreparedFrame, ReadyFrame
from muster.runner.context import RankContext
from muster.spec import Phase, ScriptWorkload


class ScriptRank:
    """The `script` workload. The group is formed before the script's first line, so that no rank dials too early;
    `mx.distributed.init()` in the script answers with that group, and the coordination file and variables stay."""

    def __init__(self, context: RankContext, workload: ScriptWorkload) -> None:
        self._context = context
        self._workload = workload
        self._path = Path(workload.path)

    def prepare(self) -> PreparedFrame:
        """Check that the file is there and is Python.

        Raises:
            ScriptError: it is missing, unreadable, or has a syntax error; or the directory is missing.
        """
        directory = self._workload.directory
        if directory is not None and not Path(directory).is_dir():
            raise ScriptError(
                f"the working directory {directory} does not exist on this node",
                remedy="Create it, or start the script from a directory that exists on every node.",
            )
        self._path = Path(directory or ".") / self._workload.path
        try:
            source = self._path.read_bytes()
        except OSError as error:
            raise ScriptError(
                f"the script {self._path} cannot be read on this node: {error.strerror}",
                remedy="Copy it to the same path on every node.",
            ) from error
        self._source = source
        try:
            compile(source, str(self._path), "exec")
        except (SyntaxError, ValueError) as error:
            raise ScriptError(f"the script {self._path} is not valid Python: {error}", remedy="Mend it.") from error
        return PreparedFrame()

    def fingerprint(self) -> str:
        """SHA-256 of the file: every rank must run the same program."""
        return hashlib.sha256(self._source).hexdigest()

    def run(self, group: object | None, form: Form) -> int:
        """Run the file as `__main__`; the exit code is its own, 1 for an exception that it lets out."""
        del group, form
        self._context.phase = Phase.RUNNING
        self._enter()
        self._context.channel.send(ReadyFrame())
        process = os.getpid()
        try:
            runpy.run_path(str(self._path), run_name="__main__")
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException as error:  # a script may raise anything; it is shown as the interpreter would
            _print_from_script(error, str(self._path))
            code = 1
        else:
            code = 0
        if os.getpid() == process:  # a fork that comes this far just ends, as it would have without us
            _finish()
        return code

    def _enter(self) -> None:
        """Make the process look as if Python had been started on the file."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # whole lines, also where another rank's failure ends this one
                stream.reconfigure(line_buffering=True, write_through=False)
        if self._workload.directory is not None:
            os.chdir(self._workload.directory)
        os.environ.update(self._workload.environment)
        sys.argv = [str(self._workload.path), *self._workload.arguments]
        sys.path[0] = str(self._path.resolve().parent)


def _finish() -> None:
    """What the interpreter does at its end and `os._exit` would skip: threads, exit handlers, files left open."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for kind in (io.TextIOWrapper, io.BufferedWriter):  # text into bytes, then bytes out
        for file in [item for item in gc.get_objects() if isinstance(item, kind)]:
            with contextlib.suppress(OSError, ValueError):
                file.flush()


def _exit_code(error: SystemExit) -> int:
    """The process exit code that Python gives a SystemExit: text is printed and counts as 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _print_from_script(error: BaseException, path: str) -> None:
    """Print the traceback from the script's own first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != path:
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame or error.__traceback__)
