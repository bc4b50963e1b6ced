"""Checkpoints that are complete or absent, and the state from which a run goes on bit for bit.

A checkpoint is a directory `checkpoints/step-00000100` with the tensors in the format of
torch.distributed.checkpoint (so it loads at any number of ranks, replicated or sharded), `state.json` and,
last, `manifest.json` with the size and digest of every file. It is written as `step-00000100.tmp` by a
thread, from a copy taken between two steps, and gets its name by one rename; training goes on meanwhile.
Whatever is incomplete or does not match its manifest is skipped, with a line that says so.

What is not stored is what a function gives: the learning rate (of the step), the order of samples (of the
plan), the anchors (of seed, epoch and sample).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dflash_core.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each weight, beside the number of updates


@dataclass
class State:
    """Everything a resume needs beside the tensors. `step` counts completed steps; counters run over the
    whole run.
    """

    step: int = 0
    updates: int = 0  # steps that changed the weights: those with a finite loss and gradient
    nonfinite_steps: int = 0
    nonfinite_in_a_row: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    train_seconds: float = 0.0
    capture_seconds: float = 0.0
    drafter_seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    validated_step: int = -1  # the step of the last finished validation
    validation_first: dict[str, float] | None = None
    validation_last: dict[str, float] | None = None
    best_value: float | None = None  # lowest validation loss
    best_step: int | None = None
    mlflow_run_id: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # decisive settings and digests of the inputs

    @classmethod
    def from_json(cls, values: dict[str, Any], where: Path) -> State:
        """Unknown or missing names are an error: a state that is half understood is not a state."""
        known = {f.name for f in dataclasses.fields(cls)}
        if values.keys() != known:
            odd = ", ".join(sorted(values.keys() ^ known))
            raise UserError(f"{where}: written by another version of this program; names that differ: {odd}")
        return cls(**values)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`field: old -> new` for every leaf in which two nested mappings differ."""
    out: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            out.append(f"{prefix}{name}: {a!r} -> {b!r}")
    return out


