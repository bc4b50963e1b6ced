"""Roles of the ranks: which capture, which train, and which devices they use.

`colocated`: every rank captures its own microbatches and trains on them. `split`: some ranks hold the target
and only capture, the others hold the drafter and only train; hidden states travel point to point. Both are
one torchrun world, and the roles are a pure function of the settings: no server, no polling.

On several nodes, when both roles divide evenly, each node is an island: hidden states never leave it. Within
an island drafter ranks come first. Example, split with 3 targets and 1 drafter: rank 0 trains, ranks 1 to 3
capture; with 2 nodes of (1 drafter, 2 targets): ranks 0 and 3 train.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.config import TrainingConfig
from dflash_core.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Global ranks by role. `islands`: (drafter ranks, target ranks) that exchange hidden states."""

    split: bool
    islands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def drafters(self) -> tuple[int, ...]:
        return tuple(r for drafters, _ in self.islands for r in drafters)

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(r for _, targets in self.islands for r in targets)

    @property
    def world_size(self) -> int:
        return len({*self.drafters, *self.targets})


def ranks_per_node(config: TrainingConfig) -> int:
    """Return the number of processes that torchrun starts on each node.

    Raises:
        UserError: the ranks do not divide by the nodes.
    """
    ranks = config.num_drafter_ranks + (config.num_target_ranks if config.topology == "split" else 0)
    if ranks % config.num_nodes:
        raise UserError(
            f"training.num_nodes: {config.num_nodes} does not divide the {ranks} ranks of "
            f"num_drafter_ranks ({config.num_drafter_ranks}) and num_target_ranks ({config.num_target_ranks})"
        )
    return ranks // config.num_nodes


def devices_of_rank(
    config: TrainingConfig, local_rank: int, num_devices: int, *, spread_target: bool
) -> range:
    """Return the CUDA devices of a rank on its node: one each, with the rank's number there.

    In `split` mode a target spread over several devices (`target.device_map`) gets an equal share of those
    that no drafter has: with 8 devices, 2 drafter ranks and 1 target rank the drafters have 0 and 1, the
    target 2 to 7.

    Raises:
        UserError: more ranks than devices, or roles that do not divide by the nodes.
    """
    ranks = ranks_per_node(config)
    if ranks > num_devices:
        raise UserError(
            f"training: {ranks} ranks on this node, {num_devices} CUDA devices; allowed: at most one rank "
            "per device, or training.device cpu"
        )
    if not spread_target or config.topology == "colocated":
        return range(local_rank, local_rank + 1) if not spread_target or ranks > 1 else range(num_devices)
    drafters, uneven = divmod(config.num_drafter_ranks, config.num_nodes)
    if uneven:
        raise UserError(
            f"training.num_drafter_ranks: {config.num_drafter_ranks} does not divide by training.num_nodes "
            f"({config.num_nodes}); allowed with target.device_map: a multiple of it"
        )
    if local_rank < drafters:
        return range(local_rank, local_rank + 1)
    share = (num_devices - drafters) // (ranks - drafters)
    first = drafters + (local_rank - drafters) * share
    return range(first, first + share)


def make_layout(config: TrainingConfig) -> Layout:
    """Return the roles of all ranks."""
    per_node = ranks_per_node(config)
    if config.topology == "colocated":
        everyone = tuple(range(per_node * config.num_nodes))
        return Layout(split=False, islands=tuple(((r,), (r,)) for r in everyone))
    d, t, n = config.num_drafter_ranks, config.num_target_ranks, config.num_nodes
    if d % n or t % n:  # uneven: one island over all nodes
        return Layout(split=True, islands=((tuple(range(d)), tuple(range(d, d + t))),))
    islands = []
    for node in range(n):
        first = node * per_node
        middle = first + d // n
        islands.append((tuple(range(first, middle)), tuple(range(middle, first + per_node))))
    return Layout(split=True, islands=tuple(islands))


def role_of(layout: Layout, rank: int) -> str:
    """Return `colocated`, `drafter` or `target`."""
    return "colocated" if not layout.split else "drafter" if rank in layout.drafters else "target"
