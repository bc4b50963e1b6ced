"""Validation on fixed samples with fixed anchors: the same blocks at every step and in every run on the data.

States are captured once at the start and kept (on the CPU when the run is on a GPU). Numbers are sums over
all drafter ranks, so they do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.dataflow.transfer import Delivery
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.launch.stop_signal import StopSignal
from dflash_core.objective.loss import LossSettings, LossSums, microbatch_loss

Decode = Callable[[DFlashDrafter], dict[str, float]]


@dataclass(frozen=True)
class Validation:
    """This rank's share of the validation samples, and real decoding of a few prompts where a target is."""

    deliveries: list[Delivery]  # states on the CPU
    loss_settings: LossSettings
    decode: Decode | None
    stop: StopSignal

    def run(self, drafter: DFlashDrafter) -> tuple[LossSums, dict[str, float]]:
        """Return this rank's sums and the figures of decoding; both are incomplete after a stop.

        Raises:
            torch.OutOfMemoryError: a microbatch does not fit.
        """
        device = self.loss_settings.device
        sums = LossSums.zeros(drafter.shape.block_size, device)
        for _, microbatch, features in self.deliveries:
            if self.stop.is_set():
                break
            on_device = features.to(device)
            sums = sums + microbatch_loss(drafter, microbatch, on_device, self.loss_settings, backward=False)
        decoded = self.decode(drafter) if self.decode and not self.stop.is_set() else {}
        return sums, decoded


def accuracy_by_position(sums: LossSums, prefix: str) -> dict[str, float]:
    """Return `<prefix>/accuracy_position_k` for k = 1..B-1."""
    return {f"{prefix}/accuracy_position_{k}": a for k, a in enumerate(sums.accuracy_K()) if k > 0}


def validation_metrics(sums: LossSums) -> dict[str, float]:
    """Return loss, accuracy by position and simulated acceptance length with its 95% interval."""
    mean, low, high = sums.simulated_acceptance_length()
    return {
        "validation/loss": sums.loss(),
        **accuracy_by_position(sums, "validation"),
        "validation/simulated_acceptance_length": mean,
        "validation/simulated_acceptance_length_low": low,
        "validation/simulated_acceptance_length_high": high,
    }


def validation_line(step: int, metrics: dict[str, float]) -> str:
    """Return the console's line for a validation."""
    loss, simulated = metrics["validation/loss"], metrics["validation/simulated_acceptance_length"]
    line = f"validation at step {step}: loss {loss:.4f}, simulated acceptance length {simulated:.3f}"
    decoded = metrics.get("validation/acceptance_length")
    return line if decoded is None else f"{line}, decoded {decoded:.3f}"
