"""Roles and devices of the ranks."""

from __future__ import annotations

import pytest

from dflash_core.config import TrainingConfig
from dflash_core.errors import UserError
from dflash_core.launch.layout import devices_of_rank, make_layout, ranks_per_node, role_of
from tests.support.layouts import split


def test_roles() -> None:
    layout = make_layout(split(3, 1))
    assert (layout.drafters, layout.targets, layout.world_size) == ((0,), (1, 2, 3), 4)
    two_nodes = make_layout(split(4, 2, nodes=2))
    assert (two_nodes.drafters, two_nodes.targets) == ((0, 3), (1, 2, 4, 5))
    uneven = make_layout(split(3, 1, nodes=2))  # one island over both nodes
    assert uneven.islands == (((0,), (1, 2, 3)),)
    colocated = make_layout(TrainingConfig(num_drafter_ranks=2))
    assert colocated.drafters == colocated.targets == (0, 1)
    assert [role_of(layout, r) for r in (0, 1)] == ["drafter", "target"]
    assert role_of(colocated, 1) == "colocated"


def test_devices_of_a_node() -> None:
    def devices(config: TrainingConfig, *, spread: bool = True, num_devices: int = 8) -> list[list[int]]:
        ranks = range(ranks_per_node(config))
        return [list(devices_of_rank(config, r, num_devices, spread_target=spread)) for r in ranks]

    assert devices(split(3, 1), spread=False) == [[0], [1], [2], [3]]
    assert devices(split(1, 2)) == [[0], [1], [2, 3, 4, 5, 6, 7]]
    assert devices(split(2, 1)) == [[0], [1, 2, 3], [4, 5, 6]]
    assert devices(split(2, 2, nodes=2)) == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert devices(TrainingConfig()) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert devices(TrainingConfig(num_drafter_ranks=2)) == [[0], [1]]
    with pytest.raises(UserError, match="4 ranks on this node, 2 CUDA devices"):
        devices(split(3, 1), num_devices=2)
    with pytest.raises(UserError, match="num_drafter_ranks: 1 does not divide by training.num_nodes"):
        devices(split(3, 1, nodes=2))
