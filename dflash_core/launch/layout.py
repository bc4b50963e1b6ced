"""Who does what: which ranks capture, which train, and which microbatch goes where.

`colocated`: every rank captures its own microbatches and trains on them. `split`: some ranks hold the target
and only capture, the others hold the drafter and only train; hidden states travel point to point. Both are
one torchrun world. The assignment is a pure function of the plan, the step and the numbers of ranks: no
server, no polling, and each pair of ranks exchanges its microbatches in plan order.

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
    """Processes that torchrun starts on each node.

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
    """CUDA devices of a rank on its node: one each, by its number there.

    A target spread over several (`target.device_map`) takes, in `split` mode, an equal share of those that no drafter
    has: with 8 devices, 2 drafter ranks and 1 target rank the drafters have 0 and 1, the target 2 to 7.

    Raises:
        UserError: more ranks than devices, or roles that do not divide by the nodes.
    """
    ranks = ranks_per_node(config)
    if ranks > num_devices:
        raise UserError(
            f"training: {ranks} ranks on this node, {num_devices} CUDA devices; allowed: at most one rank a "
            "device, or training.device cpu"
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
    """Roles of all ranks."""
    per_node = ranks_per_node(config)
    if config.topology == "colocated":
        everyone = tuple(range(per_node * config.num_nodes))
        return Layout(False, tuple(((r,), (r,)) for r in everyone))
    d, t, n = config.num_drafter_ranks, config.num_target_ranks, config.num_nodes
    if d % n or t % n:  # uneven: one island over all nodes
        return Layout(True, ((tuple(range(d)), tuple(range(d, d + t))),))
    islands = []
    for node in range(n):
        first = node * per_node
        middle = first + d // n
        islands.append((tuple(range(first, middle)), tuple(range(middle, first + per_node))))
    return Layout(True, tuple(islands))


def role_of(layout: Layout, rank: int) -> str:
    """`colocated`, `drafter` or `target`."""
    return "colocated" if not layout.split else "drafter" if rank in layout.drafters else "target"


def split_advice(
    capture_seconds: float, train_seconds: float, *, num_targets: int, num_drafters: int, split: bool
) -> str:
    """A sentence on who waits for whom, from the seconds of work that all ranks together spent on each part.

    With T target ranks and D drafter ranks a run takes about max(capture / T, train / D): the slower side
    sets the pace. Colocated ranks take (capture + train) / N, less what overlaps on a GPU. Example: 300 s of
    capture and 100 s of training on 2+2 ranks: 150 s; 3+1 would take 100 s, 1.5 times as fast.
    """
    work = f"capture {capture_seconds:.1f} s, training {train_seconds:.1f} s of work"
    if not split:
        return f"{work} on {num_drafters} colocated ranks"
    targets, drafters = capture_seconds / num_targets, train_seconds / num_drafters
    ranks = num_targets + num_drafters
    now = max(targets, drafters)
    best = min(range(1, ranks), key=lambda t: max(capture_seconds / t, train_seconds / (ranks - t)))
    then = max(capture_seconds / best, train_seconds / (ranks - best))
    slower = "targets" if targets > drafters else "drafters"
    share = min(targets, drafters) / now if now else 1.0
    said = f"{work}: {slower} are the bottleneck, the others busy {share:.0%} of the time"
    if best == num_targets or then >= 0.95 * now:
        return f"{said}; this split is the best"
    return f"{said}: {best}+{ranks - best} (targets+drafters) would give about {now / then:.2f}x"
