"""State of a run between two steps: everything that a resume needs next to the tensors.

What is a function of something else is not stored: the learning rate (of the step), the order of samples (of
the plan), the anchors (of seed, epoch and sample).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.objective.loss import LossSums


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Figures of one step, over all ranks."""

    sums: LossSums
    spent: dict[str, float]  # seconds summed over the ranks, by the names of `metrics_file.SPENT`
    gradient_norm: float  # before clipping
    learning_rate: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.gradient_norm) and math.isfinite(self.sums.loss())

    @property
    def changed_weights(self) -> bool:
        """False without a supervised token, or with a loss or gradient that is not finite."""
        return self.is_finite and float(self.sums.weight_sum) > 0


@dataclass
class State:
    """Counters and results of a run. `step` counts completed steps; counters include all resumed parts."""

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
    def from_json(cls, values: dict[str, Any], path: Path) -> State:
        """Build the state from the contents of `path`.

        Raises:
            UserError: a name is unknown or missing, or a value has another type: a state that is half
                understood cannot be resumed.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if values.keys() != known:
            different = ", ".join(sorted(values.keys() ^ known))
            raise UserError(
                f"{path}: written by another version of this program; names that differ: {different}"
            )
        for name, default in dataclasses.asdict(cls()).items():
            if isinstance(default, int | float | dict) and type(values[name]) not in (type(default), int):
                raise UserError(f"{path}: {name} is {values[name]!r}; allowed: one like {default!r}")
        return cls(**values)

    def record_step(
        self, outcome: StepOutcome, batch: dict[str, float], roles: dict[str, float], *, seconds: float
    ) -> None:
        """Count a step as completed.

        Args:
            outcome: the step.
            batch: see `Schedule.step_summary`.
            roles: see `metrics_file.role_metrics`.
            seconds: wall time of the step.
        """
        self.step += 1
        self.updates += outcome.changed_weights
        self.nonfinite_steps += not outcome.is_finite
        self.nonfinite_in_a_row = 0 if outcome.is_finite else self.nonfinite_in_a_row + 1
        self.samples += int(batch["batch/num_samples"])
        self.tokens += int(batch["batch/tokens"])
        self.train_seconds += seconds
        self.capture_seconds += roles["perf/capture_seconds"]
        self.drafter_seconds += roles["perf/drafter_seconds"]
        if outcome.changed_weights:
            self.loss_last = outcome.sums.loss()
            self.loss_first = self.loss_last if self.loss_first is None else self.loss_first

    def record_validation(self, metrics: dict[str, float]) -> None:
        """Keep the results of a validation at this step, and the step if its loss is the lowest so far."""
        self.validated_step, self.validation_last = self.step, metrics
        self.validation_first = self.validation_first or metrics
        loss = metrics["validation/loss"]
        if self.best_value is None or loss < self.best_value:
            self.best_value, self.best_step = loss, self.step


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint, without its tensors."""
    path = checkpoint / "state.json"
    try:
        values = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); allowed: a complete checkpoint") from error
    return State.from_json(values, path)


def changed_fields(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return `field: old -> new` for every leaf in which two nested mappings differ."""
    lines: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += changed_fields(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: {a!r} -> {b!r}")
    return lines
