"""One rank of a run: what it loads, what it is fed with, and whether it trains, captures, or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from dflash_core.dataflow.transfer import capture_here, connect, receive, serve
from dflash_core.decoding.during_training import decoder_of, draftable_prompts
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import RunFailed, UserError
from dflash_core.launch.process_groups import World
from dflash_core.launch.rank_status import RankRecord
from dflash_core.launch.stop_signal import StopSignal
from dflash_core.microbatch import FeatureSpec, Microbatch
from dflash_core.objective.loss import LossSettings
from dflash_core.target.capture import Capture
from dflash_core.target.target import Target
from dflash_core.training import run as setup
from dflash_core.training.checkpoint import Checkpointer, State, check_free_disk, read_state, verify
from dflash_core.training.initial_loss import InitialLoss
from dflash_core.training.loop import Trainer
from dflash_core.training.memory_probe import out_of_memory_advice, probe
from dflash_core.training.run import Run


def run_rank(run: Run, world: World, record: RankRecord, stop: StopSignal) -> None:
    """All that this process does in a run."""
    config = run.config.training
    transformers_logging.disable_progress_bar()  # many ranks, one console
    schedule = run.open_schedule(run.open_store())
    facts = world.broadcast(run.facts(schedule) if world.is_leader else None)
    checkpoints = Checkpointer(
        run.directory / "checkpoints", keep_last=config.keep_last, group=world.checkpoint, rank=world.rank
    )
    chosen = world.broadcast(_choose_checkpoint(run, checkpoints, facts) if world.is_leader else None)
    state = State() if chosen is None else read_state(chosen)
    before = None if chosen is None else state
    dtypes = world.broadcast(setup.pick_dtypes(run, world, before) if world.is_leader else None)
    state.facts = {**facts, "dtypes": {k: str(v).removeprefix("torch.") for k, v in dtypes.items()}}
    state.mlflow_run_id = run.mlflow_run_id or state.mlflow_run_id

    record.phase("load", step=state.step)
    target_config = setup.load_target_config(run)
    ids = setup.layer_ids(run, target_config)
    spec = setup.feature_spec(run, target_config, ids, dtypes)
    target = setup.load_target(run, world, ids, dtypes) if world.is_target else None
    capture = None if target is None else _capture(run, world, schedule, target, spec, facts)
    groups = _validation_groups(run, schedule)
    make = _microbatch_maker(run, schedule, groups)
    drafter = loss_settings = None
    if world.is_drafter:
        drafter = setup.build_drafter(run, target_config, ids, world.device)
        ends = setup.load_ends(run, target_config, target, world.device, dtypes["drafter"])
        loss_settings = LossSettings(
            ends, run.config.objective, drafter.shape.mask_token_id, config.max_draft_slots, world.device
        )
    if world.layout.split:
        record.phase("connect")
        connect(world.layout, world.rank, world.device)

    assignments = assignments_of_rank(
        world.layout, schedule, world.rank, num_validation_groups=len(groups), first_step=state.step
    )
    feed, clock = Prefetcher(assignments, make, config.prefetch), DeviceClock(world.device)
    inflight = config.max_inflight_microbatches
    try:
        if drafter is None or loss_settings is None:
            assert capture is not None
            record.phase("probe")
            told = probe(
                run,
                schedule,
                make,
                capture=capture,
                train=None,
                spec=spec,
                record=record,
                device=world.device,
            )
            _say(world, told)
            serve(feed, capture, record, stop, world.device, inflight)
            return
        if capture is not None:
            deliveries = capture_here(feed, capture, record, clock, world.device)
        else:
            deliveries = receive(feed, spec, record, clock, world.device, inflight)
        trainer = Trainer(
            run=run,
            world=world,
            record=record,
            clock=clock,
            stop=stop,
            schedule=schedule,
            checkpoints=checkpoints,
            state=state,
            drafter=drafter,
            deliveries=deliveries,
            loss_settings=loss_settings,
            spec=spec,
            num_validation_groups=len(groups),
            decode=_decoder(run, world, schedule, target, stop),
            initial=InitialLoss(drafter, loss_settings)
            if config.check_initial_loss and chosen is None
            else None,
        )
        if world.is_leader:
            check_free_disk(run.directory, drafter.num_parameters(), config.keep_last)
        if chosen is not None:
            checkpoints.load(chosen, drafter, trainer.optimizer)
            trainer.saved_step = state.step if chosen.parent == checkpoints.directory else -1
        record.phase("probe")
        _say(world, trainer.probe(make, capture))
        trainer.train()
    except torch.OutOfMemoryError as error:
        raise RunFailed(out_of_memory_advice(run)) from error
    finally:
        feed.close()


def _say(world: World, line: str) -> None:
    if line:
        print(f"rank {world.rank}: {line}", flush=True)


def _capture(
    run: Run, world: World, schedule: Schedule, target: Target, spec: FeatureSpec, facts: dict[str, Any]
) -> Capture:
    capture, line = make_capture(
        target,
        run.config.target,
        run.config.objective,
        schedule,
        spec,
        run.cache,
        facts["inputs"]["target"],
    )
    if line and world.rank == world.layout.targets[0]:
        print(line, flush=True)
    return capture


def _decoder(
    run: Run, world: World, schedule: Schedule, target: Target | None, stop: StopSignal
) -> Callable[[DFlashDrafter], dict[str, float]] | None:
    """Real decoding on rank 0, where that rank holds both the target and all weights of the drafter."""
    whole = run.config.training.parallel == "ddp" or world.control is None
    if target is None or not world.is_leader or not whole:
        return None
    rows = validation_rows(schedule.store, run.config.training.num_validation_samples)
    prompts = draftable_prompts(schedule.store, rows)
    return decoder_of(target, prompts, stop.is_set) if prompts else None


def _choose_checkpoint(run: Run, checkpoints: Checkpointer, facts: dict[str, object]) -> Path | None:
    """Where the run goes on, said in one line; rank 0 alone looks, so all ranks take the same."""
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
        setup.check_fits(newest, read_state(newest), facts)
        print(f"resuming from {newest} at step {read_state(newest).step}", flush=True)
    return newest


def _validation_groups(run: Run, schedule: Schedule) -> list[tuple[NDArray[np.int32], int]]:
    batching = run.config.batching
    rows = validation_rows(schedule.store, run.config.training.num_validation_samples)
    packed = STRATEGIES[batching.strategy].is_packed
    return validation_groups(schedule.store, rows, token_budget=batching.token_budget, packed=packed)


def _microbatch_maker(
    run: Run, schedule: Schedule, groups: list[tuple[NDArray[np.int32], int]]
) -> Callable[[Assignment], Microbatch]:
    """From an assignment to its tokens and anchors; step -1 stands for validation."""
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
