"""A packed drafter drafts what the drafter itself drafts."""

import copy

import pytest
import torch

from dflash_core.decoding import packed_drafter as packing
from dflash_core.decoding.packed_drafter import packed_drafter
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.packed_linear import MAX_FEW_ROWS, packs
from dflash_core.target.target import Target
from tests.support.decoding_cases import make_drafter


@pytest.mark.skipif(not packs(torch.float32), reason="this torch packs no weights on this processor")
@pytest.mark.parametrize("attention_bias", [False, True])
def test_projections_and_states_are_the_drafters_own(target: Target, attention_bias: bool) -> None:
    drafter = make_drafter(target)
    if attention_bias:
        for layer in drafter.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                linear = getattr(layer.self_attn, name)
                linear.bias = torch.nn.Parameter(torch.randn(linear.out_features))
    packed = packed_drafter(drafter, torch.float32)
    assert packed is not drafter
    assert type(packed.fc) is not type(drafter.fc)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for num_tokens in (5, MAX_FEW_ROWS + 1):
            features = torch.randn(num_tokens, drafter.fc.in_features, generator=generator)
            embeds = torch.randn(1, 4, drafter.shape.hidden_size, generator=generator)
            states = []
            for each in (drafter, packed):
                layers = each.project_layers(each.project_context(features), torch.arange(num_tokens))
                start, anchor = torch.zeros(1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
                states.append(each.forward_blocks(embeds, layers, context_start_A=start, anchor_A=anchor))
            torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-4)


def test_a_drafter_that_cannot_be_packed_stays_as_it_is(
    drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packed_drafter(drafter, torch.float64) is drafter
    monkeypatch.setattr(packing, "fits", lambda weights: False)
    assert packed_drafter(drafter, torch.float32) is drafter
    monkeypatch.undo()
    sharded = make_sharded(drafter)
    assert packed_drafter(sharded, torch.float32) is sharded


def make_sharded(drafter: DFlashDrafter) -> DFlashDrafter:
    """Return a drafter one of whose weights looks like a shard."""
    changed = copy.deepcopy(drafter)
    changed.norm.weight.full_tensor = lambda: None
    return changed
