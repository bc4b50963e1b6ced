"""Checks of a drafter's settings against its target: the layers it reads and its mask token. Needs no torch.

Policy: `config.json` of the target is enough, so a mistake is reported before hours of reading data.
"""

from __future__ import annotations

import json
from pathlib import Path

from dflash_core.config import DrafterConfig
from dflash_core.errors import UserError
from dflash_core.target.captured_layers import captured_layers


def check_compatible(target_directory: Path, drafter: DrafterConfig) -> None:
    """Check a drafter's settings against the `config.json` of its target.

    A configuration that names its layers or its vocabulary differently passes here; the ranks check it again.

    Raises:
        UserError: layers that the target does not have, or a mask token that its embedding does not have.
    """
    config = json.loads((target_directory / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if "num_hidden_layers" in text:
        captured_layers(drafter, text["num_hidden_layers"])
    if "vocab_size" in text and drafter.mask_token_id is not None:
        check_mask_token(drafter.mask_token_id, text["vocab_size"])


def check_mask_token(mask_token_id: int, vocab_size: int) -> None:
    """Check that a mask token is a row of the target's embedding.

    Raises:
        UserError: it is not.
    """
    if not 0 <= mask_token_id < vocab_size:
        raise UserError(
            f"drafter.mask_token_id: {mask_token_id} is not allowed; "
            f"allowed: an existing row of the target's embedding, 0 to {vocab_size - 1}"
        )
