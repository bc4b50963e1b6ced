"""Checkpoints that are complete or absent, from which a run resumes bit for bit.

A checkpoint is a directory `checkpoints/step-00000100` with the tensors in the format of
torch.distributed.checkpoint (so it loads at any number of ranks, replicated or sharded), `state.json` and,
last, `manifest.json` with the size and digest of every file. A thread writes it as `step-00000100.tmp` from a
copy taken between two steps, and gives it its name by one rename; training continues meanwhile. An incomplete
checkpoint, or one that does not match its manifest, is skipped and reported in a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dflash_core.errors import UserError
from dflash_core.files import file_digest
from dflash_core.training.checkpoint_files import INDEX_FILE, CheckpointReader, is_plain_name
from dflash_core.training.state import State, read_state

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's tensors for each weight, next to the number of updates


class Checkpointer:
    """The checkpoints of one run directory: saving, finding, loading and pruning.

    Args:
        directory: `<run>/checkpoints`, on a file system that all ranks share.
        keep_last: number of newest checkpoints to keep; the one of `State.best_step` is kept in addition.
        group: a gloo group of the ranks that train, for the saving thread alone; None for one process.
        rank: of this process where there is no group; only rank 0 writes.
    """

    def __init__(
        self, directory: Path, *, keep_last: int, group: dist.ProcessGroup | None, rank: int = 0
    ) -> None:
        self.directory, self.keep_last, self.group = Path(directory), keep_last, group
        self.rank = dist.get_rank(group) if group is not None else rank
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
        """Wait until the save in progress is published; raise the error it raised, if any."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def raise_failure(self) -> None:
        """Raise the error of the save in progress, if it has failed; never wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _write(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        final = self.directory / f"step-{state['step']:08d}"
        partial = final.with_name(final.name + ".tmp")
        try:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._barrier()
            # All tensors are on the CPU; copying ahead would only make a context on GPU 0 for this thread.
            writer = dcp.FileSystemWriter(partial, sync_files=True, per_thread_copy_ahead=0)
            with _quietly():
                dcp.save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            # Each rank reads its own files (__RANK_*.distcp): digests cost the time of the largest share.
            local = {p.name: _describe(p) for p in sorted(partial.glob(f"__{self.rank}_*"))}
            shares = self._gather(local)
            if self.rank == 0:
                self._publish(partial, final, state, shares)
            self._barrier()
        except BaseException as error:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free / 1e9
            raise OSError(
                f"checkpoint {final} could not be written ({free:.2f} GB free there): {_root_cause(error)}"
            ) from error

    def _publish(
        self, partial: Path, final: Path, state: dict[str, Any], shares: list[dict[str, Any]]
    ) -> None:
        """Complete a directory that all ranks have written their tensors to, give it its name, and prune."""
        files = {name: entry for share in shares for name, entry in share.items()}
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        for name in ("state.json", INDEX_FILE):
            files[name] = _describe(partial / name)
        _write_durably(partial / "manifest.json", json.dumps({"files": files}, indent=1))
        old = final.with_name(final.name + ".old.tmp")
        if final.exists():  # the same step, saved before a resume
            os.replace(final, old)
        os.replace(partial, final)
        # NFS keeps files that a process has open; the next start removes what is left.
        shutil.rmtree(old, ignore_errors=True)
        _sync_directory(self.directory)
        self._prune(state["best_step"])

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def _gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _prune(self, best_step: int | None) -> None:
        steps = sorted(self._names())
        for step in steps[: -self.keep_last]:
            if step != best_step:
                shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)

    def _names(self) -> list[int]:
        return [int(p.name[5:]) for p in self.directory.glob("step-*") if p.name[5:].isdigit()]

    def newest(self) -> tuple[Path | None, list[str]]:
        """Return the newest complete checkpoint, and a line for each newer one that was skipped."""
        skipped: list[str] = []
        for step in sorted(self._names(), reverse=True):
            path = self.directory / f"step-{step:08d}"
            problem = verify(path)
            if problem is None:
                return path, skipped
            skipped.append(f"skipped checkpoint {path.name}: {problem}")
        return None, skipped

    def at_step(self, step: int | None) -> Path | None:
        """Return the complete checkpoint of a step, or None."""
        path = self.directory / f"step-{step or 0:08d}"
        return path if step is not None and verify(path) is None else None

    def load(self, path: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
        """Fill the drafter's weights (and the optimizer's moments, unless None) in place; return the state.

        Raises:
            UserError: the directory is not a complete checkpoint, its tensors have other names or shapes, or
                they cannot be read. Nothing in it is executed (see `checkpoint_files`).
        """
        if problem := verify(path):
            raise UserError(
                f"training.resume_from: {path}: {problem}; allowed: a complete checkpoint directory"
            )
        state = read_state(path)
        reader = CheckpointReader(path)
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
                    f"{path}: tensor {name} has shape {shape}, the drafter needs {tuple(tensor.shape)}"
                )
        try:
            with _quietly():
                dcp.load(wanted, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
        except dcp.CheckpointException as error:
            raise UserError(f"{path}: its tensors cannot be read: {_root_cause(error)}") from error
        return state


def _tensors(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, p in drafter.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        tensors |= {f"optimizer.{name}.{m}": optimizer.state[p][m].detach() for m in MOMENTS}
    return tensors


def verify(path: Path) -> str | None:
    """Return the defect of a checkpoint directory in a few words, or None if it is complete."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return "it has no manifest.json (not completely written)"
    try:
        entries = json.loads(manifest.read_text())["files"]
        files = {name: {"bytes": int(e["bytes"]), "blake2b": e["blake2b"]} for name, e in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "its manifest.json cannot be read"
    if unlisted := {"state.json", INDEX_FILE} - files.keys():
        return f"its manifest.json does not list {min(unlisted)}"
    if outside := [name for name in files if not is_plain_name(name)]:
        return f"its manifest.json lists {outside[0]!r}, which is not directly inside it"
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
    """Check before the run that its checkpoints will fit on the disk.

    Weights and two moments in fp32, for `keep_last` checkpoints, the best one and the one being written.

    Raises:
        UserError: with the needed and the free space.
    """
    needed = 12 * num_parameters * (keep_last + 2)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise UserError(
            f"{directory}: {free / 1e9:.2f} GB free, checkpoints need {needed / 1e9:.2f} GB; allowed: a "
            f"lower training.keep_last ({keep_last}) or a storage_root on a larger disk"
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the warning that a single process saves without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "blake2b": file_digest(path)}


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot sync a directory.
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _root_cause(error: BaseException) -> str:
    """Return the message of the first cause; DCP wraps the failures of all ranks in one exception."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        return f"rank {rank}: {_root_cause(wrapped[0])}"
    while error.__cause__ is not None:
        error = error.__cause__
    # torch's file writer replaces the system's error by another one.
    meaning = "the file could not grow, is the disk full? " if "unexpected pos" in str(error) else ""
    return f"{meaning}{type(error).__name__}: {error}"
