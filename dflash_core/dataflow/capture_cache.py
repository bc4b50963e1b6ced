"""A cache that keeps the target's features between epochs, in memory or on disk.

Policy: the cache holds samples, not microbatches, so any plan can use it; but it fills by the microbatches of
the first plan. A sample's states depend in the last bits on what it was captured with (matrix products round
by shape), so a sample captured one way before a kill and another way after it would break bit-equal resume.
With fixed groups a sample's cached states are a function of the first plan alone, and the first epoch
captures nothing it does not train on.

Price: `FeatureSpec.bytes_per_token` for each token of the samples kept. Samples beyond
`target.cache_limit_gb` are captured in every epoch, and the start-up line counts them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.config import ObjectiveConfig, TargetConfig
from dflash_core.dataflow.schedule import Schedule
from dflash_core.files import bytes_digest, complete_file
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.target.capture import Capture, TargetCapture
from dflash_core.target.target import Target


class CaptureCache:
    """Features of training samples, kept up to a limit.

    Which samples are kept is a function of the first plan: its microbatches, in order, as long as they fit.

    Args:
        capture: runs the target for what is not cached.
        schedule: of the run; its first plan defines the groups.
        spec: shapes of the features.
        limit_gb: upper limit of the cache, 1e9 bytes each.
        directory: None keeps tensors in memory; else one safetensors file per group, shared by all ranks and
            by later runs with the same key.
    """

    def __init__(
        self,
        capture: TargetCapture,
        schedule: Schedule,
        spec: FeatureSpec,
        limit_gb: float,
        directory: Path | None,
    ) -> None:
        self.capture, self.schedule, self.store, self.spec = capture, schedule, schedule.store, spec
        self.directory = directory
        self._memory: dict[int, Features] = {}
        plan = schedule.plan(0)
        sizes = np.add.reduceat(self.store.lengths[self.store.train_indices[plan.order]], plan.offsets[:-1])
        sizes = sizes.astype(np.int64) * spec.bytes_per_token
        self.num_groups = int(np.searchsorted(np.cumsum(sizes), limit_gb * 1e9, side="right"))
        self.bytes = int(sizes[: self.num_groups].sum())
        num_cached = int(plan.offsets[self.num_groups])
        rows = self.store.train_indices[plan.order[:num_cached]]
        self._group = np.full(len(self.store), -1, dtype=np.int64)
        # The sample's first token within its group.
        self._first = np.zeros(len(self.store), dtype=np.int64)
        for group in range(self.num_groups):
            members = rows[plan.offsets[group] : plan.offsets[group + 1]]
            lengths = self.store.lengths[members].astype(np.int64)
            self._group[members] = group
            self._first[members] = np.cumsum(lengths) - lengths
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        where = "memory" if directory is None else str(directory)
        self.description = (
            f"capture cache: {num_cached} of {len(plan.order)} samples, {self.bytes / 1e9:.2f} GB in {where} "
            f"(target.cache_limit_gb {limit_gb:g})"
        )

    def __call__(self, microbatch: Microbatch) -> Features:
        groups = self._group[microbatch.sample_rows]
        if (groups < 0).all():
            return self.capture(microbatch)
        parts: list[list[Tensor]] = [[] for _ in microbatch.sample_rows]
        absent = np.flatnonzero(groups < 0)
        if len(absent):
            rows = microbatch.sample_rows[absent]
            tokens = self._run(rows, microbatch.width)
            for i, end in zip(absent, np.cumsum(self.store.lengths[rows])):
                begin = end - self.store.lengths[microbatch.sample_rows[i]]
                parts[i] = [t[begin:end] for t in tokens.tensors()]
        for group in np.unique(groups[groups >= 0]):
            members = np.flatnonzero(groups == group)
            member_rows = microbatch.sample_rows[members]
            starts = self._first[member_rows]
            ends = starts + self.store.lengths[member_rows]
            bounds = list(zip(starts.tolist(), ends.tolist()))
            for i, tensors in zip(members, self._read(int(group), bounds)):
                parts[i] = tensors
        return self._assemble([torch.cat(column) for column in zip(*parts)])

    def _assemble(self, tensors: list[Tensor]) -> Features:
        hidden, *rest = tensors
        labels = rest.pop(0) if self.spec.has_labels else None
        return Features(hidden, labels, rest.pop(0) if rest else None)

    def _run(self, rows: NDArray[np.int32], width: int) -> Features:
        token_ids, loss_mask, cu_seqlens = self.store.gather(rows)
        return self.capture.run(token_ids.astype(np.int64), loss_mask, cu_seqlens.astype(np.int32), width)

    def _read(self, group: int, bounds: list[tuple[int, int]]) -> list[list[Tensor]]:
        """Return slices of a group's tensors; capture the group first when it is not cached."""
        if self.directory is None:
            if group not in self._memory:
                self._memory[group] = self._run(*self.schedule.rows(0, group))
            return [[t[a:b] for t in self._memory[group].tensors()] for a, b in bounds]
        path = self.directory / f"group-{group:06d}.safetensors"
        try:
            return self._slices(path, group, bounds)
        # Missing or damaged. The same group of samples is captured again, with the same result.
        except (OSError, SafetensorError, ValueError):
            features = self._run(*self.schedule.rows(0, group))
        tensors = {str(i): t.contiguous().cpu() for i, t in enumerate(features.tensors())}
        with complete_file(path) as temporary:
            save_file(tensors, temporary)
        return self._slices(path, group, bounds)

    def _slices(self, path: Path, group: int, bounds: list[tuple[int, int]]) -> list[list[Tensor]]:
        device = self.capture.target.device
        with safe_open(path, framework="pt") as file:
            slices = [file.get_slice(name) for name in sorted(file.keys())]
            self._check_shapes(group, [tuple(s.get_shape()) for s in slices])
            return [[s[a:b].to(device) for s in slices] for a, b in bounds]

    def _check_shapes(self, group: int, shapes: list[tuple[int, ...]]) -> None:
        """Check the shapes in a group's file against what capturing the group would give.

        Raises:
            ValueError: they differ.
        """
        rows, _ = self.schedule.rows(0, group)
        empty = self.spec.empty(0, torch.device("cpu")).tensors()
        expected = [(int(self.store.lengths[rows].sum()), *tensor.shape[1:]) for tensor in empty]
        if shapes != expected:
            raise ValueError(f"tensors of {shapes}, expected {expected}")


def make_capture(
    target: Target,
    config: TargetConfig,
    objective: ObjectiveConfig,
    schedule: Schedule,
    spec: FeatureSpec,
    cache_root: Path,
    fingerprint: str,
) -> tuple[Capture, str]:
    """Return the capture that `target.cache` selects, and a line about the cache ("" without one).

    A directory on disk is named by all that decides the states.
    """
    capture = TargetCapture(target, objective)
    if config.cache == "none":
        return capture, ""
    directory = None
    if config.cache == "disk":
        decides = [fingerprint, list(target.layer_ids), str(spec), str(target.compute_dtype)]
        decides += [schedule.store.digest, schedule.digests[0]]
        directory = cache_root / bytes_digest(json.dumps(decides).encode())
    cache = CaptureCache(capture, schedule, spec, config.cache_limit_gb, directory)
    return cache, cache.description
