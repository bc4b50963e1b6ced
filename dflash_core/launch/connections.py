"""Check of the connections between ranks, before anything large depends on them.

A small and a large sum over all drafter ranks, of numbers that are known. Machines whose GPUs cannot reach
each other hang in the first large sum, or give wrong numbers; found here, that takes a minute and not the
time limit of a stall.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from dflash_core.errors import RunFailed
from dflash_core.launch.process_groups import World

CONNECT_SECONDS = 60.0
# float32 elements: 1 KB, and 64 MB on a GPU or 4 MB on a CPU. Small sums take another path than large ones.
SMALL, LARGE_CPU, LARGE_CUDA = 256, 1 << 20, 1 << 24
ADVICE = (
    "on GPUs without NVLink try NCCL_P2P_DISABLE=1, and switch the IOMMU off (kernel option iommu=pt or "
    "off); between machines name the interface in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; "
    "NCCL_DEBUG=INFO says more"
)


def check_connections(world: World, *, seconds: float = CONNECT_SECONDS) -> None:
    """Sum known numbers over the drafter ranks, small and large.

    Raises:
        RunFailed: a sum does not end within `seconds`, or is wrong; names this rank, its device and what to
            try.
    """
    if world.gradients is None:
        return
    # Ranks load at their own pace, and the time limit counts from the slowest.
    world.sum([0.0])
    ranks = dist.get_world_size(world.gradients)
    mine = dist.get_rank(world.gradients) + 1
    for size in (SMALL, LARGE_CUDA if world.device.type == "cuda" else LARGE_CPU):
        numbers = torch.full((size,), float(mine), device=world.device)
        work = dist.all_reduce(numbers, group=world.gradients, async_op=True)
        where = f"rank {world.rank} on {world.device}: the sum of {size * 4:,} bytes over {ranks} ranks"
        deadline = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RunFailed(f"{where} has not ended within {seconds:.0f} s; {ADVICE}")
            time.sleep(0.001)
        work.wait()
        expected = ranks * (ranks + 1) / 2
        if (wrong := numbers[numbers != expected]).numel():
            raise RunFailed(f"{where} is {wrong[0].item():g} in place of {expected:g}; {ADVICE}")
