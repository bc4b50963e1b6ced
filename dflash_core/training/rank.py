"""One rank of a run: what it loads, what it is fed with, and whether it trains, captures, or both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from dflash_core.config import UserError
from dflash_core.model.loss import TargetHeads
from dflash_core.training import setup
from dflash_core.training.capture import make_capture
from dflash_core.training.checkpoint import Checkpointer, State, check_free_disk, read_state, verify
from dflash_core.training.decode import NUM_PROMPTS, decoder_of, validation_prompts
from dflash_core.training.feed import (
    VALIDATION_EPOCH,
    Assignment,
    Microbatch,
    Prefetcher,
    Schedule,
    build_microbatch,
    validation_groups,
    validation_rows,
)
from dflash_core.training.loop import Trainer
from dflash_core.training.setup import Run
from dflash_core.training.supervise import RankRecord, StopSignal
from dflash_core.training.topology import assignments_of_rank
from dflash_core.training.transfer import capture_here, receive, serve
from dflash_core.training.validation import LossArguments
from dflash_core.training.world import World


def run_rank(run: Run, world: World, record: RankRecord, stop: StopSignal) -> None:
    """All that this process does in a run."""
    config = run.config
    transformers_logging.disable_progress_bar()  # many ranks, one console
    store = run.open_store()
    schedule = run.open_schedule(store)
    facts = world.broadcast(run.facts(schedule) if world.is_leader else None)
    checkpoints = Checkpointer(
        run.directory / "checkpoints",
        keep_last=config.training.keep_last,
        group=world.checkpoint,
        rank=world.rank,
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
    groups = _validation_groups(run, schedule)
    feed = _feed(run, world, schedule, groups, state.step)
    fingerprint = facts["inputs"]["target"]
    capture = None
    if target is not None:
        capture, line = make_capture(
            target, config.target, config.objective, schedule, spec, run.cache, fingerprint
        )
        if line and world.is_leader:
            print(line, flush=True)
    inflight = config.training.max_inflight_microbatches
    try:
        if not world.is_drafter:
            assert capture is not None
            serve(feed, capture, record, stop, inflight)
            return
        if capture is not None and target is not None:
            heads = TargetHeads(
                target.embed_weight.to(dtypes["drafter"]), target.head_weight.to(dtypes["drafter"])
            )
            deliveries = capture_here(feed, capture, record, world.device)
        else:
            heads = setup.load_heads(run, target_config, world.device, dtypes["drafter"])
            deliveries = receive(feed, spec, record, world.device, inflight)
        drafter = setup.build_drafter(run, target_config, ids, world.device)
        decode = None
        if (
            target is not None
            and world.is_leader
            and (config.training.parallel == "ddp" or world.control is None)
        ):
            # Elsewhere no single rank holds both the target and all weights of the drafter.
            rows = validation_rows(store, config.training.num_validation_samples)
            if prompts := validation_prompts(store, rows, NUM_PROMPTS):
                decode = decoder_of(target, prompts, stop.is_set)
        same = LossArguments(
            heads,
            config.objective,
            drafter.shape.mask_token_id,
            config.training.max_draft_slots,
            world.device,
        )
        trainer = Trainer(
            run,
            world,
            record,
            stop,
            schedule,
            checkpoints,
            state,
            drafter,
            deliveries,
            same,
            spec,
            len(groups),
            decode,
        )
        if world.is_leader:
            check_free_disk(run.directory, drafter.num_parameters(), config.training.keep_last)
        if chosen is not None:
            checkpoints.load(chosen, trainer.drafter, trainer.optimizer)
            trainer.saved_step = state.step if chosen.parent == checkpoints.directory else -1
        trainer.train()
    finally:
        feed.close()


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
    packed = batching.strategy == "packed"
    return validation_groups(schedule.store, rows, token_budget=batching.token_budget, packed=packed)


def _feed(
    run: Run, world: World, schedule: Schedule, groups: list[tuple[NDArray[np.int32], int]], first_step: int
) -> Prefetcher[Microbatch]:
    """This rank's microbatches from a step on, validation first."""
    config = run.config

    def make(assignment: Assignment) -> Microbatch:
        if assignment.step < 0:
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

    assignments = assignments_of_rank(
        world.layout, schedule, world.rank, num_validation_groups=len(groups), first_step=first_step
    )
    return Prefetcher(assignments, make, config.training.prefetch)
