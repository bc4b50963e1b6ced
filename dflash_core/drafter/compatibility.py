"""Whether a drafter's settings fit a target: which layers it reads, which token is its mask. Needs no torch."""

from __future__ import annotations

from dflash_core.errors import UserError


def check_mask_token(mask_token_id: int, vocab_size: int) -> None:
    """Raises UserError for a mask token that is no row of the target's embedding."""
    if not 0 <= mask_token_id < vocab_size:
        raise UserError(
            f"drafter.mask_token_id: {mask_token_id} is not allowed; "
            f"allowed: an existing row of the target's embedding, 0 to {vocab_size - 1}"
        )