class Checkpointer:
    """Saves, finds, loads and prunes the checkpoints of one run directory.

    Args:
        directory: `<run>/checkpoints`, on a file system that all ranks share.
        keep_last: how many of the newest to keep; the one of `State.best_step` is kept besides.
        group: a gloo group of the ranks that train, used by nothing else (the saving thread talks on it);
            None for
            one process.
        rank: of this process where there is no group; only rank 0 writes.
    """

    def __init__(
        self, directory: Path, *, keep_last: int, group: dist.ProcessGroup | None, rank: int = 0
    ) -> None:
        self.directory, self.keep_last, self.group = Path(directory), keep_last, group
        self.rank = dist.get_rank(group) if group is not None else rank
        self.seconds = 0.0  # of the last save, from copy to publication
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if self.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self, state: State, drafter: nn.Module, optimizer: torch.optim.Optimizer, *, wait: bool = False
    ) -> None:
        """Copy the tensors, then write and publish in the background; `wait`: return when published.

        Raises:
            OSError: the previous or (with `wait`) this save failed; nothing is left under a final name.
        """
        self.wait()
        # The copy matters: the next step changes the weights in place while the thread writes.
        tensors = {k: v.to("cpu", copy=True) for k, v in _tensors(drafter, optimizer).items()}
        self._pending = self._pool.submit(self._write, dataclasses.asdict(state), tensors)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the save in progress is published; raises what it raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def raise_failure(self) -> None:
        """Raise what the save in progress has failed with, if it has; never waits."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _write(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        started = time.monotonic()
        final = self.directory / f"step-{state['step']:08d}"
        partial = final.with_name(final.name + ".tmp")
        try:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._barrier()
            writer = dcp.FileSystemWriter(partial, sync_files=True)
            with _quietly():
                dcp.save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            # Each rank reads back its own files (__RANK_*.distcp), so digests cost the time of the largest
            # share.
            mine = {p.name: _describe(p) for p in sorted(partial.glob(f"__{self.rank}_*"))}
            shares = self._gather(mine)
            if self.rank == 0:
                files = {name: entry for share in shares for name, entry in share.items()}
                (partial / "state.json").write_text(json.dumps(state, indent=1))
                for name in ("state.json", ".metadata"):
                    files[name] = _describe(partial / name)
                _write_durably(partial / "manifest.json", json.dumps({"files": files}, indent=1))
                if final.exists():  # the same step, saved before a resume
                    shutil.rmtree(final)
                os.replace(partial, final)
                _sync_directory(self.directory)
                self._prune(state["best_step"])
            self._barrier()
        except BaseException as error:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free / 1e9
            raise OSError(
                f"checkpoint {final} could not be written ({free:.2f} GB free there): {_root_cause(error)}"
            ) from error
        self.seconds = time.monotonic() - started

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def _gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        if self.group is None:
            return [value]
        out: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(out, value, group=self.group)
        return out

    def _prune(self, best_step: int | None) -> None:
        steps = sorted(self._names())
        for step in steps[: -self.keep_last]:
            if step != best_step:
                shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)

    def _names(self) -> list[int]:
        return [int(p.name[5:]) for p in self.directory.glob("step-*") if p.name[5:].isdigit()]

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest complete checkpoint, and a line for each newer one that had to be skipped."""
        skipped: list[str] = []
        for step in sorted(self._names(), reverse=True):
            path = self.directory / f"step-{step:08d}"
            problem = verify(path)
            if problem is None:
                return path, skipped
            skipped.append(f"skipped checkpoint {path.name}: {problem}")
        return None, skipped

    def at_step(self, step: int | None) -> Path | None:
        """The complete checkpoint of that step, if it is there."""
        path = self.directory / f"step-{step or 0:08d}"
        return path if step is not None and verify(path) is None else None

    def load(self, path: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
        """Fill the drafter's weights (and the optimizer's moments, unless None) in place; returns the state.

        Raises:
            UserError: the directory is not a complete checkpoint, or its tensors have other names or shapes.
        """
        if problem := verify(path):
            raise UserError(
                f"training.resume_from: {path}: {problem}; allowed: a complete checkpoint directory"
            )
        state = read_state(path)
        reader = dcp.FileSystemReader(path)
        wanted = {f"model.{n}": p.detach() for n, p in drafter.named_parameters()}
        if optimizer is not None:
            for n, p in drafter.named_parameters():
                moments = optimizer.state[p]
                moments["step"] = torch.tensor(float(state.updates))
                wanted |= {f"optimizer.{n}.{m}": moments[m] for m in MOMENTS}
        stored = reader.read_metadata().state_dict_metadata
        for name, tensor in wanted.items():
            shape = getattr(stored.get(name), "size", None)
            if shape != tensor.shape:
                raise UserError(
                    f"{path}: tensor {name} has shape {shape}, the drafter wants {tuple(tensor.shape)}"
                )
        with _quietly():
            dcp.load(wanted, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
        return state


def read_state(path: Path) -> State:
    """The state of a checkpoint, without its tensors."""
    return State.from_json(json.loads((path / "state.json").read_text()), path / "state.json")


def _tensors(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, p in drafter.named_parameters():
        out[f"model.{name}"] = p.detach()
        out |= {f"optimizer.{name}.{m}": optimizer.state[p][m].detach() for m in MOMENTS}
    return out


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, in a few words, or None."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return "it has no manifest.json (not completely written)"
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError, TypeError):
        return "its manifest.json cannot be read"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, {entry['bytes']} were written"
        if _describe(file) != entry:
            return f"{name} differs from what was written"
    return None


def check_free_disk(directory: Path, num_parameters: int, keep_last: int) -> None:
    """Refuse to start when the checkpoints will not fit.

    Raises:
        UserError: with what is needed (weights and two moments in fp32, for `keep_last`, best and the one
            being
            written) and what is free.
    """
    needed = 12 * num_parameters * (keep_last + 2)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise UserError(
            f"{directory}: {free / 1e9:.2f} GB free, checkpoints need {needed / 1e9:.2f} GB; allowed: a "
            "lower "
            f"training.keep_last ({keep_last}) or a storage_root on a larger disk"
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the remark that a single process saves as a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "blake2b": digest}


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _root_cause(error: BaseException) -> str:
    """The first cause in the words of the system; DCP wraps the failures of all ranks in one exception."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        return f"rank {rank}: {_root_cause(wrapped[0])}"
    while error.__cause__ is not None:
        error = error.__cause__
    # torch's file writer hides the error of the system behind one of its own.
    meaning = "the file could not grow, is the disk full? " if "unexpected pos" in str(error) else ""
    return f"{meaning}{type(error).__name__}: {error}"
