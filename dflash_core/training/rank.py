"""One rank of a run: it loads its models, is fed with its microbatches, and trains, captures, or does both.

Every rank runs the same code and derives its role from the layout. Rank 0 alone chooses the checkpoint and
the compute dtypes and broadcasts both, so that ranks cannot differ in them.

torchrun starts it as `python -m dflash_core.training.rank run.json`.
"""

from __future__ import annotations

import sys

from dflash_core.launch.connections import check_connections
from dflash_core.launch.stop_signal import StopSignal, end_with_parent
from dflash_core.redaction import redact_output

if __name__ == "__main__":
    # Before the imports below, which take seconds: a stop that arrives meanwhile counts.
    stop_signal = StopSignal()
    end_with_parent()
    redact_output()

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.dataflow.assignment import Assignment, assignments_of_rank
from dflash_core.dataflow.capture_cache import make_capture
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.dataflow.prefetch import Prefetcher
from dflash_core.dataflow.schedule import (
    VALIDATION_EPOCH,
    VALIDATION_STEP,
    Schedule,
    build_microbatch,
    validation_groups,
    validation_rows,
)
from dflash_core.dataflow.transfer import Delivery, capture_here, connect, receive, serve
from dflash_core.decoding.during_training import decoder_of, draftable_prompts, end_answers
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import RunFailed, Stopped, UserError
from dflash_core.launch.layout import make_layout, role_of
from dflash_core.launch.process_groups import World, rank_of_process, set_up, tear_down
from dflash_core.launch.rank_status import RankRecord, reporting
from dflash_core.launch.stop_signal import PEER_GRACE_SECONDS
from dflash_core.microbatch import FeatureSpec, Microbatch
from dflash_core.objective.loss import LossSettings
from dflash_core.target.capture import Capture
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.target import Target
from dflash_core.training import time_budget
from dflash_core.training.checkpoint import Checkpointer, check_free_disk, verify
from dflash_core.training.initial_loss import InitialLoss
from dflash_core.training.loop import Trainer
from dflash_core.training.memory_probe import out_of_memory_advice, probe_memory, probe_training
from dflash_core.training.run import (
    RunSpec,
    build_drafter,
    check_compatible,
    feature_spec,
    layer_ids,
    load_ends,
    load_target,
    load_target_config,
    pick_dtypes,
)
from dflash_core.training.state import State, read_state
from dflash_core.training.validation import Decode

EXIT_STOPPED = 143

MakeMicrobatch = Callable[[Assignment], Microbatch]
Groups = list[tuple[NDArray[np.int32], int]]  # store rows and width of each validation microbatch


def run_and_exit(path: Path, stop: StopSignal) -> NoReturn:
    """Run one rank and exit even if a thread is still blocked on a dead peer."""
    try:
        code = main(path, stop)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(path: Path, stop: StopSignal) -> int:
    """Run this process's rank of the run that `path`, a run.json, describes.

    Returns:
        The exit code: 0 finished, 1 failed (the error is in the run's directory), 143 stopped by a signal.
    """
    run = RunSpec.load(path)
    rank = rank_of_process()
    record = RankRecord(run.directory, rank, role_of(make_layout(run.config.training), rank))
    try:
        with reporting(record):  # before peers see this rank's connections close
            is_spread = run.config.target.device_map is not None
            run_rank(run, set_up(run.config.training, spread_target=is_spread), record, stop)
    except Stopped:
        return EXIT_STOPPED
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    finally:
        tear_down()
        record.close()
    return 0


@dataclass(frozen=True)
class Rank:
    """This process in a run."""

    run: RunSpec
    world: World
    record: RankRecord
    stop: StopSignal
    schedule: Schedule


@dataclass(frozen=True)
class Models:
    """Models of a rank: the target if it captures, drafter and loss settings if it trains."""

    spec: FeatureSpec
    target: Target | None
    capture: Capture | None
    drafter: DFlashDrafter | None
    loss_settings: LossSettings | None


