"""`metrics.jsonl`, one line per logged step or validation, and the figures of a step's line.

Each line holds the number of completed steps and a time in ms, so sending it anywhere twice is harmless. A
reader sees a line as soon as it is written; a run that resumes removes the lines beyond its checkpoint first.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from dflash_core.files import complete_file
from dflash_core.launch.layout import Layout
from dflash_core.training.state import StepOutcome
from dflash_core.training.validation import accuracy_by_position

# Kinds of work and waiting in a step, in seconds summed over the ranks; in split mode with the fields of
# `TargetTimings` and the number of those timings.
SPENT = ("capture", "train", "wait", "feed", "target_wait", "target_feed", "inflight", "reports")


class MetricsFile:
    """Writer of `metrics.jsonl`. Opening it removes the lines of what runs again after a resume.

    Args:
        path: of the file.
        completed_steps: the step from which the run resumes.
        validated_step: step of the last validation before; -1 for none. A run that stopped during the
            validation at `completed_steps` repeats it.
    """

    def __init__(self, path: Path, completed_steps: int, *, validated_step: int) -> None:
        def is_valid(line: str) -> bool:
            # A line cut short by a kill is the last one, and its step will run again.
            if not line.endswith("\n"):
                return False
            values = json.loads(line)
            is_validation = any(name.startswith("validation/") for name in values)
            return bool(values["step"] <= (validated_step if is_validation else completed_steps))

        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        with complete_file(path) as temporary:
            temporary.write_text("".join(filter(is_valid, lines)))
        self._file = open(path, "a")  # noqa: SIM115 (open as long as the run)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one line, visible to readers at once."""
        line = {"step": step, "time_ms": int(time.time() * 1000), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def step_metrics(
    outcome: StepOutcome,
    batch: dict[str, float],
    roles: dict[str, float],
    *,
    seconds: float,
    nonfinite_steps: int,
) -> dict[str, Any]:
    """Return the values of a step's line.

    Args:
        outcome: the step.
        batch: see `Schedule.step_summary`.
        roles: see `role_metrics`.
        seconds: wall time of the step.
        nonfinite_steps: so far in the run, this step included.
    """
    finite_norm = math.isfinite(outcome.gradient_norm)
    return {
        "train/loss": outcome.sums.loss() if outcome.changed_weights else None,
        "train/grad_norm": outcome.gradient_norm if finite_norm else None,
        "train/lr": outcome.learning_rate,
        **accuracy_by_position(outcome.sums, "train"),
        "train/nonfinite_steps": nonfinite_steps,
        "perf/tokens_per_second": batch["batch/tokens"] / seconds,
        "perf/step_seconds": seconds,
        **roles,
        **batch,
    }


def role_metrics(
    spent: dict[str, float], layout: Layout, step_seconds: float, num_tokens: float
) -> dict[str, float]:
    """Return the work and waiting of each role in a step.

    Args:
        spent: seconds summed over the ranks of a role, by the names of `SPENT`.
        layout: the ranks of each role.
        step_seconds: wall time of the step.
        num_tokens: real tokens of the step.

    Returns:
        Means per rank, the tokens per second that each role alone could sustain, and the share of the time in
        which it worked. Shares of capture and training together exceed 1 where they overlap.
    """
    targets, drafters = len(layout.targets), len(layout.drafters)
    capture, train = spent["capture"] / targets, spent["train"] / drafters
    metrics = {
        "perf/capture_seconds": capture,
        "perf/drafter_seconds": train,
        "perf/wait_seconds": spent["wait"] / drafters,
        "perf/feed_seconds": spent["feed"] / drafters,
        "perf/targets_busy": capture / step_seconds,
        "perf/drafters_busy": train / step_seconds,
    }
    if capture > 0:
        metrics["perf/capture_tokens_per_second"] = num_tokens / capture
    if train > 0:
        metrics["perf/train_tokens_per_second"] = num_tokens / train
    if layout.split:
        metrics["perf/target_wait_seconds"] = spent["target_wait"] / targets
        metrics["perf/target_feed_seconds"] = spent["target_feed"] / targets
        metrics["perf/inflight_microbatches"] = spent["inflight"] / max(1.0, spent["reports"])
    return metrics
