"""Console output of rank 0: a progress bar in a terminal, elsewhere one line about every ten seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

LINE_SECONDS = 10.0  # between lines without a terminal
RECENT_STEPS = 50  # their mean time predicts the remaining time
FORECAST_STEPS = 5  # after so many steps, the time that the training takes is printed


class Console:
    """Display of loss, speed and remaining time; without a terminal always for the first and the last step.

    Args:
        total_steps: of the run.
        completed_steps: before this process started.
        capture_end: the step from which a cache gives the captured states, so later steps spend no time on
            captures; without a cache the last step.
    """

    def __init__(self, total_steps: int, completed_steps: int, capture_end: int) -> None:
        self.total, self.first, self.capture_end = total_steps, completed_steps, capture_end
        self._last_line = 0.0
        # Seconds with and without capture.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stdout.isatty():
            text = TextColumn("{task.fields[text]}")
            self._bar = Progress(TextColumn("training"), BarColumn(), text, console=rich.console.Console())
            self._task = self._bar.add_task("", total=total_steps, completed=completed_steps, text="")
            self._bar.start()

    def end_at(self, total_steps: int, capture_end: int) -> None:
        """End earlier than planned."""
        self.total, self.capture_end = total_steps, capture_end
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total_steps)

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def show_activity(self, text: str) -> None:
        """Show what the run does between steps."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, text=text)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(text, flush=True)

    def show_step(self, completed: int, metrics: dict[str, Any]) -> None:
        """Show the progress after `completed` steps, from the values of that step's line."""
        loss = metrics["train/loss"]
        seconds = metrics["perf/step_seconds"]
        # Without captures a step would take the remaining time, or its training where the two overlap.
        trained_alone = max(seconds - metrics["perf/capture_seconds"], metrics["perf/drafter_seconds"])
        self._recent.append((seconds, min(seconds, trained_alone)))
        whole, trained = (sum(column) / len(self._recent) for column in zip(*self._recent))
        capturing = max(0, self.capture_end - completed)
        left = whole * capturing + trained * (self.total - completed - capturing)
        if len(self._recent) == completed - self.first == FORECAST_STEPS < self.total - self.first:
            self.print_line(f"{duration(left)} left for {self.total - completed} steps, {whole:.2f} s each")
        text = (
            f"step {completed}/{self.total}  loss {'-' if loss is None else f'{loss:.3f}'}  "
            f"position 1 {metrics['train/accuracy_position_1']:.1%}  "
            f"{metrics['perf/tokens_per_second']:.0f} real tokens/s  "
            f"padding efficiency {metrics['batch/padding_efficiency']:.2f}  {duration(left)} left"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=completed, text=text)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_SECONDS or completed in (self.first + 1, self.total):
            self._last_line = now
            print(text, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Format seconds: 75 as 1:15, 3,700 as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
