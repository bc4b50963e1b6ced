"""Settings of a run against what the check of its target found."""

from __future__ import annotations

import pytest

from dflash_core.config import RunConfig, from_dict
from dflash_core.drafter.compatibility import check_run
from dflash_core.errors import UserError
from dflash_core.target.mode import FAST, PADDED
from dflash_core.target.shape import TargetShape

SHAPE = TargetShape(
    hidden_size=64,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=128,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
)


def config_of(**sections: dict[str, object]) -> RunConfig:
    drafter = {"mask_token_id": 3, **sections.pop("drafter", {})}
    return from_dict(RunConfig, {"drafter": drafter, **sections})


def test_settings_that_fit_pass() -> None:
    check_run(config_of(batching={"strategy": "packed"}), FAST, SHAPE, max_tokens=None)
    check_run(config_of(batching={"strategy": "sorted"}), PADDED, SHAPE, max_tokens=4096)


def test_packing_is_rejected_where_samples_influence_each_other() -> None:
    message = "batching.strategy: 'packed' .* influence each other .*; allowed: sorted, sorted_fresh"
    with pytest.raises(UserError, match=message):
        check_run(config_of(batching={"strategy": "packed"}), PADDED, SHAPE, max_tokens=None)


def test_lengths_beyond_the_original_rotary_length_are_rejected() -> None:
    with pytest.raises(UserError, match="data.max_length: 3072 .*beyond 2048 tokens .*allowed: up to 2048"):
        check_run(config_of(), FAST, SHAPE, max_tokens=2048)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"target_layer_ids": [1, 8]}, "drafter.target_layer_ids: .*0 to 7"),
        ({"mask_token_id": 128}, "drafter.mask_token_id: 128 .*0 to 127"),
        ({"num_heads": 3}, "drafter.num_kv_heads: 2"),
        ({"mask_token_id": None}, "drafter.mask_token_id: not set"),
    ],
)
def test_a_drafter_that_does_not_fit_is_rejected(drafter: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_run(config_of(drafter=drafter), FAST, SHAPE, max_tokens=None)
