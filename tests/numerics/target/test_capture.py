"""Features of a microbatch: those that each objective needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.config import ObjectiveConfig
from dflash_core.microbatch import FeatureSpec, Microbatch
from dflash_core.target.capture import TargetCapture
from dflash_core.target.labels import label_rows, target_labels
from dflash_core.target.target import Target

MICROBATCH = Microbatch(
    sample_rows=np.arange(2, dtype=np.int32),
    token_ids=np.arange(10, 22),
    loss_mask=np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], dtype=np.uint8),
    cu_seqlens=np.array([0, 5, 12], dtype=np.int32),
    width=0,
    anchors=np.array([1, 6], dtype=np.int32),
    anchor_sample=np.array([0, 1], dtype=np.int32),
)


@pytest.mark.parametrize("labels", ["data", "target"])
@pytest.mark.parametrize("loss", ["cross_entropy", "kl"])
def test_features_are_what_the_objective_reads(tiny_target_dir: Path, labels: str, loss: str) -> None:
    target = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="float32")
    objective = ObjectiveConfig(labels=labels, loss=loss)
    features = TargetCapture(target, objective)(MICROBATCH)
    plain = target.capture(MICROBATCH.token_ids, MICROBATCH.cu_seqlens, want_last_hidden=True)
    assert torch.equal(features.hidden, plain.hidden)
    assert not any(tensor.is_inference() for tensor in features.tensors())
    if labels == "data":
        assert features.labels is None
    else:
        rows = torch.from_numpy(label_rows(MICROBATCH.loss_mask, MICROBATCH.cu_seqlens))
        expected = target_labels(plain.last_hidden, target.head_weight, rows)
        assert torch.equal(features.labels, expected)
    if loss == "cross_entropy":
        assert features.last_hidden is None
    else:
        assert torch.equal(features.last_hidden, plain.last_hidden)
    spec = FeatureSpec.of(objective, layers=2, width=64, feature_dtype=torch.float32, compute=torch.float32)
    empty = spec.empty(MICROBATCH.num_tokens, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in empty.tensors()] == [(t.shape, t.dtype) for t in features.tensors()]
