"""Checks of a run's settings against its target, before hours of reading data. Needs no torch.

Policy: first what `config.json` of the target tells, then what the check of the target found.
"""

from __future__ import annotations

import json
from pathlib import Path

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import DrafterConfig, RunConfig
from dflash_core.drafter.shape import check_mask_token, drafter_shape
from dflash_core.errors import UserError
from dflash_core.target.captured_layers import captured_layers
from dflash_core.target.mode import TargetMode
from dflash_core.target.shape import TargetShape


def check_compatible(target_directory: Path, drafter: DrafterConfig) -> None:
    """Check a drafter's settings against the `config.json` of its target.

    A configuration that names its layers or its vocabulary differently passes here; `check_run` knows them.

    Raises:
        UserError: layers that the target does not have, or a mask token that its embedding does not have.
    """
    config = json.loads((target_directory / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if "num_hidden_layers" in text:
        captured_layers(drafter, text["num_hidden_layers"])
    if "vocab_size" in text and drafter.mask_token_id is not None:
        check_mask_token(drafter.mask_token_id, text["vocab_size"])


def check_run(config: RunConfig, mode: TargetMode, shape: TargetShape, *, max_tokens: int | None) -> None:
    """Check the drafter's shape, the strategy and the lengths of a run against its target.

    Args:
        config: settings of the run.
        mode, shape, max_tokens: of the target, see `TargetCheck`.

    Raises:
        UserError: one of them does not fit.
    """
    drafter_shape(shape, config.drafter, captured_layers(config.drafter, shape.num_layers))
    strategy, length = config.batching.strategy, config.data.max_length
    if STRATEGIES[strategy].is_packed and not mode.can_pack:
        padded = ", ".join(name for name, traits in STRATEGIES.items() if not traits.is_packed)
        raise UserError(
            f"batching.strategy: {strategy!r} is not allowed, samples of this target influence each other in "
            f"a pack; allowed: {padded}"
        )
    if max_tokens is not None and length > max_tokens:
        raise UserError(
            f"data.max_length: {length} is not allowed, beyond {max_tokens} tokens the rotary embedding of "
            f"this target depends on the longest sample of a microbatch; allowed: up to {max_tokens}"
        )
