"""Sums of known numbers over the ranks: right, wrong, and never ending."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_core.config import TrainingConfig
from dflash_core.errors import RunFailed
from dflash_core.launch import connections
from dflash_core.launch.connections import check_connections
from dflash_core.launch.layout import make_layout
from dflash_core.launch.process_groups import World


class FakeWork:
    def __init__(self, *, ends: bool) -> None:
        self.ends = ends

    def is_completed(self) -> bool:
        return self.ends

    def wait(self) -> None: ...


def check(monkeypatch: pytest.MonkeyPatch, total: float, *, ends: bool = True) -> list[int]:
    """Check rank 1 of 2 drafters, whose sums give `total`; return the sizes that were summed."""
    sizes: list[int] = []

    def all_reduce(numbers: torch.Tensor, **_: Any) -> FakeWork:
        assert set(numbers.tolist()) == {2.0}
        sizes.append(len(numbers))
        numbers.fill_(total)
        return FakeWork(ends=ends)

    monkeypatch.setattr(connections.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(connections.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(connections.dist, "get_rank", lambda group: 1)
    group: Any = object()
    layout = make_layout(TrainingConfig(num_drafter_ranks=2))
    check_connections(World(layout, 1, [torch.device("cpu")], None, group, None), seconds=0.01)
    return sizes


def test_small_and_large_sums_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, 3.0) == [connections.SMALL, connections.LARGE_CPU]


def test_a_wrong_sum_names_the_rank_and_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunFailed, match="^rank 1 on cpu: the sum of 1,024 bytes over 2 ranks is 2 in place of 3"
    ):
        check(monkeypatch, 2.0)


def test_a_sum_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunFailed, match="has not ended within 0 s; on GPUs without NVLink try NCCL_P2P_DISABLE=1"
    ):
        check(monkeypatch, 3.0, ends=False)


def test_one_process_has_no_connections() -> None:
    layout = make_layout(TrainingConfig())
    check_connections(World(layout, 0, [torch.device("cpu")], None, None, None))
