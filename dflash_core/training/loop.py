"""The training loop: the only one, for one process or many, colocated or split, on CPU or GPU.

A step is a set of samples. Every drafter rank adds the gradients of its microbatches of the step, one small
all-reduce sums the statistics (and carries each rank's stop request), one all-reduce sums the gradients,
which are then divided by the step's summed weights. A rank without a microbatch, or with one without anchors,
adds zeros. So a step has the same collectives on every rank whatever its microbatches are, and its result
does not depend on how the samples were split, beyond the order of floating-point sums.

DistributedDataParallel does not fit: its hooks reduce during a backward pass, while a step here has one per
chunk of blocks, and their number differs between ranks. One flat reduction per step is exact and cheaper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dflash_core.dataflow.assignment import assignments_of_step, validation_assignments
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.dataflow.schedule import Schedule
from dflash_core.dataflow.transfer import Delivery
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import save_drafter
from dflash_core.errors import RunFailed, Stopped
from dflash_core.files import write_json
from dflash_core.launch.process_groups import World
from dflash_core.launch.rank_status import RankRecord
from dflash_core.launch.stop_signal import PEER_GRACE_SECONDS, StopSignal
from dflash_core.microbatch import FeatureSpec
from dflash_core.objective.loss import LossSettings, LossSums, microbatch_loss
from dflash_core.training.checkpoint import Checkpointer
from dflash_core.training.console import Console
from dflash_core.training.initial_loss import PHASE as INITIAL_LOSS
from dflash_core.training.initial_loss import InitialLoss
from dflash_core.training.memory_probe import out_of_memory_advice
from dflash_core.training.metrics_file import SPENT, MetricsFile, role_metrics, step_metrics
from dflash_core.training.optim import build_optimizer, learning_rate
from dflash_core.training.run import RunSpec
from dflash_core.training.sharding import full_weights, place_drafter
from dflash_core.training.state import State, StepOutcome
from dflash_core.training.summary import split_advice, summarise
from dflash_core.training.validation import Decode, Validation, validation_line, validation_metrics

STOP, OUT_OF_MEMORY = "stop", "out of memory"  # reasons of a rank for not completing a step


@dataclass
class Trainer:
    """A drafter rank's training: steps, validations, checkpoints, export.

    `deliveries`, set before each of these calls, yields what it works on: `begin` this rank's validation
    microbatches, `rehearse` those of its steps, and `train` those of all steps, after those of validation if
    the run has not begun. `closing` is to be closed in any case.
    """

    run: RunSpec
    world: World
    record: RankRecord
    clock: DeviceClock
    stop: StopSignal
    schedule: Schedule
    checkpoints: Checkpointer
    state: State
    drafter: DFlashDrafter
    loss_settings: LossSettings
    spec: FeatureSpec
    num_validation_groups: int  # over all ranks
    decode: Decode | None  # real decoding of a few prompts, where a target is
    initial: InitialLoss | None  # with training.check_initial_loss

    def __post_init__(self) -> None:
        self.config = self.run.config.training
        self.gradients = place_drafter(
            self.drafter, self.world, self.config.parallel, self.loss_settings, self.spec
        )
        self.optimizer = build_optimizer(self.drafter, self.run.config.optimizer)
        self.saved_step, self.save_is_late = -1, False
        self.last_save = time.monotonic()
        self.work = {"capture": 0.0, "train": 0.0}  # seconds of all ranks since this process started
        self.deliveries: Iterator[Delivery] = iter(())
        self.validation: Validation | None = None
        self.closing = contextlib.ExitStack()

    @property
    def _first_epoch_end(self) -> int:
        return min(self.schedule.first_step[1], self.schedule.total_steps)

    @property
    def _capture_end(self) -> int:
        cached = self.run.config.target.cache != "none"
        return self._first_epoch_end if cached else self.schedule.total_steps

    def begin(self) -> None:
        """Open metrics and console, and capture the validation microbatches."""
        if self.world.is_leader:
            path = self.run.directory / "metrics.jsonl"
            self.metrics = MetricsFile(path, self.state.step, validated_step=self.state.validated_step)
            self.closing.callback(self.metrics.close)
            self.console = Console(self.schedule.total_steps, self.state.step, self._capture_end)
            self.closing.callback(self.console.close)
        self.validation = self._capture_validation()

    def end_at(self, total_steps: int) -> None:
        """End the run earlier than planned; record the number in checkpoints and metrics."""
        self.schedule.total_steps = self.state.facts["total_steps"] = total_steps
        if self.world.is_leader:
            self.metrics.write(self.state.step, {"train/total_steps": total_steps})
            self.console.end_at(total_steps, self._capture_end)

    def rehearse(self, steps: range) -> float:
        """Run steps as in training, update included, and change nothing by it.

        Returns:
            The seconds of captures, per rank.
        """
        initial, self.initial = self.initial, None
        capture_seconds = sum(self._update(step, 0.0)[0].spent["capture"] for step in steps)
        self.initial = initial
        for moments in self.optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()
        return capture_seconds / len(self.world.layout.targets)

    def train(self) -> None:
        """Run all steps, export the drafter and write summary.json.

        Raises:
            Stopped: after SIGTERM on any rank, with a checkpoint of the last completed step.
            RunFailed: out of memory, with what to change.
        """
        try:
            if self.validation is None:
                self.begin()
            self.validate_when_due()
            while self.state.step < self.schedule.total_steps:
                self._step()
                self._write_initial_loss_when_due()
                self.validate_when_due()
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

    def _step(self) -> None:
        """Run the next step and count it."""
        step, settings = self.state.step, self.run.config.optimizer
        outcome, seconds = self._update(step, learning_rate(step, self.schedule.total_steps, settings))
        self._log(outcome, seconds=seconds)

    def _update(self, step: int, rate: float) -> tuple[StepOutcome, float]:
        """Run one optimizer update: gradients of all microbatches, one agreement, one reduction, AdamW.

        Returns:
            The figures of the step, and its seconds.
        """
        started = time.monotonic()
        self.record.take_seconds()  # drops the seconds between steps
        self.gradients.zero()
        self.gradients.gather_weights()
        sums, stop_reason = self._forward_backward(step)
        local_seconds = self._take_seconds()
        self.record.phase("wait for other ranks")
        sums, spent = self._agree(sums, stop_reason, local_seconds)
        self.gradients.reduce(self.world.gradients)
        self.record.phase("update")
        weight, clip_norm = float(sums.weight_sum) or 1.0, self.run.config.optimizer.clip_norm
        norm = float(self.gradients.normalise(weight, clip_norm))
        outcome = StepOutcome(sums=sums, spent=spent, gradient_norm=norm, learning_rate=rate)
        if outcome.changed_weights:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return outcome, time.monotonic() - started - local_seconds[INITIAL_LOSS]

    def _forward_backward(self, step: int) -> tuple[LossSums, str]:
        """Add up the gradients of this rank's microbatches; return their sums and a reason to stop, or ""."""
        sums, stop_reason = LossSums.zeros(self.drafter.shape.block_size, self.world.device), ""
        for assignment in assignments_of_step(self.world.layout, self.schedule, step):
            if assignment.drafter != self.world.rank:
                continue
            if self.stop.is_set():
                stop_reason = STOP
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
                    self.record.phase(INITIAL_LOSS)
                    self.initial.add(microbatch, features)
            except torch.OutOfMemoryError:
                stop_reason = OUT_OF_MEMORY
                break
            except RuntimeError:
                # A target rank that received the stop signal first has closed its connection.
                if not self.stop.wait(PEER_GRACE_SECONDS):
                    raise
                stop_reason = STOP
                break
        self.record.phase("train")
        if self.world.device.type == "cuda":
            # The stream, not the device: the capture of the next step's first microbatch continues meanwhile.
            torch.cuda.current_stream(self.world.device).synchronize()
        return sums, stop_reason

    def _take_seconds(self) -> dict[str, float]:
        """Return this rank's seconds since the last call, by `SPENT` and for the initial loss."""
        host, work = self.record.take_seconds(), self.clock.take()
        waited = sum(s for name, s in host.items() if name.startswith("wait for target"))
        by_host = {
            "wait": waited,
            "feed": host.get("wait for feed", 0.0),
            INITIAL_LOSS: host.get(INITIAL_LOSS, 0.0),
        }
        return {name: work.get(name, 0.0) for name in SPENT} | by_host

    def _agree(
        self, sums: LossSums, stop_reason: str, local_seconds: dict[str, float]
    ) -> tuple[LossSums, dict[str, float]]:
        """Return sums and seconds over all drafter ranks.

        The one place where ranks agree to stop, so all do so at the same step.

        Raises:
            Stopped, RunFailed: on every rank, when any rank has a reason to stop.
        """
        fields = [f.name for f in dataclasses.fields(LossSums)]
        tensors = [getattr(sums, name).double().cpu().reshape(-1) for name in fields]
        # Clocks differ between ranks and a save is collective: rank 0's clock decides.
        is_late = time.monotonic() - self.last_save > self.config.checkpoint_every_seconds
        flags = [stop_reason == STOP, stop_reason == OUT_OF_MEMORY, is_late and self.world.is_leader]
        times = [local_seconds.get(name, 0.0) for name in SPENT]
        total = self.world.sum([*map(float, flags), *times, *torch.cat(tensors).tolist()])
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

    def _log(self, outcome: StepOutcome, *, seconds: float) -> None:
        """Count the step as completed and write its line.

        Raises:
            RunFailed: the step is not finite and `training.nonfinite` or `max_nonfinite_steps` ends the run.
        """
        state, batch = self.state, self.schedule.step_summary(self.state.step)
        roles = role_metrics(outcome.spent, self.world.layout, seconds, batch["batch/tokens"])
        state.record_step(outcome, batch, roles, seconds=seconds)
        for kind in self.work:
            self.work[kind] += outcome.spent[kind]
        if self.world.is_leader and (state.step % self.config.log_every == 0 or not outcome.is_finite):
            metrics = step_metrics(
                outcome, batch, roles, seconds=seconds, nonfinite_steps=state.nonfinite_steps
            )
            self.metrics.write(state.step, metrics)
            self.console.show_step(state.step, metrics)
        config, in_a_row = self.config, state.nonfinite_in_a_row
        if in_a_row and (config.nonfinite == "stop" or in_a_row >= config.max_nonfinite_steps):
            raise RunFailed(
                f"step {state.step}: loss {outcome.sums.loss()}, gradient norm {outcome.gradient_norm}, "
                f"{in_a_row} in a row (training.nonfinite {config.nonfinite}, max_nonfinite_steps "
                f"{config.max_nonfinite_steps}); allowed: a lower optimizer.lr, or data that was checked"
            )

    def _write_initial_loss_when_due(self) -> None:
        """Write initial_loss.json at the end of the first epoch, if `check_initial_loss` is set."""
        if self.initial is not None and self.state.step == self._first_epoch_end:
            result = self.initial.result(self.world.sum)
            if self.world.is_leader:
                write_json(self.run.directory / "initial_loss.json", result)
            self.initial = None

    def _capture_validation(self) -> Validation:
        """Receive this rank's validation microbatches with their states."""
        assignments = validation_assignments(self.world.layout, self.num_validation_groups)
        count = sum(a.drafter == self.world.rank for a in assignments)
        deliveries: list[Delivery] = []
        for number in range(1, count + 1):
            if self.world.is_leader:
                self.console.show_activity(f"capturing validation samples, microbatch {number} of {count}")
            assignment, microbatch, features = next(self.deliveries)
            deliveries.append((assignment, microbatch, features.to(torch.device("cpu"))))
        self.clock.take()  # the first step's seconds start here
        return Validation(deliveries, self.loss_settings, self.decode, self.stop)

    def validate_when_due(self) -> None:
        """Validate at step 0, every `validate_every` steps and at the end, once each."""
        state = self.state
        due = state.step % self.config.validate_every == 0 or state.step == self.schedule.total_steps
        if not due or state.validated_step == state.step or not self.num_validation_groups:
            return
        assert self.validation is not None
        self.record.phase("validate", step=state.step)
        if self.world.is_leader:
            self.console.show_activity(f"validating at step {state.step}")
        self.gradients.gather_weights()
        sums, stop_reason = LossSums.zeros(self.drafter.shape.block_size, self.world.device), ""
        decoded: dict[str, float] = {}
        try:
            sums, decoded = self.validation.run(self.drafter)
        except torch.OutOfMemoryError:
            stop_reason = OUT_OF_MEMORY
        self.gradients.scatter_weights()
        sums, _ = self._agree(sums, STOP if self.stop.is_set() else stop_reason, {})
        metrics = {**validation_metrics(sums), **decoded}
        state.record_validation(metrics)
        if self.world.is_leader:
            self.metrics.write(state.step, metrics)
            self.console.print_line(validation_line(state.step, metrics))
            if self.world.layout.split and self.work["train"]:
                self.console.print_line(self._advice())

    def _save_when_due(self) -> None:
        """Save at step and time intervals, after the best validation so far, and at the end."""
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

    def _save_alone(self) -> None:
        """Save without the other ranks, which are gone: possible on rank 0 if it holds all weights."""
        if self.world.is_leader and self.config.parallel == "ddp" and self.saved_step != self.state.step:
            self.record.phase("save")
            self.gradients.zero()
            alone = Checkpointer(self.checkpoints.directory, keep_last=self.config.keep_last, group=None)
            alone.save(self.state, self.drafter, self.optimizer, wait=True)

    def _finish(self) -> None:
        """Export the drafter of the lowest validation loss (else of the last step) and write summary.json."""
        self.record.phase("export")
        self.checkpoints.wait()
        best = self.checkpoints.at_step(self.state.best_step)
        if best is not None and self.state.best_step != self.state.step:
            self.checkpoints.load(best, self.drafter, None)
        weights = full_weights(self.drafter)
        if not self.world.is_leader:
            return
        drafter = DFlashDrafter(self.drafter.shape)
        drafter.load_state_dict(weights)
        save_drafter(drafter, self.run.directory / "drafter")
        exported_step = self.state.best_step if best is not None else self.state.step
        advice = self._advice()
        summary = summarise(
            self.state,
            self.run,
            planned_steps=self.schedule.planned_steps,
            exported_step=exported_step,
            advice=advice,
        )
        if self.world.layout.world_size > 1:
            self.console.print_line(advice)
        write_json(self.run.directory / "summary.json", summary)

    def _advice(self) -> str:
        return split_advice(self.work["capture"], self.work["train"], self.world.layout)
