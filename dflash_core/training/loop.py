"""The training loop: the only one, for one process or many, colocated or split, on CPU or GPU.

A step is a set of samples. Every drafter rank adds the gradients of its microbatches of the step, one small
all-reduce sums the statistics (and asks whether anybody wants to stop), one all-reduce sums the gradients,
which are then divided by the step's summed weights. A rank without a microbatch, or with one without anchors,
adds zeros. So a step has the same collectives on every rank whatever it was given, and its result does not
depend on how the samples were split, beyond the order of floating-point sums.

Why not DistributedDataParallel: its hooks reduce during a backward pass, while a step here has many (one a
chunk of blocks), and their number differs between ranks. One flat reduction a step is exact and costs less.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.dataflow.assignment import Assignment, assignments_of_step, validation_assignments
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.dataflow.schedule import Schedule
from dflash_core.dataflow.transfer import Delivery
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import save_drafter
from dflash_core.errors import RunFailed, Stopped
from dflash_core.launch.layout import Layout, split_advice
from dflash_core.launch.process_groups import World
from dflash_core.launch.rank_status import RankRecord
from dflash_core.launch.stop_signal import PEER_GRACE_SECONDS, StopSignal
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.objective.loss import LossSettings, LossSums, microbatch_loss
from dflash_core.target.capture import Capture
from dflash_core.training.checkpoint import Checkpointer, State
from dflash_core.training.console import Reporter
from dflash_core.training.initial_loss import PHASE, InitialLoss
from dflash_core.training.memory_probe import out_of_memory_advice, probe
from dflash_core.training.metrics_file import MetricsFile
from dflash_core.training.optim import build_optimizer, learning_rate
from dflash_core.training.run import Run
from dflash_core.training.sharding import full_weights, place_drafter
from dflash_core.training.summary import summarise
from dflash_core.training.validation import accuracy_by_position, validation_metrics

STOP, OUT_OF_MEMORY = "stop", "out of memory"
# What a step's seconds went into, summed over the ranks; the fields of TargetReport in split mode.
SPENT = ("capture", "train", "wait", "feed", "target_wait", "target_feed", "inflight", "reports")


@dataclass
class Trainer:
    """A drafter rank's run. `deliveries` yields this rank's validation microbatches, then those of every
    step.
    """

    run: Run
    world: World
    record: RankRecord
    clock: DeviceClock
    stop: StopSignal
    schedule: Schedule
    checkpoints: Checkpointer
    state: State
    drafter: DFlashDrafter
    deliveries: Iterator[Delivery]
    loss_settings: LossSettings
    spec: FeatureSpec
    num_validation_groups: int  # over all ranks
    # real decoding of a few prompts, where a target is
    decode: Callable[[DFlashDrafter], dict[str, float]] | None
    initial: InitialLoss | None  # where training.check_initial_loss asks for it

    def __post_init__(self) -> None:
        self.config = self.run.config.training
        self.gradients = place_drafter(self.drafter, self.world, self.config.parallel, self._empty_pass)
        self.optimizer = build_optimizer(self.drafter, self.run.config.optimizer)
        self.saved_step, self.save_is_late = -1, False
        self.last_save = time.monotonic()
        self.work = {"capture": 0.0, "train": 0.0}  # seconds of all ranks since this process started
        self._first_epoch_end = min(self.schedule.first_step[1], self.schedule.total_steps)

    def train(self) -> None:
        """All steps, then the drafter's export and summary.json.

        Raises:
            Stopped: after SIGTERM on any rank, with a checkpoint of the last completed step.
            RunFailed: out of memory, with what to change.
        """
        if self.world.is_leader:
            self.metrics = MetricsFile(self.run.directory / "metrics.jsonl", self.state.step)
            cached = self.run.config.target.cache != "none"
            capture_end = self._first_epoch_end if cached else self.schedule.total_steps
            self.reporter = Reporter(self.schedule.total_steps, self.state.step, capture_end)
        try:
            self.validation = self._capture_validation()
            self._validate_when_due()
            while self.state.step < self.schedule.total_steps:
                self._step()
                self._validate_when_due()
                self._save_when_due()
            self._finish()
        except Stopped:
            self._save(wait=True)
            raise
        except RunFailed:
            raise
        except Exception:
            if not self.stop.wait(PEER_GRACE_SECONDS):
                raise
            self._save_alone()
            raise Stopped from None
        finally:
            if self.world.is_leader:
                self.reporter.close()

    def _capture_validation(self) -> list[Delivery]:
        """This rank's validation microbatches with their states, on the CPU."""
        mine = [
            a
            for a in validation_assignments(self.world.layout, self.num_validation_groups)
            if a.drafter == self.world.rank
        ]
        kept: list[Delivery] = []
        for done in range(len(mine)):
            if self.world.is_leader:
                self.reporter.busy(f"capturing validation samples, microbatch {done + 1} of {len(mine)}")
            assignment, microbatch, features = next(self.deliveries)
            kept.append((assignment, microbatch, features.to(torch.device("cpu"))))
        self.clock.take()  # the first step's seconds are its own
        return kept

    def _step(self) -> None:
        """One optimizer update: gradients of all microbatches, one agreement, one reduction, AdamW."""
        step, started = self.state.step, time.monotonic()
        self.record.take_seconds()  # of what was done between steps
        self.gradients.zero()
        self.gradients.gather_weights()
        sums = LossSums.zeros(self.drafter.shape.block_size, self.world.device)
        complaint = ""
        for assignment in assignments_of_step(self.world.layout, self.schedule, step):
            if assignment.drafter != self.world.rank:
                continue
            if self.stop.is_set():
                complaint = STOP
                break
            self.record.phase("wait for feed", step=step, microbatch=assignment.slot)
            try:
                delivered, microbatch, features = next(self.deliveries)
                assert delivered == assignment, (delivered, assignment)
                self.record.phase("train")
                with self.clock.time("train"):
                    sums = sums + microbatch_loss(
                        self.drafter, microbatch, features, self.loss_settings, backward=True
                    )
                if self.initial is not None:
                    self.record.phase(PHASE)
                    self.initial.add(microbatch, features)
            except torch.OutOfMemoryError:
                complaint = OUT_OF_MEMORY
                break
            except RuntimeError:  # a target rank that was told to stop first has closed its connection
                if not self.stop.wait(PEER_GRACE_SECONDS):
                    raise
                complaint = STOP
                break
        self.record.phase("train")
        if self.world.device.type == "cuda":
            # Not of the device: the capture of the next step's first microbatch goes on meanwhile.
            torch.cuda.current_stream(self.world.device).synchronize()
        mine = self._take_seconds()
        self.record.phase("wait for other ranks")
        sums, spent = self._agree(sums, complaint, mine)
        weight = float(sums.weight_sum)
        self.gradients.reduce(self.world.gradients)
        self.record.phase("update")
        norm = float(self.gradients.normalise(weight or 1.0, self.run.config.optimizer.clip_norm))
        rate = learning_rate(step, self.schedule.total_steps, self.run.config.optimizer)
        finite = math.isfinite(norm) and math.isfinite(sums.loss())
        if finite and weight > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self._log(sums, spent, norm, rate, finite, time.monotonic() - started - mine[PHASE])
        if self.initial is not None and self.state.step == self._first_epoch_end:
            self._write_initial_loss(self.initial)
            self.initial = None

    def _take_seconds(self) -> dict[str, float]:
        """What this rank spent since the last call, by the names of `SPENT`, and on `PHASE`."""
        host, work = self.record.take_seconds(), self.clock.take()
        waited = sum(s for name, s in host.items() if name.startswith("wait for target"))
        host_side = {"wait": waited, "feed": host.get("wait for feed", 0.0), PHASE: host.get(PHASE, 0.0)}
        return {name: work.get(name, 0.0) for name in SPENT} | host_side

    def _agree(
        self, sums: LossSums, complaint: str, spent: dict[str, float]
    ) -> tuple[LossSums, dict[str, float]]:
        """Sums over all drafter ranks; the one place where ranks agree to stop, so all do so at the same
        step.

        Raises:
            Stopped, RunFailed: on every rank, when any rank complained.
        """
        fields = [f.name for f in dataclasses.fields(LossSums)]
        tensors = [getattr(sums, name).double().cpu().reshape(-1) for name in fields]
        # Clocks differ between ranks and a save is collective: rank 0's clock decides.
        late = (
            time.monotonic() - self.last_save > self.config.checkpoint_every_seconds and self.world.is_leader
        )
        flags = [float(complaint == STOP), float(complaint == OUT_OF_MEMORY), float(late)]
        times = [spent.get(name, 0.0) for name in SPENT]
        total = self.world.sum([*flags, *times, *torch.cat(tensors).tolist()])
        if total[0]:
            raise Stopped
        if total[1]:
            self._save(wait=True)
            raise RunFailed(out_of_memory_advice(self.run))
        self.save_is_late = bool(total[2])
        rest = len(flags) + len(SPENT)
        flat = torch.tensor(total[rest:], dtype=torch.float64)
        parts = dict(zip(fields, flat.split([t.numel() for t in tensors])))
        shaped = {n: p if n in ("correct_K", "count_K") else p[0] for n, p in parts.items()}
        return LossSums(**shaped), dict(zip(SPENT, total[len(flags) : rest]))

    def _log(
        self, sums: LossSums, spent: dict[str, float], norm: float, rate: float, finite: bool, seconds: float
    ) -> None:
        """Count the step as completed and write its line.

        Raises:
            RunFailed: a step that is not finite, where `training.nonfinite` does not let it pass.
        """
        state, summary = self.state, self.schedule.step_summary(self.state.step)
        supervised = float(sums.weight_sum) > 0
        state.step += 1
        state.updates += finite and supervised
        state.nonfinite_steps += not finite
        state.nonfinite_in_a_row = 0 if finite else state.nonfinite_in_a_row + 1
        state.samples += int(summary["batch/num_samples"])
        state.tokens += int(summary["batch/tokens"])
        state.train_seconds += seconds
        rates = role_metrics(spent, self.world.layout, seconds, summary["batch/tokens"])
        state.capture_seconds += rates["perf/capture_seconds"]
        state.drafter_seconds += rates["perf/drafter_seconds"]
        for kind in self.work:
            self.work[kind] += spent[kind]
        if finite and supervised:
            state.loss_last = sums.loss()
            state.loss_first = state.loss_last if state.loss_first is None else state.loss_first
        if self.world.is_leader and (state.step % self.config.log_every == 0 or not finite):
            metrics = {
                "train/loss": sums.loss() if finite and supervised else None,
                "train/grad_norm": norm if math.isfinite(norm) else None,
                "train/lr": rate,
                **accuracy_by_position(sums, "train"),
                "train/nonfinite_steps": state.nonfinite_steps,
                "perf/tokens_per_second": summary["batch/tokens"] / seconds,
                "perf/step_seconds": seconds,
                **rates,
                **summary,
            }
            self.metrics.write(state.step, metrics)
            self.reporter.step(state.step, metrics)
        if not finite and (
            self.config.nonfinite == "stop" or state.nonfinite_in_a_row >= self.config.max_nonfinite_steps
        ):
            raise RunFailed(
                f"step {state.step}: loss {sums.loss()}, gradient norm {norm}, {state.nonfinite_in_a_row} in "
                "a row "
                f"(training.nonfinite {self.config.nonfinite}, max_nonfinite_steps "
                f"{self.config.max_nonfinite_steps}); allowed: a lower optimizer.lr, or data that was checked"
            )

    def _validate_when_due(self) -> None:
        """At step 0, every `validate_every` steps and at the end, once each; a stop in between leaves it
        undone.
        """
        state = self.state
        due = state.step % self.config.validate_every == 0 or state.step == self.schedule.total_steps
        if not due or state.validated_step == state.step or not self.num_validation_groups:
            return
        self.record.phase("validate", step=state.step)
        if self.world.is_leader:
            self.reporter.busy(f"validating at step {state.step}")
        self.gradients.gather_weights()
        sums = LossSums.zeros(self.drafter.shape.block_size, self.world.device)
        complaint = ""
        decoded: dict[str, float] = {}
        try:
            for _, microbatch, features in self.validation:
                if self.stop.is_set():
                    break
                there = features.to(self.world.device)
                sums = sums + microbatch_loss(
                    self.drafter, microbatch, there, self.loss_settings, backward=False
                )
            if self.decode and not self.stop.is_set():
                decoded = self.decode(self.drafter)
        except torch.OutOfMemoryError:
            complaint = OUT_OF_MEMORY
        self.gradients.scatter_weights()
        complaint = STOP if self.stop.is_set() else complaint
        sums, _ = self._agree(sums, complaint, {})
        metrics = {**validation_metrics(sums), **decoded}
        state.validated_step, state.validation_last = state.step, metrics
        state.validation_first = state.validation_first or metrics
        loss = metrics["validation/loss"]
        if state.best_value is None or loss < state.best_value:
            state.best_value, state.best_step = loss, state.step
        if self.world.is_leader:
            self.metrics.write(state.step, metrics)
            self.reporter.say(
                f"validation at step {state.step}: loss {loss:.4f}, simulated acceptance length "
                f"{metrics['validation/simulated_acceptance_length']:.3f}"
                + (f", decoded {decoded['validation/acceptance_length']:.3f}" if decoded else "")
            )
            if self.world.layout.split and self.work["train"]:
                self.reporter.say(self._advice())

    def _save_when_due(self) -> None:
        """At step intervals, time intervals, after a validation that was the best so far, and at the end."""
        self.checkpoints.raise_failure()
        state = self.state
        if (
            self.save_is_late
            or state.step % self.config.checkpoint_every_steps == 0
            or state.best_step == state.step > 0
            or state.step == self.schedule.total_steps
        ):
            self._save(wait=state.step == self.schedule.total_steps)

    def _save(self, *, wait: bool) -> None:
        if self.saved_step == self.state.step:
            self.checkpoints.wait()
            return
        self.record.phase("save")
        self.gradients.scatter_weights()  # a step that was given up has them gathered
        self.checkpoints.save(self.state, self.drafter, self.optimizer, wait=wait)
        self.saved_step, self.last_save = self.state.step, time.monotonic()

    def _advice(self) -> str:
        layout = self.world.layout
        sizes = {"num_targets": len(layout.targets), "num_drafters": len(layout.drafters)}
        return split_advice(self.work["capture"], self.work["train"], **sizes, split=layout.split)

    def probe(self, make: Callable[[Assignment], Microbatch], capture: Capture | None) -> str:
        """Run the largest microbatches once, see `probe.py`; leaves no gradient behind. The same on all ranks.

        Raises:
            RunFailed: out of memory, with settings that fit.
        """

        def train(microbatch: Microbatch, features: Features, max_draft_slots: int) -> None:
            loss_settings = dataclasses.replace(self.loss_settings, max_draft_slots=max_draft_slots)
            microbatch_loss(self.drafter, microbatch, features, loss_settings, backward=True)

        self.gradients.gather_weights()
        line = probe(
            self.run,
            self.schedule,
            make,
            capture=capture,
            train=train,
            spec=self.spec,
            record=self.record,
            device=self.world.device,
        )
        self.gradients.reduce(self.world.gradients)  # sharded weights hold what they do not reduce
        self.gradients.zero()
        self.gradients.scatter_weights()
        return line

    def _write_initial_loss(self, initial: InitialLoss) -> None:
        found = initial.result(self.world.sum)
        if self.world.is_leader:
            _write_json(self.run.directory / "initial_loss.json", found)

    def _empty_pass(self, drafter: DFlashDrafter) -> LossSums:
        """Forward and backward of one token without an anchor: zero gradients for all weights."""
        none = np.zeros(0, np.int32)
        microbatch = Microbatch(
            sample_rows=np.zeros(1, np.int32),
            token_ids=np.zeros(1, np.int64),
            loss_mask=np.zeros(1, np.uint8),
            cu_seqlens=np.array([0, 1], np.int32),
            width=0,
            anchors=none,
            anchor_sample=none,
        )
        features = self.spec.empty(1, self.world.device).zeros()
        return microbatch_loss(drafter, microbatch, features, self.loss_settings, backward=True)

    def _save_alone(self) -> None:
        """Peers are gone, so nothing collective works; rank 0 has all that a checkpoint needs if it is
        replicated.
        """
        if self.world.is_leader and self.config.parallel == "ddp" and self.saved_step != self.state.step:
            self.record.phase("save")
            self.gradients.zero()
            alone = Checkpointer(self.checkpoints.directory, keep_last=self.config.keep_last, group=None)
            alone.save(self.state, self.drafter, self.optimizer, wait=True)

    def _finish(self) -> None:
        """Export the best drafter by validation loss (the last where nothing was validated); write
        summary.json.
        """
        self.record.phase("export")
        self.checkpoints.wait()
        best = self.checkpoints.at_step(self.state.best_step)
        if best is not None and self.state.best_step != self.state.step:
            self.checkpoints.load(best, self.drafter, None)
        whole = full_weights(self.drafter)
        if not self.world.is_leader:
            return
        exported = self.state.best_step if best is not None else self.state.step
        drafter = DFlashDrafter(self.drafter.shape)
        drafter.load_state_dict(whole)
        save_drafter(drafter, self.run.directory / "drafter")
        summary = summarise(self.state, self.run, exported, self._advice())
        if self.world.layout.world_size > 1:
            self.reporter.say(summary["roles"]["advice"])
        _write_json(self.run.directory / "summary.json", summary)


