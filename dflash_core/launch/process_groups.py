"""This process among the ranks: device, threads, process groups, and the few collectives of the control
plane.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dflash_core.config import TrainingConfig
from dflash_core.errors import UserError
from dflash_core.launch.layout import Layout, devices_of_rank, make_layout, ranks_per_node


@dataclass(frozen=True)
class World:
    """This process in the layout, with its device and process groups (None for one process).

    `control`: gloo over all drafter ranks, for sums of statistics and for agreeing to stop.
    `gradients`: the drafter ranks, on the device's backend. `checkpoint`: gloo, for the saving thread alone.
    """

    layout: Layout
    rank: int
    devices: list[torch.device]  # more than one for a target that is spread over them
    control: dist.ProcessGroup | None
    gradients: dist.ProcessGroup | None
    checkpoint: dist.ProcessGroup | None

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors lie."""
        return self.devices[0]

    @property
    def is_drafter(self) -> bool:
        return self.rank in self.layout.drafters

    @property
    def is_target(self) -> bool:
        return self.rank in self.layout.targets

    @property
    def is_leader(self) -> bool:
        """Rank 0: writes metrics, talks to the console; always a drafter."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise float64 sum over the drafter ranks; every drafter gets the same numbers."""
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return list(total.tolist())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank of the world."""
        if not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def pick_devices(config: TrainingConfig, *, spread_target: bool = False) -> list[torch.device]:
    """This rank's: one, or for a target that is spread over several (`target.device_map`) those of its share.

    Raises:
        UserError: CUDA was asked for and there is none, or fewer devices than ranks on this node.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError("training.device: 'cuda' is not available on this machine; allowed: auto, cpu")
    if config.device == "cpu" or not available:
        return [torch.device("cpu")]
    local = int(os.environ.get("LOCAL_RANK", "0"))
    numbers = devices_of_rank(config, local, torch.cuda.device_count(), spread_target=spread_target)
    return [torch.device("cuda", number) for number in numbers]


def rank_of_process() -> int:
    """As torchrun says; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def tear_down() -> None:
    """Leave the process groups; peers that still talk to this rank get an error at once instead of
    waiting.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def set_up(config: TrainingConfig, *, spread_target: bool = False) -> World:
    """Join the torchrun world (or be a single process), make the groups, pick the device."""
    layout = make_layout(config)
    devices = pick_devices(config, spread_target=spread_target)
    device = devices[0]
    rank, world = rank_of_process(), int(os.environ.get("WORLD_SIZE", "1"))
    if world != layout.world_size:
        raise UserError(
            f"training: {layout.world_size} ranks from topology {config.topology}, num_target_ranks and "
            f"num_drafter_ranks, but torchrun started {world}; allowed: --nproc-per-node "
            f"{ranks_per_node(config)}"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        return World(layout, rank, devices, None, None, None)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Stalls are found and ended by the launcher (stall_seconds); this limit is only a second net behind it.
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=2 * config.stall_seconds + 600))
    drafters = list(layout.drafters)
    control, checkpoint = dist.new_group(drafters, backend="gloo"), dist.new_group(drafters, backend="gloo")
    gradients = dist.new_group(drafters)
    if rank not in drafters:
        return World(layout, rank, devices, None, None, None)
    return World(layout, rank, devices, control, gradients, checkpoint)
