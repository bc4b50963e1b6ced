"""The draft step of decoding is the forward pass of training, and a wrong pair is rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.support.tiny_target import MASK_TOKEN_ID
from dflash_core.config import ObjectiveConfig
from dflash_core.decoding.drafter_context import DrafterContext
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.microbatch import Features, Microbatch
from dflash_core.objective.loss import LossSettings, TargetEnds, microbatch_loss
from dflash_core.target.target import Target
from tests.support.decoding_cases import BLOCK, PROMPTS, make_drafter


@pytest.mark.parametrize("window", [None, 6])
def test_the_draft_step_is_the_training_forward(target: Target, window: int | None) -> None:
    """At each anchor of two packed samples: logits of decoding over the context equal those of training."""
    drafter = make_drafter(target, sliding_window=window)
    lengths = [17, 12]
    tokens = np.random.default_rng(1).integers(4, 512, size=sum(lengths))
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    features = target.capture(tokens, bounds).hidden
    row_T = np.arange(29) - np.repeat(bounds[:-1], lengths)
    anchors = np.array([0, 1, 5, 14, 17, 20, 27])
    starts = bounds[np.searchsorted(bounds, anchors, side="right") - 1]
    with torch.no_grad():
        context = drafter.project_layers(drafter.project_context(features), torch.as_tensor(row_T))
        ids = torch.full((len(anchors), BLOCK), MASK_TOKEN_ID)
        ids[:, 0] = torch.as_tensor(tokens[anchors])
        hidden = drafter.forward_blocks(
            target.embed_weight[ids],
            context,
            context_start_A=torch.as_tensor(starts).int(),
            anchor_A=torch.as_tensor(anchors).int(),
        )
        training = target.logits(hidden[:, 1:])
        for i, (anchor, start) in enumerate(zip(anchors.tolist(), starts.tolist())):
            # As in decoding, the context arrives in pieces, and rejected slots lie after it.
            prefix = features[start:anchor][None]
            decoding = DrafterContext(drafter, 1, 40, like=target.embed_weight)
            cut = prefix.shape[1] // 2
            decoding.append(prefix[:, :cut], torch.arange(cut)[None])
            decoding.append(torch.randn(1, 20, features.shape[1]), torch.arange(cut, cut + 20)[None])
            decoding.append(prefix[:, cut:], torch.arange(cut, prefix.shape[1])[None])
            length = torch.tensor([anchor - start])
            logits = decoding.draft_logits(target, torch.as_tensor(tokens[anchor : anchor + 1]), length)
            torch.testing.assert_close(logits[0], training[i], rtol=1e-5, atol=1e-5)


def test_accuracy_by_position_is_the_training_metric(target: Target, drafter: DFlashDrafter) -> None:
    """Draft steps at each anchor of a sample, answers forced: right as often as in the training metric."""
    generator = torch.Generator().manual_seed(3)
    # Larger weights, so that predictions differ between positions.
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    length = 60
    tokens = torch.as_tensor(np.random.default_rng(2).integers(4, 512, size=length))
    bounds = torch.tensor([0, length], dtype=torch.int32)
    features = target.capture(tokens, bounds).hidden
    anchors = torch.arange(5, 55)
    context = DrafterContext(drafter, 1, length, like=target.embed_weight)
    with torch.no_grad():
        context.append(features[None], torch.arange(length)[None])
        predictions = [
            context.draft_logits(target, tokens[anchor][None], anchor[None])[0].argmax(-1)
            for anchor in anchors
        ]
    # Half of the labels are what the drafter predicts, the rest are the data: otherwise only chance
    # would be right.
    labels = tokens.clone()
    labels[6:36] = torch.stack(predictions)[:30, 0]
    rows = anchors[:, None] + torch.arange(1, BLOCK)
    right = (torch.stack(predictions) == labels[rows]).sum(0)
    microbatch = Microbatch(
        sample_rows=np.zeros(1, dtype=np.int32),
        token_ids=tokens.numpy(),
        loss_mask=np.ones(length, dtype=np.uint8),
        cu_seqlens=np.array([0, length], dtype=np.int32),
        width=0,
        anchors=anchors.int().numpy(),
        anchor_sample=np.zeros(len(anchors), dtype=np.int32),
    )
    settings = LossSettings(
        ends=TargetEnds(target.embed_weight, target.head_weight),
        objective=ObjectiveConfig(labels="target"),
        mask_token_id=MASK_TOKEN_ID,
        max_draft_slots=64,
        device=torch.device("cpu"),
    )
    sums = microbatch_loss(drafter, microbatch, Features(features, labels), settings, backward=False)
    assert sums.correct_K[1:].tolist() == right.tolist()
    assert sums.count_K[1:].tolist() == [50, 50, 50]
    assert int(right[0]) >= 30


def test_a_drafter_of_other_layers_is_rejected(tiny_target_dir: Path, drafter: DFlashDrafter) -> None:
    """Layer ids off by one would load without an error and draft almost nothing."""
    shifted = Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32")
    with pytest.raises(UserError, match=r"target_layer_ids is \[0, 2\], the target has \[1, 3\]"):
        speculative_decode(shifted, drafter, PROMPTS, Sampling(max_new_tokens=2))