def role_metrics(
    spent: dict[str, float], layout: Layout, step_seconds: float, num_tokens: float
) -> dict[str, float]:
    """Who worked and who waited in a step, from seconds summed over the ranks of a role: means a rank, the rate that
    a role alone could keep up, and its share of the time (of capture and training together above 1: they overlap).
    """
    targets, drafters = len(layout.targets), len(layout.drafters)
    capture, train = spent["capture"] / targets, spent["train"] / drafters
    found = {
        "perf/capture_seconds": capture,
        "perf/drafter_seconds": train,
        "perf/wait_seconds": spent["wait"] / drafters,
        "perf/feed_seconds": spent["feed"] / drafters,
        "perf/targets_busy": capture / step_seconds,
        "perf/drafters_busy": train / step_seconds,
    }
    if capture > 0:
        found["perf/capture_tokens_per_second"] = num_tokens / capture
    if train > 0:
        found["perf/train_tokens_per_second"] = num_tokens / train
    if layout.split:
        found["perf/target_wait_seconds"] = spent["target_wait"] / targets
        found["perf/target_feed_seconds"] = spent["target_feed"] / targets
        found["perf/inflight_microbatches"] = spent["inflight"] / max(1.0, spent["reports"])
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(value, indent=1))
    os.replace(partial, path)
