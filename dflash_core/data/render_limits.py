"""Limits on time and memory of one rendering: a chat template is a program of a stranger.

A rendering notes its start in memory that is shared with a small process (`render_guard.py`). A thread here
reads it too, and ends a rendering that exceeds a limit by raising in its thread, which works between two
operations of the template. A single operation, such as the text of a huge nested list, can run for hours
without ever reaching such a point, and holds Python's lock meanwhile: then the other process prints the
message and kills this one. Thread and process start with the first rendering and end after ten idle seconds.

Price: about 0.2 us per rendering.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import IO, Any

from dflash_core.data import render_guard
from dflash_core.data.render_guard import NUM_SLOTS, Growth
from dflash_core.errors import UserError

MAX_SECONDS = 30.0
# Growth of this process during one rendering; no more than half of the free memory in any case.
MAX_BYTES = 4 << 30
# The other process acts at this multiple of both limits.
HARD_FACTOR = 2
_POLL_SECONDS, _IDLE_SECONDS = 0.1, 10.0


class RenderingLimitError(UserError):
    """A chat template exceeded a limit."""

    def __init__(self, problem: str = "exceeded a limit") -> None:
        super().__init__(f"data.chat_template: {problem}; allowed: a template without endless loops or texts")


class _Watch:
    """The renderings of this process and their thread; one instance per process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        self.file.truncate(8 * NUM_SLOTS)
        # Start of the rendering of each slot by time.monotonic(), 0 while there is none.
        self.started = memoryview(mmap.mmap(self.file.fileno(), 8 * NUM_SLOTS)).cast("d")
        self.free = list(range(NUM_SLOTS - 1, -1, -1))
        self.names: dict[int, str] = {}
        self.threads: dict[int, int] = {}
        self.stopped: dict[int, str] = {}
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start process and thread unless they run.

        The process first: a rendering may never let the thread run.
        """
        with self.lock:
            if self.thread is not None:
                return
            descriptor = self.file.fileno()
            command = [sys.executable, "-I", "-S", render_guard.__file__, str(descriptor), str(os.getpid())]
            command += [str(HARD_FACTOR * limit) for limit in (MAX_SECONDS, MAX_BYTES)]
            guard = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor], text=True)
            self.thread = threading.Thread(target=self._run, args=(guard,), name="render limits", daemon=True)
            self.thread.start()

    def _run(self, guard: subprocess.Popen[str]) -> None:
        with guard:
            assert guard.stdin is not None
            self._watch(guard.stdin)

    def _watch(self, names: IO[str]) -> None:
        """Stop renderings that exceed a limit, until there has been none for a while."""
        growth = Growth(os.getpid(), MAX_SECONDS, MAX_BYTES)
        idle, told = time.monotonic(), 0
        while True:
            time.sleep(_POLL_SECONDS)
            for slot, problem in growth.problems(self.started):
                self._stop(slot, problem)
            if any(self.started):
                idle = time.monotonic()
            if len(self.names) > told:
                told = len(self.names)
                with contextlib.suppress(OSError):
                    names.write(json.dumps(self.names) + "\n")
                    names.flush()
            with self.lock:
                if time.monotonic() - idle > _IDLE_SECONDS and not any(self.started):
                    self.thread = None
                    return

    def _stop(self, slot: int, problem: str) -> None:
        with self.lock:
            if self.started[slot] and slot not in self.stopped:
                self.stopped[slot] = problem
                thread = ctypes.c_ulong(self.threads[slot])
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(RenderingLimitError))


_watch: _Watch | None = None


def _forget() -> None:
    global _watch
    _watch = None


os.register_at_fork(after_in_child=_forget)


class RenderLimits:
    """Limits on the renderings of one template, one at a time: a context manager around each.

    The body raises RenderingLimitError when it takes too long or too much memory.

    Args:
        name: of the template, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._watch: _Watch | None = None
        self._slot = 0

    def __enter__(self) -> None:
        watch = self._watch
        if watch is None or watch is not _watch:
            watch = self._register()
        if watch.thread is None:
            watch.start()
        watch.threads[self._slot] = threading.get_ident()
        watch.started[self._slot] = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        watch, slot = self._watch, self._slot
        assert watch is not None
        watch.started[slot] = 0.0
        if slot in watch.stopped:
            with watch.lock:
                problem = watch.stopped.pop(slot)
                # It may still be on its way.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(watch.threads[slot]), None)
            raise RenderingLimitError(f"{self.name} {problem}") from None

    def _register(self) -> _Watch:
        """Take a slot in the watch of this process: another one than before where the process was forked."""
        global _watch
        _watch = _watch or _Watch()
        watch = self._watch = _watch
        with watch.lock:
            self._slot = watch.free.pop()
        watch.names[self._slot] = self.name
        weakref.finalize(self, watch.free.append, self._slot)
        return watch
