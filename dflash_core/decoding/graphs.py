"""CUDA graphs of the decoding loops: a step of hundreds of small kernels becomes one launch.

Policy: on one CUDA device each pass of a step (plain, drafting, verification) is captured once, for all rows
and all slots of the cache, and replayed for every step; rows that are not live compute on zeros, in slots
that the next prompt overwrites. Everything a captured pass decides, it decides on the device; what becomes of
rows (end tokens, prompts that wait) stays on the host, between passes.

A pass that cannot be captured (experts chosen on the host, rotary tables that depend on the longest position)
runs as before, and one line says so. Price: attention reads all slots of a row, used or not.

Shape letters: B rows, K tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_core.target.decode_cache import DecodeCache, TokenCache
from dflash_core.target.target import Target

Pass = Callable[..., tuple[Tensor, ...]]
# Runs a captured pass again; its results lie in the tensors that came with it.
Replay = Callable[[], None]
Capture = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Replay, tuple[Tensor, ...]]]

# Passes before a capture, in which libraries choose their kernels and allocate their workspaces.
NUM_WARM_UPS = 2


class StaticCache(DecodeCache):
    """A cache whose passes have the same shapes wherever their tokens stand: all slots are read."""

    def begin(self, positions_BK: Tensor) -> None:
        """Set the positions of the tokens of the next forward without reading them on the host."""
        self.positions_BK, self.end = positions_BK, self.num_slots
        rows_B1 = torch.arange(len(positions_BK), device=positions_BK.device)[:, None]
        self.written = (rows_B1 * self.num_slots + positions_BK).flatten()
        self._masks: dict[Any, Tensor] = {}
        self._biases: dict[Any, Tensor] = {}


def uses_graphs(target: Target) -> bool:
    """Return True for a target that is on one CUDA device alone and decodes over keys and values."""
    devices = {parameter.device for parameter in target.model.parameters()}
    return target.mode.can_cache and devices == {target.device} and target.device.type == "cuda"


def new_cache(target: Target, num_rows: int, num_slots: int) -> DecodeCache | TokenCache:
    """Return the cache that decoding with a target needs."""
    return (StaticCache if uses_graphs(target) else target.new_cache)(num_rows, num_slots)


def fixed(run: Pass, cache: DecodeCache | TokenCache) -> Pass:
    """Return a pass over a cache as it runs fastest: captured where the cache allows it, else as it is."""
    return FixedPass(run, cache.num_rows, capture_graph) if isinstance(cache, StaticCache) else run


class FixedPass:
    """A pass with tensors of fixed shapes, captured when it is first called.

    Results are overwritten by the next call.

    Args:
        run: from tensors of B rows to tensors of B rows; it may be called several times with equal inputs.
        num_rows: B of the captured pass; calls may have fewer.
        capture: see `capture_graph`.
    """

    def __init__(self, run: Pass, num_rows: int, capture: Capture) -> None:
        self.run, self.num_rows, self.capture = run, num_rows, capture
        self.inputs: tuple[Tensor, ...] = ()
        self.replay: Replay | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self.inputs:
            self.inputs = tuple(x.new_zeros(self.num_rows, *x.shape[1:]) for x in inputs)
        live = len(inputs[0])
        for static, given in zip(self.inputs, inputs, strict=True):
            static[:live] = given
            static[live:] = 0
        if self.replay is None:
            self.replay, self.outputs = self._captured()
        self.replay()
        return tuple(x[:live] for x in self.outputs)

    def _captured(self) -> tuple[Replay, tuple[Tensor, ...]]:
        try:
            return self.capture(lambda: self.run(*self.inputs))
        except RuntimeError as error:
            print(f"decoding without CUDA graphs, more slowly: {str(error).splitlines()[0]}", flush=True)
            return run_again(lambda: self.run(*self.inputs))


def capture_graph(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Replay, tuple[Tensor, ...]]:
    """Capture a pass as a CUDA graph; returns what replays it and the tensors of its results.

    Raises:
        RuntimeError: the pass reads results on the host, or allocates as a capture must not.
    """
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph.replay, outputs


def run_again(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Replay, tuple[Tensor, ...]]:
    """Do what `capture_graph` does, without a graph: every replay runs the pass again."""
    outputs = tuple(torch.empty_like(x) for x in run())

    def replay() -> None:
        for output, result in zip(outputs, run(), strict=True):
            output.copy_(result)

    return replay, outputs
