"""Microbatches built ahead of their use by one thread, so that reading the store overlaps training.

Order is that of the assignments, and at most `depth` finished microbatches wait in memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dflash_core.dataflow.assignment import Assignment

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterator over (assignment, make(assignment)), prepared by a thread at most `depth` ahead.

    An error in the thread is raised by `next`.
    """

    def __init__(
        self, assignments: Iterator[Assignment], make: Callable[[Assignment], Item], depth: int
    ) -> None:
        self._queue: queue.Queue[tuple[Assignment, Item] | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(assignments, make), daemon=True, name="feed")
        self._thread.start()

    def _run(self, assignments: Iterator[Assignment], make: Callable[[Assignment], Item]) -> None:
        try:
            for assignment in assignments:
                if not self._put((assignment, make(assignment))):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, entry: tuple[Assignment, Item] | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[tuple[Assignment, Item]]:
        return self

    def __next__(self) -> tuple[Assignment, Item]:
        entry = self._queue.get()
        if entry is None:
            raise StopIteration
        if isinstance(entry, BaseException):
            raise entry
        return entry

    def close(self) -> None:
        """Stop the thread and drop the prepared items."""
        self._closed.set()
        self._thread.join(timeout=5)
