"""What training reads of the target for a microbatch, and the optional cache that keeps it between epochs.

The cache holds samples, not microbatches, so any plan can use it; but it fills by the microbatches of the
first plan. A sample's states depend in the last bits on what it was captured with (matrix products round by
shape), so a sample captured one way before a kill and another way after it would break bit-equal resume. With
fixed groups a sample's cached states are a function of the first plan alone, and the first epoch captures
nothing it does not train on.

Shape letters: T packed tokens, F = captured layers x target width, D target width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.config import ObjectiveConfig, TargetConfig
from dflash_core.model.loss import target_labels
from dflash_core.model.target import Target
from dflash_core.training.feed import Microbatch, Schedule


@dataclass(frozen=True)
class Features:
    """States of one microbatch, rows as in its `token_ids`."""

    hidden: Tensor  # [T, F] in the feature dtype
    labels: Tensor | None  # int64 [T], see `target_labels`; None: labels are the data's tokens
    last_hidden: Tensor | None  # [T, D]: what lm_head reads, for a KL objective

    def tensors(self) -> list[Tensor]:
        """Those that are there, in a fixed order (which senders and receivers share)."""
        return [t for t in (self.hidden, self.labels, self.last_hidden) if t is not None]

    def to(self, device: torch.device) -> Features:
        """Moved as a whole."""
        return self._each(lambda t: t.to(device))

    def zeros(self) -> Features:
        """Zeros of these shapes."""
        return self._each(torch.zeros_like)

    def ready_for_backward(self) -> Features:
        """Tensors made in inference mode cannot be saved for a backward pass: copy those."""
        return self._each(lambda t: t.clone() if t.is_inference() else t)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Features:
        labels = None if self.labels is None else change(self.labels)
        last = None if self.last_hidden is None else change(self.last_hidden)
        return Features(change(self.hidden), labels, last)


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Shapes of `Features` as a function of the number of tokens, known on every rank before the run."""

    hidden_width: int  # F
    hidden_dtype: torch.dtype
    has_labels: bool
    last_width: int  # D, or 0: no last hidden state
    last_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        objective: ObjectiveConfig,
        *,
        layers: int,
        width: int,
        feature_dtype: torch.dtype,
        compute: torch.dtype,
    ) -> FeatureSpec:
        return cls(
            hidden_width=layers * width,
            hidden_dtype=feature_dtype,
            has_labels=objective.labels == "target",
            last_width=width if objective.loss == "kl" else 0,
            last_dtype=compute,
        )

    def empty(self, num_tokens: int, device: torch.device) -> Features:
        """Buffers to receive into."""
        return Features(
            torch.empty(num_tokens, self.hidden_width, dtype=self.hidden_dtype, device=device),
            torch.empty(num_tokens, dtype=torch.int64, device=device) if self.has_labels else None,
            torch.empty(num_tokens, self.last_width, dtype=self.last_dtype, device=device)
            if self.last_width
            else None,
        )

    @property
    def bytes_per_token(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.empty(1, torch.device("cpu")).tensors())


class Capture(Protocol):
    """Anything that gives the features of a microbatch."""

    def __call__(self, microbatch: Microbatch) -> Features: ...


class TargetCapture:
    """Runs the target: only up to the last captured layer when labels are the data's tokens."""

    def __init__(self, target: Target, objective: ObjectiveConfig) -> None:
        self.target = target
        self.want_labels, self.want_last = objective.labels == "target", objective.loss == "kl"

    def __call__(self, microbatch: Microbatch) -> Features:
        return self.run(microbatch.token_ids, microbatch.loss_mask, microbatch.cu_seqlens, microbatch.width)

    def run(
        self,
        token_ids: NDArray[np.int64],
        loss_mask: NDArray[np.uint8],
        cu_seqlens: NDArray[np.int32],
        width: int,
    ) -> Features:
        captured = self.target.capture(
            token_ids, cu_seqlens, width, want_last_hidden=self.want_labels or self.want_last
        )
        labels = None
        if self.want_labels:
            assert captured.last_hidden is not None
            device = captured.last_hidden.device
            mask, bounds = torch.from_numpy(loss_mask).to(device), torch.from_numpy(cu_seqlens).to(device)
            labels = target_labels(captured.last_hidden, self.target.head_weight, mask, bounds)
        last_hidden = captured.last_hidden if self.want_last else None
        return Features(captured.features, labels, last_hidden).ready_for_backward()


class CaptureCache:
    """Keeps the features of training samples in memory or on disk, up to a limit.

    Whether a sample is kept is a function of the first plan: groups (its microbatches, in order) as long as
    they fit. Samples beyond the limit are captured each time, and the start-up line says how many.

    Args:
        directory: None keeps tensors in memory; else one safetensors file a group, written through a
            temporary name,
            shared by all ranks and by later runs with the same key.
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
        kept = int(plan.offsets[self.num_groups])
        rows = self.store.train_indices[plan.order[:kept]]
        self._group = np.full(len(self.store), -1, dtype=np.int64)
        self._first = np.zeros(len(self.store), dtype=np.int64)  # of the sample within its group
        for group in range(self.num_groups):
            members = rows[plan.offsets[group] : plan.offsets[group + 1]]
            lengths = self.store.lengths[members].astype(np.int64)
            self._group[members] = group
            self._first[members] = np.cumsum(lengths) - lengths
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        where = "memory" if directory is None else str(directory)
        self.description = (
            f"capture cache: {kept} of {len(plan.order)} samples, {self.bytes / 1e9:.2f} GB in {where} "
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
            ends = np.cumsum(self.store.lengths[rows])
            for i, end in zip(absent, ends):
                begin = end - self.store.lengths[microbatch.sample_rows[i]]
                parts[i] = [t[begin:end] for t in tokens.tensors()]
        for group in np.unique(groups[groups >= 0]):
            members = np.flatnonzero(groups == group)
            bounds = [
                (int(self._first[row]), int(self._first[row] + self.store.lengths[row]))
                for row in microbatch.sample_rows[members]
            ]
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
        """Slices of a group's tensors, capturing the group first when it is not there."""
        if self.directory is None:
            if group not in self._memory:
                self._memory[group] = self._run(*self.schedule.rows(0, group))
            return [[t[a:b] for t in self._memory[group].tensors()] for a, b in bounds]
        path = self.directory / f"group-{group:06d}.safetensors"
        if not path.exists():
            features = self._run(*self.schedule.rows(0, group))
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            save_file({str(i): t.contiguous().cpu() for i, t in enumerate(features.tensors())}, partial)
            os.replace(partial, path)
        device = self.capture.target.device
        with safe_open(path, framework="pt") as file:
            slices = [file.get_slice(name) for name in sorted(file.keys())]
            return [[s[a:b].to(device) for s in slices] for a, b in bounds]


def make_capture(
    target: Target,
    config: TargetConfig,
    objective: ObjectiveConfig,
    schedule: Schedule,
    spec: FeatureSpec,
    cache_root: Path,
    fingerprint: str,
) -> tuple[Capture, str]:
    """The capture that `target.cache` asks for, and a line about the cache ("" without one).

    A directory on disk is named by all that decides the states.
    """
    capture = TargetCapture(target, objective)
    if config.cache == "none":
        return capture, ""
    directory = None
    if config.cache == "disk":
        decides = [fingerprint, list(target.layer_ids), str(spec), str(target.compute_dtype)]
        decides += [schedule.store.digest, schedule.digests[0]]
        key = hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()
        directory = cache_root / key
    cache = CaptureCache(capture, schedule, spec, config.cache_limit_gb, directory)
    return cache, cache.description