def run_rank(run: RunSpec, world: World, record: RankRecord, stop: StopSignal) -> None:
    """Take part in a run from its newest checkpoint to its end."""
    started = time_budget.now()
    transformers_logging.disable_progress_bar()  # many ranks, one console
    rank = Rank(run, world, record, stop, run.open_schedule(run.open_store()))
    facts = world.broadcast(run.facts(rank.schedule) if world.is_leader else None)
    keep_last = run.config.training.keep_last
    checkpoints = Checkpointer(
        run.directory / "checkpoints", keep_last=keep_last, group=world.checkpoint, rank=world.rank
    )
    chosen = world.broadcast(_choose_checkpoint(run, checkpoints, facts) if world.is_leader else None)
    stored = None if chosen is None else read_state(chosen)
    dtypes = world.broadcast(pick_dtypes(run, world, stored) if world.is_leader else None)
    state = stored or State()
    stored_steps = _stored_steps(state, rank.schedule)
    state.facts = {**facts, "dtypes": {k: dtype_name(v) for k, v in dtypes.items()}}
    if stored_steps is not None:
        state.facts["total_steps"] = rank.schedule.total_steps = stored_steps
    state.mlflow_run_id = run.mlflow_run_id or state.mlflow_run_id

    record.phase("load", step=state.step)
    models = load_models(rank, dtypes, facts["inputs"]["target"])
    record.phase("connect")
    check_connections(world)
    if world.layout.split:
        connect(world.layout, world.rank, world.device)

    groups = _validation_groups(run, rank.schedule)
    make = _microbatch_maker(run, rank.schedule, groups)
    trainer = None
    try:
        if models.drafter is None:
            _probe_capture(rank, models, make)
        else:
            trainer = build_trainer(
                rank, models, checkpoints, state, num_groups=len(groups), is_resumed=chosen is not None
            )
            _prepare(trainer, chosen, make, models.capture)
        _run_steps(rank, models, trainer, make, state, num_groups=len(groups), started=started)
    except torch.OutOfMemoryError as error:
        raise RunFailed(out_of_memory_advice(run)) from error
    finally:
        if trainer is not None:
            trainer.closing.close()


def _run_steps(
    rank: Rank,
    models: Models,
    trainer: Trainer | None,
    make: MakeMicrobatch,
    state: State,
    *,
    num_groups: int,
    started: float,
) -> None:
    """Find the number of steps where `training.max_minutes` asks for it, and run to the end."""
    schedule = rank.schedule

    def stretch(steps: range, work: Callable[[], None], *, num_groups: int = 0) -> None:
        assignments = assignments_of_rank(
            rank.world.layout, schedule, rank.world.rank, num_validation_groups=num_groups, steps=steps
        )
        feed = Prefetcher(assignments, make, rank.run.config.training.prefetch)
        try:
            if trainer is None:
                _capture(rank, models, feed)
            else:
                trainer.deliveries = _deliveries(rank, models, feed, trainer.clock)
                work()
        finally:
            feed.close()

    if rank.run.config.training.max_minutes is not None and "total_steps" not in state.facts:
        with _stopped_with_peers(rank.stop):
            schedule.total_steps = time_budget.fit_steps(
                rank.run, rank.world, schedule, trainer, stretch, num_groups=num_groups, started=started
            )
        num_groups = 0
    end = trainer.train if trainer is not None else lambda: None
    stretch(range(state.step, schedule.total_steps), end, num_groups=num_groups)


