"""The loss of a position, by the name that `objective.loss` gives it.

To add a loss: write one function of this signature, add one row to `LOSSES` and one name to
`ObjectiveConfig.loss`. Weights, normalisation and metrics apply to every loss alike. For a loss that
reads the target's last hidden state, extend the conditions on "kl" in `FeatureSpec.of` and `TargetCapture`.

Shape letters: P supervised slots, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dflash_core.kernels.linear_cross_entropy import VocabularyLoss, linear_cross_entropy

# (hidden_PD, head_VD, labels_P, target_hidden_PD): the drafter's final states, the target's lm_head, the
# labels, and the target's last hidden state for the same predictions (None unless captured).
PositionLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None], VocabularyLoss]


def cross_entropy(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, target_hidden_PD: Tensor | None
) -> VocabularyLoss:
    """Return the cross-entropy to the label."""
    return linear_cross_entropy(hidden_PD, head_VD, labels_P)


def forward_kl(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, target_hidden_PD: Tensor | None
) -> VocabularyLoss:
    """Return KL(target || drafter) over the vocabulary."""
    assert target_hidden_PD is not None, "forward KL needs the target's last hidden state"
    soft_target_PD = target_hidden_PD.to(head_VD.dtype)
    return linear_cross_entropy(hidden_PD, head_VD, labels_P, soft_target_PD=soft_target_PD)


LOSSES: dict[str, PositionLoss] = {"cross_entropy": cross_entropy, "kl": forward_kl}
