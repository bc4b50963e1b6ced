"""Captured states on their way to the drafter: on the same rank, or from target ranks to drafter ranks.

Both sides of a transfer walk the same assignments, so nothing but tensors travels: sender, receiver and
shapes are known in advance. A target has at most `max_inflight` microbatches sent and not yet received; a
drafter has receives posted for as many. Each pair of ranks exchanges its microbatches in one order, which is
all that the transport needs. States go from device to device (NCCL between GPUs, gloo between CPUs), never
through the host. With each microbatch comes `TargetTimings` on the CPU: the target's work since the last.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist

from dflash_core.dataflow.assignment import Assignment
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.dataflow.prefetch import Prefetcher
from dflash_core.errors import Stopped
from dflash_core.launch.layout import Layout
from dflash_core.launch.rank_status import RankRecord
from dflash_core.launch.stop_signal import PEER_GRACE_SECONDS, StopSignal
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.target.capture import Capture

Delivery = tuple[Assignment, Microbatch, Features]


@dataclass(frozen=True)
class TargetTimings:
    """Seconds of a target rank since its last timings, and its number of microbatches in flight."""

    capture: float
    target_wait: float  # until a drafter received something
    target_feed: float  # for its own microbatches
    inflight: float  # this one included


def capture_here(
    feed: Iterable[tuple[Assignment, Microbatch]],
    capture: Capture,
    record: RankRecord,
    clock: DeviceClock,
    device: torch.device,
) -> Iterator[Delivery]:
    """Capture each microbatch on this rank, for `colocated` training.

    On CUDA the capture of the next microbatch is queued on a separate stream before the current one is
    yielded, so it overlaps the training of the current one. On a CPU there is nothing to overlap with.
    """
    if device.type != "cuda":
        for assignment, microbatch in feed:
            record.phase("capture", microbatch=assignment.slot)
            with clock.time("capture"):
                features = capture(microbatch)
            yield assignment, microbatch, features
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # until the target's weights are loaded
    ahead: tuple[Assignment, Microbatch, Features, torch.cuda.Event] | None = None
    for assignment, microbatch in feed:
        record.phase("capture", microbatch=assignment.slot)
        # No capture reads what training writes, so this stream waits for nothing else. It alone uses the
        # memory that it allocates and frees within a capture; `_take` guards the features that leave it.
        with torch.cuda.stream(stream), clock.time("capture"):
            features = capture(microbatch)
        ready = torch.cuda.Event()
        ready.record(stream)
        if ahead is not None:
            yield _take(ahead, device)
        ahead = assignment, microbatch, features, ready
    if ahead is not None:
        yield _take(ahead, device)


def _take(ahead: tuple[Assignment, Microbatch, Features, torch.cuda.Event], device: torch.device) -> Delivery:
    assignment, microbatch, features, ready = ahead
    current = torch.cuda.current_stream(device)
    current.wait_event(ready)
    for tensor in features.tensors():
        tensor.record_stream(current)  # the allocator must not reuse it while training reads it
    return assignment, microbatch, features


def connect(layout: Layout, rank: int, device: torch.device) -> None:
    """Send one number from each target to each of its drafters, on all ranks in one order.

    NCCL connects a pair at its first transfer, and both wait for it: without this, connections would be made
    in the order in which the plan brings pairs together. A pair that cannot connect also fails here, not
    during the run.
    """
    for drafters, targets in layout.islands:
        for drafter in drafters:
            for target in targets:
                if rank == target != drafter:
                    dist.send(torch.ones(1, device=device), dst=drafter)
                elif rank == drafter != target:
                    dist.recv(torch.zeros(1, device=device), src=target)


class _Window:
    """Sends of a target that no drafter has received yet, at most `limit`.

    A thread waits for them in order: gloo reports the end of a send only to a caller that waits for it, and a
    wait for NCCL blocks a stream, not the caller.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._free = threading.Semaphore(limit)
        self._queue: queue.SimpleQueue[tuple[Features, list[dist.Work]] | None] = queue.SimpleQueue()
        self._device = device
        self._error: RuntimeError | None = None
        self._sent = self._taken = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="sends")
        self._thread.start()

    @property
    def inflight(self) -> int:
        return self._sent - self._taken

    def wait_for_place(self) -> None:
        """Wait until one more may be sent; raise the error of a failed send."""
        self._free.acquire()
        if self._error is not None:
            raise self._error

    def put(self, features: Features, works: list[dist.Work]) -> None:
        """Count a send, and keep its tensors until it is over."""
        self._sent += 1
        self._queue.put((features, works))

    def close(self) -> None:
        """Wait until everything was received; raise the error of a failed send."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                # A new thread stands on device 0, where it would make a context.
                torch.cuda.set_device(self._device)
            finish = _finisher(self._device)
            while (entry := self._queue.get()) is not None:
                finish(entry[1])
                self._taken += 1
                self._free.release()
                del entry  # frees the tensors while this waits for the next
        except RuntimeError as error:
            self._error = error
            self._free.release()


def serve(
    feed: Prefetcher[Microbatch],
    capture: Capture,
    record: RankRecord,
    stop: StopSignal,
    device: torch.device,
    max_inflight: int,
) -> None:
    """Capture and send until the assignments end, on a target rank of `split`.

    Raises:
        Stopped: a stop signal arrived here or, seen as a closed connection, at a drafter first.
        torch.OutOfMemoryError: a capture did not fit.
    """
    try:
        _serve(feed, capture, record, stop, device, max_inflight)
    except torch.OutOfMemoryError:  # a subclass of RuntimeError
        raise
    except RuntimeError as error:
        if not stop.wait(PEER_GRACE_SECONDS):
            raise
        raise Stopped from error


def _serve(
    feed: Prefetcher[Microbatch],
    capture: Capture,
    record: RankRecord,
    stop: StopSignal,
    device: torch.device,
    max_inflight: int,
) -> None:
    window, clock = _Window(max_inflight, device), DeviceClock(device)
    for assignment, microbatch in feed:
        if stop.is_set():
            raise Stopped
        record.phase("capture", step=max(0, assignment.step), microbatch=assignment.slot)
        with clock.time("capture"):
            features = capture(microbatch)
        record.phase(f"wait for drafter rank {assignment.drafter}")
        window.wait_for_place()
        record.phase("send")
        host, work = record.take_seconds(), clock.take()
        waited = sum(seconds for name, seconds in host.items() if name.startswith("wait for drafter"))
        waited_for_feed = host.get("wait for feed", 0.0)
        timings = TargetTimings(work.get("capture", 0.0), waited, waited_for_feed, window.inflight + 1)
        tensors = [*features.tensors(), torch.tensor(astuple(timings), dtype=torch.float64)]
        works = [dist.isend(t.contiguous(), dst=assignment.drafter) for t in tensors]
        window.put(features, [w for w in works if w is not None])
        record.phase("wait for feed")
    record.phase("wait for the last transfers")
    window.close()


def receive(
    feed: Prefetcher[Microbatch],
    spec: FeatureSpec,
    record: RankRecord,
    clock: DeviceClock,
    device: torch.device,
    max_inflight: int,
) -> Iterator[Delivery]:
    """Receive from the targets in plan order on a drafter rank of `split`, up to `max_inflight` posted ahead.

    `clock` gets the targets' timings by the names of their fields, and their number as `reports`.
    """
    posted: deque[tuple[Assignment, Microbatch, Features, torch.Tensor, list[dist.Work]]] = deque()
    finish = _finisher(device)

    def deliver() -> Delivery:
        assignment, microbatch, features, timings, works = posted.popleft()
        record.phase(f"wait for target rank {assignment.target}", microbatch=assignment.slot)
        finish(works)
        for name, value in vars(TargetTimings(*timings.tolist())).items():
            clock.add(name, value)
        clock.add("reports", 1)
        return assignment, microbatch, features

    for assignment, microbatch in feed:
        features = spec.empty(microbatch.num_tokens, device)
        timings = torch.empty(len(fields(TargetTimings)), dtype=torch.float64)
        works = [dist.irecv(t, src=assignment.target) for t in [*features.tensors(), timings]]
        posted.append((assignment, microbatch, features, timings, [w for w in works if w is not None]))
        if len(posted) > max_inflight - 1:
            yield deliver()
    while posted:
        yield deliver()


def _finisher(device: torch.device) -> Callable[[list[dist.Work]], None]:
    """Return a function that returns once the transfers have completed, on the device too.

    On CUDA it waits on a separate stream, so only for the transfers; the caller's stream waits for that one.
    """
    if device.type != "cuda":

        def finish(works: list[dist.Work]) -> None:
            for work in works:
                work.wait()

        return finish
    stream = torch.cuda.Stream(device)

    def finish_on_device(works: list[dist.Work]) -> None:
        with torch.cuda.stream(stream):
            for work in works:
                work.wait()
        stream.synchronize()
        torch.cuda.current_stream(device).wait_stream(stream)

    return finish_on_device
