"""Passes of fixed shapes: the same output as before, and nothing in them that a CUDA graph cannot capture.

On a CPU a pass is run again where CUDA replays a graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dflash_core.decoding import graphs
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import plain_decode, speculative_decode
from dflash_core.drafter import drafter as drafter_module
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS, KnowingContext
from tests.support.host_reads import host_reads

Run = Callable[[], tuple[torch.Tensor, ...]]


@pytest.fixture
def fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "uses_graphs", lambda target: True)
    monkeypatch.setattr(graphs, "capture_graph", graphs.run_again)


@pytest.mark.parametrize(("batch_size", "temperature"), [(1, 0.0), (3, 0.0), (3, 1.0)])
def test_passes_of_fixed_shapes_give_the_same_answers(
    target: Target,
    drafter: DFlashDrafter,
    knowing: type[KnowingContext],
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    temperature: float,
) -> None:
    """Five prompts in one row or three, so rows come free, are moved, and stay empty at the end."""
    knowing.right = 2
    sampling = Sampling(max_new_tokens=13, batch_size=batch_size, temperature=temperature)
    plain = plain_decode(target, PROMPTS, sampling).generations
    speculative = speculative_decode(target, drafter, PROMPTS, sampling).generations
    monkeypatch.setattr(graphs, "uses_graphs", lambda target: True)
    monkeypatch.setattr(graphs, "capture_graph", graphs.run_again)
    knowing.started = 0
    assert plain_decode(target, PROMPTS, sampling).generations == plain
    assert speculative_decode(target, drafter, PROMPTS, sampling).generations == speculative


def test_no_pass_reads_on_the_host_what_the_device_computes(
    target: Target, drafter: DFlashDrafter, fixed_shapes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []

    def watch(run: Run) -> tuple[graphs.Replay, tuple[torch.Tensor, ...]]:
        with host_reads() as found:
            run()
        captured.append(found)
        return graphs.run_again(run)

    # As on CUDA: the model's own forward, and a kernel that reads nothing on the host.
    monkeypatch.setattr(target, "_few_tokens", None, raising=False)
    monkeypatch.setattr(drafter_module, "block_attention", lambda query, *args, **kwargs: query)
    monkeypatch.setattr(graphs, "capture_graph", watch)
    sampling = Sampling(max_new_tokens=4, batch_size=2)
    plain_decode(target, PROMPTS, sampling)
    speculative_decode(target, drafter, PROMPTS, sampling)
    assert captured == [[], [], []]


def test_the_watch_sees_what_a_graph_cannot_capture(target: Target) -> None:
    """The cache that grows with its rows reads the last position on the host."""
    positions = torch.tensor([[3], [5]])
    with host_reads() as found:
        target.new_cache(2, 16).begin(positions)
    assert found
    for read in (
        lambda: positions.tolist(),
        lambda: positions.cpu(),
        lambda: positions[positions > 3],
        lambda: bool(positions.max()),
        lambda: positions.nonzero(),
    ):
        with host_reads() as found:
            read()
        assert len(found) == 1


def test_a_pass_that_cannot_be_captured_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(run: Run) -> tuple[graphs.Replay, tuple[torch.Tensor, ...]]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    double = graphs.FixedPass(lambda x: (2 * x,), 3, refuse)
    assert [double(torch.full((rows,), rows))[0].tolist() for rows in (2, 3, 1)] == [[4, 4], [6, 6, 6], [2]]
    said = "decoding without CUDA graphs, more slowly: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().out == said


def test_graphs_are_for_one_cuda_device(target: Target) -> None:
    assert not graphs.uses_graphs(target)
    assert type(graphs.new_cache(target, 1, 8)) is type(target.new_cache(1, 8))
