"""Commands for one and several nodes, and the message about a stall."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import TrainingConfig
from dflash_core.errors import UserError
from dflash_core.launch import launcher, stop_signal
from dflash_core.launch.launcher import node_commands, torchrun_arguments
from dflash_core.launch.rank_status import read_records


def test_a_stall_names_the_rank_that_others_wait_for(tmp_path: Path, rank_record: Any) -> None:
    """The target is a step ahead, and still it is the one that blocks the drafter."""
    drafter, target = rank_record(tmp_path, 0, "drafter"), rank_record(tmp_path, 1, "target")
    drafter.phase("wait for target rank 1", step=7)
    target.phase("capture", step=8)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]  # nothing here to send signals to
    assert "slowest: rank 1 (target" in launcher.describe_stall(tmp_path, records, 60.0)
    drafter.phase("train", step=7)
    target.phase("wait for drafter rank 0", step=8)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]
    message = launcher.describe_stall(tmp_path, records, 60.0)
    assert "slowest: rank 0 (drafter" in message
    assert "phase 'train' of step 7" in message


def test_a_stall_in_a_collective_names_the_rank_that_did_not_join(tmp_path: Path, rank_record: Any) -> None:
    """Three colocated ranks: two wait for the third, which is stuck in its own work, or a step behind."""
    ranks = [rank_record(tmp_path, rank, "colocated") for rank in range(3)]
    for rank in ranks:
        rank.phase("wait for other ranks", step=7, microbatch=1)
    ranks[2].phase("save", step=7)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]
    message = launcher.describe_stall(tmp_path, records, 60.0)
    assert "slowest: rank 2 (colocated" in message
    assert "phase 'save' of step 7" in message
    ranks[2].phase("wait for feed", step=7, microbatch=0)
    ranks[1].phase("wait for other ranks", step=8)
    ranks[0].phase("wait for other ranks", step=8)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]
    assert "slowest: rank 2 (colocated" in launcher.describe_stall(tmp_path, records, 60.0)


def test_one_node_needs_no_address_and_several_get_a_command_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0,eth1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    one = torchrun_arguments(TrainingConfig(num_drafter_ranks=2), Path("r/run.json"))
    assert one[:3] == ["--standalone", "--nproc-per-node", "2"]
    config = TrainingConfig(topology="split", num_target_ranks=12, num_drafter_ranks=4, num_nodes=2)
    commands = node_commands(config, Path("r/run.json"))
    assert len(commands) == 2
    start = f"cd {shlex.quote(os.getcwd())} && NCCL_SOCKET_IFNAME=eth0,eth1 {shlex.quote(sys.executable)} "
    assert commands[1].startswith(start + "-m torch.distributed.run --nnodes 2 ")
    assert "--nproc-per-node 8" in commands[1]
    assert "--node-rank 1" in commands[1]
    assert "--rdzv-id r" in commands[1]


def test_ranks_that_do_not_divide_by_nodes_are_rejected() -> None:
    with pytest.raises(UserError, match="num_nodes: 2 does not divide the 3 ranks"):
        node_commands(TrainingConfig(num_drafter_ranks=3, num_nodes=2), Path("run.json"))


def test_a_stop_takes_less_than_28_seconds_in_all() -> None:
    """Ranks end by themselves before they are killed, and both within the 30 s that Prefect allows."""
    assert stop_signal.STOP_SECONDS + stop_signal.PEER_GRACE_SECONDS < launcher.TERMINATE_SECONDS
    assert launcher.TERMINATE_SECONDS + launcher.TORCHRUN_SECONDS + 1 < 28
