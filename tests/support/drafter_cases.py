"""A small drafter and a small packed microbatch for the tests of drafter, loss and step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from dflash_core.config import ObjectiveConfig
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.shape import DrafterShape
from dflash_core.microbatch import Features, Microbatch
from dflash_core.objective.loss import LossSettings, LossSums, TargetEnds, microbatch_loss
from dflash_core.target.labels import label_rows, target_labels

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    mask_token_id=3,
    target_layer_ids=(1, 3, 4),
    num_target_layers=6,
    vocab_size=61,
    rope_theta=10_000.0,
)


@dataclass
class Case:
    """Five samples in one pack: overlapping and partial blocks, one anchor, none, a gap in the mask."""

    features: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    anchors: Tensor
    anchor_sample: Tensor
    last_hidden: Tensor
    ends: TargetEnds

    def double(self) -> Case:
        """Return the same microbatch in float64."""
        ends = TargetEnds(self.ends.embed_VD.double(), self.ends.head_VD.double())
        features, last_hidden = self.features.double(), self.last_hidden.double()
        return replace(self, features=features, last_hidden=last_hidden, ends=ends)

    def samples(self, first: int, last: int) -> Case:
        """Return the microbatch of samples first..last-1 alone."""
        begin, end = int(self.cu_seqlens[first]), int(self.cu_seqlens[last])
        chosen = (self.anchor_sample >= first) & (self.anchor_sample < last)
        rows = {f: getattr(self, f)[begin:end] for f in ("features", "token_ids", "loss_mask", "last_hidden")}
        return replace(
            self,
            **rows,
            cu_seqlens=self.cu_seqlens[first : last + 1] - begin,
            anchors=self.anchors[chosen] - begin,
            anchor_sample=self.anchor_sample[chosen] - first,
        )

    def microbatch(self) -> Microbatch:
        """Return the microbatch as training has it."""
        names = ("token_ids", "loss_mask", "cu_seqlens", "anchors", "anchor_sample")
        arrays = {name: getattr(self, name).cpu().numpy() for name in names}
        return Microbatch(sample_rows=np.arange(len(self.cu_seqlens) - 1, dtype=np.int32), width=0, **arrays)

    def target_labels(self) -> Tensor:
        """Return the labels that the target gives."""
        rows = label_rows(self.loss_mask.cpu().numpy(), self.cu_seqlens.cpu().numpy())
        rows_P = torch.from_numpy(rows).to(self.last_hidden.device)
        return target_labels(self.last_hidden, self.ends.head_VD, rows_P)

    def captured(self, objective: ObjectiveConfig, labels_T: Tensor | None = None) -> Features:
        """Return what capture gives for an objective; `labels_T` replaces the target's labels."""
        if objective.labels == "target" and labels_T is None:
            labels_T = self.target_labels()
        return Features(self.features, labels_T, self.last_hidden if objective.loss == "kl" else None)

    def arguments(self) -> tuple:
        names = ("features", "token_ids", "loss_mask", "cu_seqlens", "anchors", "anchor_sample")
        return tuple(getattr(self, name) for name in names)


MASKS = [
    [0, 0, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 0, 1, 1, 1, 0],
    [0, 0, 0, 1, 1],
    [0, 1, 0, 1, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
]
ANCHORS = [[2, 3, 6], [1, 4, 5], [3], [], [0, 1, 4, 5, 10]]


def make_case(shape: DrafterShape = SHAPE, *, seed: int = 0, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    lengths = [len(mask) for mask in MASKS]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows = starts[-1]
    return Case(
        features=normal(rows, len(shape.target_layer_ids) * shape.hidden_size),
        token_ids=torch.randint(4, shape.vocab_size, (rows,), generator=generator),
        loss_mask=torch.tensor(sum(MASKS, []), dtype=torch.uint8),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        anchors=torch.tensor([s + a for s, own in zip(starts, ANCHORS) for a in own], dtype=torch.int32),
        anchor_sample=torch.tensor([i for i, own in enumerate(ANCHORS) for _ in own], dtype=torch.int32),
        last_hidden=normal(rows, shape.hidden_size),
        ends=TargetEnds(*(normal(shape.vocab_size, shape.hidden_size) for _ in range(2))),
    )


def make_drafter(shape: DrafterShape = SHAPE, seed: int = 1) -> DFlashDrafter:
    """Make a drafter whose norm weights differ from 1 too, so that each weight matters."""
    drafter = DFlashDrafter(shape, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.3 if "norm" in name else 0.1))
    return drafter


def run(
    drafter: DFlashDrafter,
    case: Case,
    objective: ObjectiveConfig,
    *,
    max_draft_slots: int = 10_000,
    backward: bool = True,
    labels_T: Tensor | None = None,
) -> LossSums:
    """Compute the sums of a case and, with `backward`, the drafter's gradients."""
    mask_token_id = drafter.shape.mask_token_id
    settings = LossSettings(case.ends, objective, mask_token_id, max_draft_slots, case.features.device)
    features = case.captured(objective, labels_T)
    return microbatch_loss(drafter, case.microbatch(), features, settings, backward=backward)


def gradients(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """Copy the gradients, then clear them."""
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    return grads


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-5) -> None:
    """Check that each tensor is within `relative` times the largest entry of the expected one."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, largest = (actual[name].double() - value.double()).abs().max(), value.double().abs().max()
        assert error <= relative * largest + 1e-12, f"{name}: {error} of {largest}"


def assert_sums_close(actual: LossSums, expected: LossSums, relative: float = 1e-5) -> None:
    """Check each field of the sums."""
    for f in fields(LossSums):
        a, e = (getattr(sums, f.name).double() for sums in (actual, expected))
        torch.testing.assert_close(a, e, rtol=relative, atol=1e-9)
