"""Hidden states from target ranks to drafter ranks, point to point, in plan order, a bounded number ahead.

Both sides walk the same assignments, so nothing but tensors travels: who sends what to whom, and in which
shape, is known. A target has at most `max_inflight` microbatches sent and not yet taken; a drafter has
receives posted for as many. Each pair of ranks exchanges its microbatches in one order, which is all that the
transport needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dflash_core.training.capture import Capture, Features, FeatureSpec
from dflash_core.training.feed import Assignment, Microbatch, Prefetcher
from dflash_core.training.supervise import PEER_GRACE_SECONDS, RankRecord, Stopped, StopSignal

Delivery = tuple[Assignment, Microbatch, Features]


def capture_here(
    feed: Prefetcher[Microbatch], capture: Capture, record: RankRecord, device: torch.device
) -> Iterator[Delivery]:
    """Colocated: capture each microbatch on this rank.

    On CUDA the capture of the next microbatch is queued on a stream of its own before the current one is
    handed out, so it overlaps the training of the current one. On a CPU there is nothing to overlap with.
    """
    if device.type != "cuda":
        for assignment, microbatch in feed:
            record.phase("capture", microbatch=assignment.slot)
            features = capture(microbatch)
            yield assignment, microbatch, features
        return
    stream = torch.cuda.Stream(device)
    ahead: tuple[Assignment, Microbatch, Features, torch.cuda.Event] | None = None
    for assignment, microbatch in feed:
        record.phase("capture", microbatch=assignment.slot)
        with torch.cuda.stream(stream):
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


def serve(
    feed: Prefetcher[Microbatch], capture: Capture, record: RankRecord, stop: StopSignal, max_inflight: int
) -> None:
    """Target rank of `split`: capture and send until the assignments end.

    Raises:
        Stopped: the run was told to stop, here or (seen as a closed connection) at a drafter first.
    """
    try:
        _serve(feed, capture, record, stop, max_inflight)
    except RuntimeError as error:
        if not stop.wait(PEER_GRACE_SECONDS):
            raise
        raise Stopped from error


def _serve(
    feed: Prefetcher[Microbatch], capture: Capture, record: RankRecord, stop: StopSignal, max_inflight: int
) -> None:
    inflight: deque[tuple[Features, list[dist.Work]]] = deque()
    for assignment, microbatch in feed:
        if stop.is_set():
            raise Stopped
        record.phase("capture", step=max(0, assignment.step), microbatch=assignment.slot)
        features = capture(microbatch)
        record.phase(f"wait for drafter rank {assignment.drafter}")
        while len(inflight) >= max_inflight:
            _finish(inflight.popleft()[1])
        works = [dist.isend(t.contiguous(), dst=assignment.drafter) for t in features.tensors()]
        inflight.append((features, [w for w in works if w is not None]))  # keeps the tensors alive
        record.phase("wait for feed")
    record.phase("wait for the last transfers")
    while inflight:
        _finish(inflight.popleft()[1])


def receive(
    feed: Prefetcher[Microbatch],
    spec: FeatureSpec,
    record: RankRecord,
    device: torch.device,
    max_inflight: int,
) -> Iterator[Delivery]:
    """Drafter rank of `split`: what the targets send, in plan order, receives posted `max_inflight` ahead."""
    posted: deque[tuple[Assignment, Microbatch, Features, list[dist.Work]]] = deque()

    def deliver() -> Delivery:
        assignment, microbatch, features, works = posted.popleft()
        record.phase(f"wait for target rank {assignment.target}", microbatch=assignment.slot)
        _finish(works)
        return assignment, microbatch, features

    for assignment, microbatch in feed:
        features = spec.empty(microbatch.num_tokens, device)
        works = [dist.irecv(t, src=assignment.target) for t in features.tensors()]
        posted.append((assignment, microbatch, features, [w for w in works if w is not None]))
        if len(posted) > max_inflight - 1:
            yield deliver()
    while posted:
        yield deliver()


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
