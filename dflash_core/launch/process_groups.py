"""This process among the ranks: its devices, process groups, and the few collectives of the control plane.

Groups are made once, on all ranks in one order. One process needs none: every group is None and the
collectives return their argument.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dflash_core.config import TrainingConfig
from dflash_core.errors import UserError, one_line
from dflash_core.launch.layout import Layout, devices_of_rank, make_layout, ranks_per_node


@dataclass(frozen=True)
class World:
    """This process in the layout; groups are None for a single process and on target ranks."""

    layout: Layout
    rank: int
    devices: list[torch.device]  # more than one for a target that is spread over them
    # gloo over the drafter ranks, for sums of statistics and for agreeing to stop
    control: dist.ProcessGroup | None
    # the drafter ranks on the device's backend
    gradients: dist.ProcessGroup | None
    # gloo over the drafter ranks, for the saving thread alone
    checkpoint: dist.ProcessGroup | None

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self.devices[0]

    @property
    def is_drafter(self) -> bool:
        return self.rank in self.layout.drafters

    @property
    def is_target(self) -> bool:
        return self.rank in self.layout.targets

    @property
    def is_leader(self) -> bool:
        """True on rank 0, always a drafter: it writes metrics and the console."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise float64 sum over the drafter ranks, the same numbers on each."""
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return list(total.tolist())

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank of the world."""
        if not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def pick_devices(config: TrainingConfig, *, spread_target: bool = False) -> list[torch.device]:
    """Return the devices of this rank: one, or its share of them when the target is spread over several.

    Raises:
        UserError: `training.device` is cuda without CUDA, or the node has fewer devices than ranks.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            f"training.device: 'cuda' is not available on this machine: {_why_no_cuda()}; allowed: auto, cpu"
        )
    if config.device == "cpu" or not available:
        return [torch.device("cpu")]
    local = int(os.environ.get("LOCAL_RANK", "0"))
    numbers = devices_of_rank(config, local, torch.cuda.device_count(), spread_target=spread_target)
    return [torch.device("cuda", number) for number in numbers]


def _why_no_cuda() -> str:
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    # A driver that is too old or absent; torch raises both.
    except (AssertionError, RuntimeError) as error:
        return one_line(error)
    return f"no device is visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r})"


def rank_of_process() -> int:
    """Return the rank that torchrun gave to this process; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def tear_down() -> None:
    """Leave the process groups; peers that still exchange data with this rank get an error at once."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_up(config: TrainingConfig, *, spread_target: bool = False) -> World:
    """Join the torchrun world (or be a single process), make the groups, pick the devices.

    Raises:
        UserError: torchrun started another number of ranks, see also `pick_devices`.
    """
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
    # The launcher finds and ends stalls (stall_seconds); this limit is only a second line of defence.
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=2 * config.stall_seconds + 600))
    drafters = list(layout.drafters)
    control, checkpoint = dist.new_group(drafters, backend="gloo"), dist.new_group(drafters, backend="gloo")
    gradients = dist.new_group(drafters)
    if rank not in drafters:
        return World(layout, rank, devices, None, None, None)
    return World(layout, rank, devices, control, gradients, checkpoint)