@contextlib.contextmanager
def _stopped_with_peers(stop: StopSignal) -> Iterator[None]:
    """Raise `Stopped` for a collective that fails because another rank has received a stop signal first."""
    try:
        yield
    except (RunFailed, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if not stop.wait(PEER_GRACE_SECONDS):
            raise
        raise Stopped from error


def load_models(rank: Rank, dtypes: dict[str, torch.dtype], target_fingerprint: str) -> Models:
    """Load what this rank's role needs."""
    run, world = rank.run, rank.world
    target_config = load_target_config(run)
    ids = layer_ids(run, target_config)
    spec = feature_spec(run, target_config, ids, dtypes)
    target = capture = drafter = loss_settings = None
    if world.is_target:
        target = load_target(run, world, ids, dtypes)
        capture = build_capture(rank, target, spec, target_fingerprint)
    if world.is_drafter:
        drafter = build_drafter(run, target_config, ids, world.device)
        ends = load_ends(run, target_config, target, world.device, dtypes["drafter"])
        mask_token_id, max_draft_slots = drafter.shape.mask_token_id, run.config.training.max_draft_slots
        loss_settings = LossSettings(ends, run.config.objective, mask_token_id, max_draft_slots, world.device)
    return Models(spec, target, capture, drafter, loss_settings)


def build_capture(rank: Rank, target: Target, spec: FeatureSpec, target_fingerprint: str) -> Capture:
    """Return this rank's capture, cached as `target.cache` says; one rank prints the size of the cache."""
    config = rank.run.config
    capture, line = make_capture(
        target, config.target, config.objective, rank.schedule, spec, rank.run.cache, target_fingerprint
    )
    if line and rank.world.rank == rank.world.layout.targets[0]:
        print(line, flush=True)
    return capture


def build_trainer(
    rank: Rank,
    models: Models,
    checkpoints: Checkpointer,
    state: State,
    *,
    num_groups: int,
    is_resumed: bool,
) -> Trainer:
    """Return the trainer of a drafter rank."""
    run, world, config = rank.run, rank.world, rank.run.config.training
    drafter, loss_settings, spec = models.drafter, models.loss_settings, models.spec
    assert drafter is not None
    assert loss_settings is not None
    checks_initial_loss = config.check_initial_loss and not is_resumed
    return Trainer(
        run=run,
        world=world,
        record=rank.record,
        clock=DeviceClock(world.device),
        stop=rank.stop,
        schedule=rank.schedule,
        checkpoints=checkpoints,
        state=state,
        drafter=drafter,
        loss_settings=loss_settings,
        spec=spec,
        num_validation_groups=num_groups,
        decode=_decoder(rank, models.target),
        initial=InitialLoss(drafter, loss_settings) if checks_initial_loss else None,
    )


def _deliveries(
    rank: Rank, models: Models, feed: Prefetcher[Microbatch], clock: DeviceClock
) -> Iterator[Delivery]:
    """Return the microbatches of a drafter rank, captured here or received from target ranks."""
    device = rank.world.device
    if models.capture is not None:
        return capture_here(feed, models.capture, rank.record, clock, device)
    inflight = rank.run.config.training.max_inflight_microbatches
    return receive(feed, models.spec, rank.record, clock, device, inflight)


def _prepare(trainer: Trainer, chosen: Path | None, make: MakeMicrobatch, capture: Capture | None) -> None:
    """Load the chosen checkpoint and probe the memory."""
    run, world, checkpoints = trainer.run, trainer.world, trainer.checkpoints
    if world.is_leader:
        keep_last = run.config.training.keep_last
        check_free_disk(run.directory, trainer.drafter.num_parameters(), keep_last)
    if chosen is not None:
        checkpoints.load(chosen, trainer.drafter, trainer.optimizer)
        trainer.saved_step = trainer.state.step if chosen.parent == checkpoints.directory else -1
    trainer.record.phase("probe")
    line = probe_training(
        run,
        trainer.schedule,
        make,
        capture=capture,
        drafter=trainer.drafter,
        gradients=trainer.gradients,
        loss_settings=trainer.loss_settings,
        spec=trainer.spec,
        record=trainer.record,
        world=world,
    )
    _print_line(world, line)


def _probe_capture(rank: Rank, models: Models, make: MakeMicrobatch) -> None:
    """Probe the memory of a target rank."""
    run, device, capture = rank.run, rank.world.device, models.capture
    rank.record.phase("probe")
    line = probe_memory(
        run, rank.schedule, make, capture=capture, spec=models.spec, record=rank.record, device=device
    )
    _print_line(rank.world, line)


def _capture(rank: Rank, models: Models, feed: Prefetcher[Microbatch]) -> None:
    """Capture and send to the drafter ranks."""
    assert models.capture is not None
    inflight = rank.run.config.training.max_inflight_microbatches
    serve(feed, models.capture, rank.record, rank.stop, rank.world.device, inflight)


def _print_line(world: World, line: str) -> None:
    if line:
        print(f"rank {world.rank}: {line}", flush=True)


def _decoder(rank: Rank, target: Target | None) -> Decode | None:
    """Return real decoding on rank 0, if that rank holds both the target and all weights of the drafter."""
    config, store = rank.run.config.training, rank.schedule.store
    holds_all_weights = config.parallel == "ddp" or rank.world.control is None
    if target is None or not rank.world.is_leader or not holds_all_weights:
        return None
    rows = validation_rows(store, config.num_validation_samples)
    prompts = draftable_prompts(store, rows)
    if not prompts:
        return None
    end_answers(target, rank.run.target, rank.run.config)
    return decoder_of(target, prompts, rank.stop.is_set)


def _choose_checkpoint(run: RunSpec, checkpoints: Checkpointer, facts: dict[str, Any]) -> Path | None:
    """Return the checkpoint to resume from: the newest complete one, else `training.resume_from`.

    Raises:
        UserError: the named checkpoint is incomplete or belongs to another run.
    """
    newest, skipped = checkpoints.newest()
    for line in skipped:
        print(line, flush=True)
    if newest is None and run.config.training.resume_from is not None:
        newest = Path(run.config.training.resume_from)
        if problem := verify(newest):
            raise UserError(
                f"training.resume_from: {newest}: {problem}; allowed: a complete checkpoint directory"
            )
    if newest is not None:
        check_compatible(newest, read_state(newest), facts)
        print(f"resuming from {newest} at step {read_state(newest).step}", flush=True)
    return newest


def _stored_steps(state: State, schedule: Schedule) -> int | None:
    """Return the number of steps that a checkpoint's run found for `training.max_minutes`, if it did.

    Raises:
        UserError: the plans do not have so many.
    """
    steps = state.facts.get("total_steps")
    if steps is not None and not (type(steps) is int and 1 <= steps <= schedule.planned_steps):
        allowed = f"1 to the {schedule.planned_steps} steps of the plans"
        raise UserError(f"state.json: facts.total_steps is {steps!r}; allowed: {allowed}")
    return steps


def _validation_groups(run: RunSpec, schedule: Schedule) -> Groups:
    batching = run.config.batching
    rows = validation_rows(schedule.store, run.config.training.num_validation_samples)
    packed = STRATEGIES[batching.strategy].is_packed
    return validation_groups(schedule.store, rows, token_budget=batching.token_budget, packed=packed)


def _microbatch_maker(run: RunSpec, schedule: Schedule, groups: Groups) -> MakeMicrobatch:
    """Return a function from an assignment, of a step or of validation, to its tokens and anchors."""
    config = run.config

    def make(assignment: Assignment) -> Microbatch:
        if assignment.step == VALIDATION_STEP:
            (rows, width), epoch = groups[assignment.microbatch], VALIDATION_EPOCH
        else:
            (rows, width), epoch = schedule.rows(assignment.epoch, assignment.microbatch), assignment.epoch
        return build_microbatch(
            schedule.store,
            rows,
            width,
            num_anchors=config.objective.num_anchors,
            seed=config.training.seed,
            epoch=epoch,
        )

    return make


if __name__ == "__main__":
    run_and_exit(Path(sys.argv[1]), stop_signal)
