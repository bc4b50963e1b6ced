"""Hidden states from target ranks to drafter ranks, point to point, in plan order, a bounded number ahead.

Both sides walk the same assignments, so nothing but tensors travels: who sends what to whom, and in which
shape, is known. A target has at most `max_inflight` microbatches sent and not yet taken; a drafter has
receives posted for as many. Each pair of ranks exchanges its microbatches in one order, which is all that the
transport needs. States go from device to device (NCCL between GPUs, gloo between CPUs): nothing is staged through
the host. With each microbatch travels a `TargetReport`, on the CPU: what its target did since the one before.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass

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
class TargetReport:
    """Of a target rank since its last report: seconds of capturing, of waiting until a drafter takes something, and of
    waiting for its feed; and the microbatches that were under way when it sent this one.
    """

    capture: float
    target_wait: float
    target_feed: float
    inflight: float


def capture_here(
    feed: Iterable[tuple[Assignment, Microbatch]],
    capture: Capture,
    record: RankRecord,
    clock: DeviceClock,
    device: torch.device,
) -> Iterator[Delivery]:
    """Colocated: capture each microbatch on this rank.

    On CUDA the capture of the next microbatch is queued on a stream of its own before the current one is
    handed out, so it overlaps the training of the current one. On a CPU there is nothing to overlap with.
    """
    if device.type != "cuda":
        for assignment, microbatch in feed:
            record.phase("capture", microbatch=assignment.slot)
            with clock.time("capture"):
                features = capture(microbatch)
            yield assignment, microbatch, features
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the target's weights are there
    ahead: tuple[Assignment, Microbatch, Features, torch.cuda.Event] | None = None
    for assignment, microbatch in feed:
        record.phase("capture", microbatch=assignment.slot)
        # No capture reads what training writes, so this stream waits for nothing more; what it allocates and frees
        # within a capture it alone uses, and what it hands out is guarded by `_take`.
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
    """One number from each target to each of its drafters, all ranks in one order.

    NCCL makes the connection of a pair when the two first talk, and both wait for it: left to the run, that would
    happen in whatever order the plan brings them together. It also shows here, not in the middle, when a pair
    cannot connect.
    """
    for drafters, targets in layout.islands:
        for drafter in drafters:
            for target in targets:
                if rank == target != drafter:
                    dist.send(torch.ones(1, device=device), dst=drafter)
                elif rank == drafter != target:
                    dist.recv(torch.zeros(1, device=device), src=target)


class _Window:
    """The sends of a target that no drafter has taken, at most `limit`.

    A thread waits for them in order: gloo does not tell that a send is over before somebody waits for it, and a wait
    for NCCL holds up a stream, not the caller.
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
        """Until one more may be sent; raises what a send failed with."""
        self._free.acquire()
        if self._error is not None:
            raise self._error

    def put(self, features: Features, works: list[dist.Work]) -> None:
        """Counts a send, and keeps its tensors until it is over."""
        self._sent += 1
        self._queue.put((features, works))

    def close(self) -> None:
        """Until everything was taken; raises what a send failed with."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            finish = _finisher(self._device)
            while (entry := self._queue.get()) is not None:
                finish(entry[1])
                self._taken += 1
                self._free.release()
                del entry  # and with it the tensors, while this waits for the next
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
    """Target rank of `split`: capture and send until the assignments end.

    Raises:
        Stopped: the run was told to stop, here or (seen as a closed connection) at a drafter first.
        torch.OutOfMemoryError: a capture did not fit.
    """
    try:
        _serve(feed, capture, record, stop, device, max_inflight)
    except torch.OutOfMemoryError:  # a RuntimeError, too
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
        report = TargetReport(
            work.get("capture", 0.0), waited, host.get("wait for feed", 0.0), window.inflight + 1
        )
        tensors = [*features.tensors(), torch.tensor(astuple(report), dtype=torch.float64)]
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
    """Drafter rank of `split`: what the targets send, in plan order, receives posted `max_inflight` ahead.

    `clock` gets the targets' reports, by the names of their fields, and the number of them as `reports`.
    """
    posted: deque[tuple[Assignment, Microbatch, Features, torch.Tensor, list[dist.Work]]] = deque()
    finish = _finisher(device)

    def deliver() -> Delivery:
        assignment, microbatch, features, report, works = posted.popleft()
        record.phase(f"wait for target rank {assignment.target}", microbatch=assignment.slot)
        finish(works)
        told = TargetReport(*report.tolist())
        for name, value in vars(told).items():
            clock.add(name, value)
        clock.add("reports", 1)
        return assignment, microbatch, features

    for assignment, microbatch in feed:
        features = spec.empty(microbatch.num_tokens, device)
        report = torch.empty(len(TargetReport.__dataclass_fields__), dtype=torch.float64)
        works = [dist.irecv(t, src=assignment.target) for t in [*features.tensors(), report]]
        posted.append((assignment, microbatch, features, report, [w for w in works if w is not None]))
        if len(posted) > max_inflight - 1:
            yield deliver()
    while posted:
        yield deliver()


def _finisher(device: torch.device) -> Callable[[list[dist.Work]], None]:
    """A function that returns when transfers are over, also on the device: what waits is then known to have waited.

    For CUDA it waits on a stream of its own, so for nothing but the transfers, and has the caller's stream follow.
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
