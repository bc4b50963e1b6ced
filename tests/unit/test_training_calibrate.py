"""Which microbatches are measured, how their work is counted, and constants from a real small target."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from dflash_core.batching.cost import Work
from dflash_core.dataflow.schedule import build_microbatch
from dflash_core.training.calibrate import Meter, calibrate, choose_microbatches, work_of
from dflash_core.training.run import Run
from tests.training_run import write_run


def test_chosen_microbatches_by_hand() -> None:
    """Lengths 4 1 1 2, budget 8: rows by length are 1 2 3 0."""
    lengths, rows = np.array([4, 1, 1, 2], np.int32), np.arange(4, dtype=np.int32)
    choices = choose_microbatches(lengths, rows, token_budget=8, can_pack=True)
    found = [(sorted(chosen.tolist()), width) for chosen, width in choices]
    assert found[1] == ([0, 1], 4)  # the longest beside the shortest: two rows of 4 slots
    assert found[2] == ([1, 2], 1)  # short rows up to 4 slots: a third one would be two wide
    assert found[3] == ([0], 4)
    assert found[4:6] == [([0], 0), ([1, 2, 3], 0)]
    assert found[6] == ([0, 1, 2, 3], 0)
    assert all(len(chosen) * width <= 8 for chosen, width in found)
    padded = choose_microbatches(lengths, rows, token_budget=8, can_pack=False)
    assert [width > 0 for _, width in padded] == [True] * 4


def test_work_is_counted_as_a_plan_counts_it(tmp_path: Path, tiny_target_dir: Path) -> None:
    for strategy in ("packed", "random"):
        run_dir, config = write_run(
            tmp_path, tiny_target_dir, {"batching": {"strategy": strategy}}, name=strategy
        )
        run = Run.load(run_dir / "run.json")
        store = run.open_store()
        schedule = run.open_schedule(store)
        plan = schedule.plan(0)
        microbatches = [
            build_microbatch(
                store, *schedule.rows(0, m), num_anchors=config.objective.num_anchors, seed=0, epoch=0
            )
            for m in range(plan.num_microbatches)
        ]
        found = work_of(microbatches, config.drafter.block_size)
        for f in fields(Work):
            assert getattr(found, f.name).tolist() == getattr(plan.work, f.name).tolist(), f.name


def test_calibration_of_a_real_target(tmp_path: Path, tiny_target_dir: Path) -> None:
    run_dir, _ = write_run(tmp_path, tiny_target_dir, {}, name="calibrated")
    before = {p.name for p in run_dir.iterdir()}
    seen: list[tuple[int, int]] = []
    meter = Meter(Run.load(run_dir / "run.json"))
    other = meter.build(meter.store.train_indices[:2], 0)
    found, others = calibrate(meter, [other] * 3, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (33, 33) and len(seen) == 33
    assert others.shape == (3, 2) and (others > 0).all()
    constants = asdict(found.model)
    assert all(value >= 0 for value in constants.values()) and sum(constants.values()) > 0
    assert np.isfinite(found.fitted_seconds).all() and (found.fitted_seconds > 0).all()
    assert json.dumps(constants) and {p.name for p in run_dir.iterdir()} == before
