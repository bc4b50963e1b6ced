"""Other samplers and packers, run by their own code, with their batches turned into our plans for measuring.

Part of `benchmarks.batching`, whose docstring has the commands that install them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.batching.metrics import plan_report, rank_balance, repeated_pair_share
from dflash_core.batching.plan import BatchPlan
from dflash_core.config import BatchingConfig

BUDGET = 49_152
# Microbatches of a step.
WINDOW = 64
RANKS = 8


def draft_slots_of(lengths: np.ndarray) -> np.ndarray:
    """Return int32[n] for samples with 60% supervised tokens, 512 anchors per sample and blocks of 16."""
    return (np.minimum(512, (lengths * 0.6).astype(np.int32)) * 16).astype(np.int32)


def measure(plan: BatchPlan, before: BatchPlan | None) -> dict[str, float]:
    report, balance = plan_report(plan), rank_balance(plan, RANKS)
    over = int((plan.work.slots > BUDGET).sum())
    return {
        "microbatches": float(report["num_microbatches"]),
        "efficiency": report["padding_efficiency"],
        "fill": report["fill"],
        "over": float(over),
        "mix_microbatch": report["mixing_microbatch"],
        "mix_step": report["mixing_step"],
        "again": float("nan") if before is None else repeated_pair_share(before, plan),
        "balance": balance["seconds"],
        "balance_lockstep": balance["lockstep"],
        "balance_target": balance["target_slots"],
        "balance_attention": balance["attention"],
        "balance_draft": balance["draft_slots"],
        "shapes": float(report["num_shapes"]),
    }


def plan_of(batches: Iterable[Iterable[int]], lengths: np.ndarray, *, packed: bool) -> BatchPlan:
    """Return a peer's batches, in its order, as a plan with steps of 64, so that one code measures all."""
    lists = [np.fromiter(batch, np.int32) for batch in batches]
    order = np.concatenate(lists)
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])]).astype(np.int64)
    slots = draft_slots_of(lengths)[order].astype(np.int64)
    ordered = lengths[order].astype(np.int64)
    longest = np.maximum.reduceat(ordered, offsets[:-1])
    last = len(lists)
    return BatchPlan(
        order=order,
        offsets=offsets,
        step_offsets=np.append(np.arange(0, last, WINDOW), last).astype(np.int64),
        widths=(np.zeros(last) if packed else longest).astype(np.int32),
        tokens=np.add.reduceat(ordered, offsets[:-1]),
        squared_lengths=np.add.reduceat(ordered * ordered, offsets[:-1]),
        draft_slots=np.add.reduceat(slots, offsets[:-1]),
        draft_pairs=np.add.reduceat(slots * ordered, offsets[:-1]),
        config=BatchingConfig(strategy="packed" if packed else "random", token_budget=BUDGET),
        seed=0,
        epoch=0,
    )


def run_group_by_length(lengths: np.ndarray, epoch: int, rows: int) -> list[np.ndarray]:
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(epoch)
    indices = np.array(get_length_grouped_indices(lengths.tolist(), rows, generator=generator))
    return np.split(indices, np.arange(rows, len(indices), rows))


def run_lhotse(lengths: np.ndarray, epoch: int, num_buckets: int) -> list[np.ndarray]:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset.sampling import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        MonoCut(id=str(i), start=0.0, duration=float(length), channel=0, custom={"row": i})
        for i, length in enumerate(lengths)
    )
    sampler = DynamicBucketingSampler(
        cuts, max_duration=float(BUDGET), num_buckets=num_buckets, shuffle=True, seed=0, drop_last=False
    )
    sampler.set_epoch(epoch)
    return [np.array([int(cut.id) for cut in batch]) for batch in sampler]


def run_trl(lengths: np.ndarray, epoch: int) -> list[np.ndarray]:
    """Return TRL's packs.

    Their samples are read back from `seq_lengths`: any unused sample of the same length stands for one.
    """
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    packed = pack_dataset(Dataset(pa.table({"input_ids": tokens})), BUDGET)
    rows = packed.with_format("arrow")[:]["seq_lengths"].to_pylist()
    by_length = np.argsort(lengths, kind="stable")
    next_of = {int(v): int(s) for v, s in zip(*np.unique(lengths[by_length], return_index=True))}
    out = []
    for row in rows:
        picked = []
        for length in row:
            picked.append(by_length[next_of[length]])
            next_of[length] += 1
        out.append(np.array(picked))
    return out


