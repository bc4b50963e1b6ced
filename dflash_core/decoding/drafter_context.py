"""The drafter at decoding time: its context, its drafts, and the check that it belongs to the target.

Each accepted token is projected once and kept by layer, in the slot of its row and position. Features of
rejected tokens are stored as well: they lie above the row's length, where no draft looks before they are
overwritten.

Shape letters: B rows, K block size, T packed tokens, L captured layers, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.decoding.int8 import Int8Drafter
from dflash_core.decoding.packed_drafter import packed_drafter
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.decode_cache import move_rows
from dflash_core.target.target import Target


class DrafterContext:
    """Context keys and values of the drafter for all rows, by layer.

    Args:
        drafter: whose projections fill the context.
        num_rows, num_slots: size of the buffers; position p of row r lies in slot r * num_slots + p.
        like: a tensor with the device and dtype of the buffers.
    """

    def __init__(self, drafter: DFlashDrafter, num_rows: int, num_slots: int, like: Tensor) -> None:
        self.drafter, self.num_slots = packed_drafter(drafter, like.dtype), num_slots
        shape = (num_rows * num_slots, drafter.shape.num_kv_heads, drafter.shape.head_dim)
        self.layers = [
            (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(drafter.shape.num_layers)
        ]

    def append(self, features: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        """Project features and store them at their positions, those of rejected tokens included.

        Args:
            features, positions: [B, K, L * D] and [B, K] for rows 0..B-1; or packed, [T, L * D] and [T].
            rows: [T], row of each packed token.
        """
        keys = self.layers[0][0]
        if rows is None:
            rows = torch.arange(len(positions), device=keys.device)[:, None]
        context = self.drafter.project_context(features.flatten(0, -2).to(keys.dtype))
        slots = (rows * self.num_slots + positions).flatten()
        for stored, new in zip(self.layers, self.drafter.project_layers(context, positions.flatten())):
            for buffer, states in zip(stored, new):
                buffer[slots] = states

    def keep_rows(self, rows: Tensor) -> None:
        """Drop finished rows, see `DecodeCache.keep_rows`."""
        for pair in self.layers:
            for buffer in pair:
                move_rows(buffer.unflatten(0, (-1, self.num_slots)), rows)

    def draft_logits(self, target: Target, anchor_tokens_B: Tensor, lengths_B: Tensor) -> Tensor:
        """Return logits [B, K - 1, V] of the slots after anchors at positions `lengths_B`."""
        shape = self.drafter.shape
        num_rows = len(anchor_tokens_B)
        ids_BK = anchor_tokens_B.new_full((num_rows, shape.block_size), shape.mask_token_id)
        ids_BK[:, 0] = anchor_tokens_B
        embeds_BKD = torch.nn.functional.embedding(ids_BK, target.embed_weight)
        start_B = torch.arange(num_rows, device=ids_BK.device, dtype=torch.int32) * self.num_slots
        hidden_BKD = self.drafter.forward_blocks(
            embeds_BKD, self.layers, context_start_A=start_B, anchor_A=start_B + lengths_B.int()
        )
        head = self.drafter.head if isinstance(self.drafter, Int8Drafter) else target.draft_logits
        logits: Tensor = head(hidden_BKD[:, 1:])
        return logits


def check_pair(target: Target, drafter: DFlashDrafter) -> None:
    """Check that a drafter reads the layers that this target captures, with its width and vocabulary.

    Layer ids that are off by one load without an error and draft almost nothing.

    Raises:
        UserError: the drafter was trained for other layers, another width or another vocabulary.
    """
    shape = drafter.shape
    pairs = {
        "target_layer_ids": (list(shape.target_layer_ids), list(target.layer_ids)),
        "num_target_layers": (shape.num_target_layers, len(target.layers)),
        "hidden_size": (shape.hidden_size, target.width_D),
        "vocab_size": (shape.vocab_size, target.embed_weight.shape[0]),
    }
    for name, (trained, actual) in pairs.items():
        if trained != actual:
            raise UserError(
                f"drafter: {name} is {trained}, the target has {actual}; allowed: the target it was made for"
            )
