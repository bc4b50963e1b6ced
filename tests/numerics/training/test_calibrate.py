"""Choice of the measured microbatches, counts of their work, and constants from a small target."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from benchmarks.support.tiny_run import write_run
from dflash_core.batching.cost import Work
from dflash_core.dataflow.schedule import build_microbatch
from dflash_core.training.calibrate import Meter, choose_microbatches, fit_cost_model, work_of
from dflash_core.training.run import RunSpec


def test_chosen_microbatches_checked_by_hand() -> None:
    """Lengths 4 1 1 2, budget 8: rows by length are 1 2 3 0."""
    lengths, rows = np.array([4, 1, 1, 2], np.int32), np.arange(4, dtype=np.int32)
    choices = choose_microbatches(lengths, rows, token_budget=8, can_pack=True)
    chosen = [(sorted(rows.tolist()), width) for rows, width in choices]
    assert chosen[1] == ([0, 1], 4)  # the longest next to the shortest: two rows of 4 slots
    assert chosen[2] == ([1, 2], 1)  # short rows up to 4 slots: a third one would be two wide
    assert chosen[3] == ([0], 4)
    assert chosen[4:6] == [([0], 0), ([1, 2, 3], 0)]
    assert chosen[6] == ([0, 1, 2, 3], 0)
    assert all(len(rows) * width <= 8 for rows, width in chosen)
    padded = choose_microbatches(lengths, rows, token_budget=8, can_pack=False)
    assert [width > 0 for _, width in padded] == [True] * 4


def test_work_is_counted_as_a_plan_counts_it(tmp_path: Path, tiny_target_dir: Path) -> None:
    for strategy in ("packed", "random"):
        run_dir, config = write_run(
            tmp_path, tiny_target_dir, {"batching": {"strategy": strategy}}, name=strategy
        )
        run = RunSpec.load(run_dir / "run.json")
        store = run.open_store()
        schedule = run.open_schedule(store)
        plan = schedule.plan(0)
        microbatches = [
            build_microbatch(
                store, *schedule.rows(0, m), num_anchors=config.objective.num_anchors, seed=0, epoch=0
            )
            for m in range(plan.num_microbatches)
        ]
        work = work_of(microbatches, config.drafter.block_size)
        for f in fields(Work):
            assert getattr(work, f.name).tolist() == getattr(plan.work, f.name).tolist(), f.name


def test_calibration_of_a_real_target(tmp_path: Path, tiny_target_dir: Path) -> None:
    run_dir, _ = write_run(tmp_path, tiny_target_dir, {}, name="calibrated")
    before = {p.name for p in run_dir.iterdir()}
    seen: list[tuple[int, int]] = []
    meter = Meter(RunSpec.load(run_dir / "run.json"))
    other = meter.build(meter.store.train_indices[:2], 0)
    calibration, others = fit_cost_model(meter, [other] * 3, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (33, 33)
    assert len(seen) == 33
    assert others.shape == (3, 2)
    assert (others > 0).all()
    constants = asdict(calibration.model)
    assert all(value >= 0 for value in constants.values())
    assert sum(constants.values()) > 0
    assert np.isfinite(calibration.fitted_seconds).all()
    assert (calibration.fitted_seconds > 0).all()
    assert json.dumps(constants)
    assert {p.name for p in run_dir.iterdir()} == before