def run_axolotl(lengths: np.ndarray, epoch: int) -> list[np.ndarray]:
    import torch

    sampler_class = axolotl_multipack()
    generator = torch.Generator().manual_seed(epoch)
    sampler = sampler_class(
        torch.utils.data.RandomSampler(range(len(lengths)), generator=generator),
        batch_size=1,
        batch_max_len=BUDGET,
        lengths=lengths,
        bin_size=10_000,
        drop_last=False,
        num_processes=2,
    )
    return [np.array(packs[0]) for packs in sampler.generate_batches(set_stats=False)]


def axolotl_multipack() -> type:
    """Return `MultipackBatchSampler` of the installed axolotl, or of its source file alone."""
    try:
        return importlib.import_module("axolotl.utils.samplers.multipack").MultipackBatchSampler
    except ImportError:
        package = importlib.util.find_spec("axolotl")
        if package is None or not package.submodule_search_locations:
            raise
        path = Path(package.submodule_search_locations[0]) / "utils" / "samplers" / "multipack.py"
        for name, attribute in (("distributed", "reduce_and_broadcast"), ("logging", "get_logger")):
            stand_in = types.ModuleType(f"axolotl.utils.{name}")
            setattr(stand_in, attribute, __import__("logging").getLogger)
            sys.modules[f"axolotl.utils.{name}"] = stand_in
        spec = importlib.util.spec_from_file_location("axolotl_multipack", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["axolotl_multipack"] = module
        spec.loader.exec_module(module)
        return module.MultipackBatchSampler


@dataclass(frozen=True)
class Peer:
    """A sampler or packer of another project.

    Args:
        distribution: name of its Python package.
        run: (lengths, epoch) -> the batches of the epoch, as arrays of samples.
        is_packed: whether its batches need no padding.
        is_slow: whether it gets fewer samples.
        is_fixed: whether its batches are the same in every epoch.
    """

    distribution: str
    run: Callable[[np.ndarray, int], list[np.ndarray]]
    is_packed: bool = False
    is_slow: bool = False
    is_fixed: bool = False


PEERS = {
    "transformers group_by_length, 6 rows": Peer("transformers", partial(run_group_by_length, rows=6)),
    "transformers group_by_length, 30 rows": Peer("transformers", partial(run_group_by_length, rows=30)),
    "lhotse DynamicBucketing, 30": Peer("lhotse", partial(run_lhotse, num_buckets=30), is_slow=True),
    "TRL pack_dataset bfd": Peer("trl", run_trl, is_packed=True, is_slow=True, is_fixed=True),
    "axolotl multipack": Peer("axolotl", run_axolotl, is_packed=True),
}


def measure_peers(
    lengths: np.ndarray, slow_samples: int, wanted: Callable[[str], bool]
) -> dict[str, dict[str, Any]]:
    """Return the figures of every wanted peer that is installed, with its version in the name."""
    out: dict[str, dict[str, Any]] = {}
    for name, peer in PEERS.items():
        if not wanted(name):
            continue
        try:
            label = f"{name} ({version(peer.distribution)})"
        except PackageNotFoundError:
            print(f"{name}: not installed, left out", file=sys.stderr)
            continue
        used = lengths[:slow_samples] if peer.is_slow else lengths
        scale = len(lengths) / len(used)
        with contextlib.redirect_stdout(sys.stderr):
            peer.run(used[:2000], 0)  # imports and compiles
            start = time.perf_counter()
            batches = peer.run(used, 1)
            seconds = (time.perf_counter() - start) * scale
            before = None if peer.is_fixed else plan_of(peer.run(used, 0), used, packed=peer.is_packed)
        row = measure(plan_of(batches, used, packed=peer.is_packed), before) | {"seconds": seconds}
        row["microbatches"] *= scale
        out[label] = row | {"samples": len(used)}
    return out
