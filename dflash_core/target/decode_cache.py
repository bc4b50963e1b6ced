"""Keys and values of the target for decoding rows of different lengths.

Policy: slot p of a row holds the token at position p. Prompts arrive packed, without padding, in any rows
(`begin_packed`); later tokens a few per row, in rows 0..B-1 (`begin`). A verification pass writes its whole
block. Rejected tokens then lie above the row's length, where no later query looks before they are
overwritten, so nothing is ever cropped, and a row whose answer has ended takes the next prompt.

Price: buffers are allocated once, at their full size: rows x slots x layers.

Shape letters: B rows, G key/value heads, H head dim, T packed tokens, K new tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Slots are read in whole multiples of this, so that a sum over them has the same order at each length.
SLOT_MULTIPLE = 16


@dataclass
class DecodeCache:
    """Keys and values of every layer, addressed by row and position."""

    num_rows: int  # at most
    num_slots: int
    # By layer: keys and values, each [rows * slots, G, H].
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # The same, each pair in one tensor [rows * slots, 2 G, H], where keys and values have one width.
    joined: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_slots = _rounded_up(self.num_slots)

    def begin_packed(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        """Set the row and the position of each token of the next packed forward."""
        self.written = rows_T * self.num_slots + positions_T

    def begin(self, positions_BK: torch.Tensor) -> None:
        """Set the positions of the tokens of the next forward, in rows 0..B-1."""
        self.positions_BK = positions_BK
        last = int(positions_BK.max())
        assert last < self.num_slots, f"position {last} in a cache of {self.num_slots} slots"
        self.end = _rounded_up(last + 1)
        rows_B1 = torch.arange(len(positions_BK), device=positions_BK.device)[:, None]
        self.written = (rows_B1 * self.num_slots + positions_BK).flatten()
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._biases: dict[tuple[int, int | None], torch.Tensor] = {}

    def store(self, layer: int, key_BGKH: torch.Tensor, value_BGKH: torch.Tensor) -> None:
        """Store the new keys and values, packed ones as [1, G, T, H]."""
        new = [x.transpose(1, 2).flatten(0, 1) for x in (key_BGKH, value_BGKH)]
        if layer not in self.layers:
            self._add(layer, *new)
        for buffer, states in zip(self.layers[layer], new):
            buffer.index_copy_(0, self.written, states)

    def store_joined(self, layer: int, keys_values_RXH: torch.Tensor) -> None:
        """Store the new keys and values of one width, X = 2 G: those of all groups, keys first."""
        if layer not in self.layers:
            self._add(layer, *keys_values_RXH.chunk(2, dim=1))
        self.joined[layer].index_copy_(0, self.written, keys_values_RXH)

    def _add(self, layer: int, key_RGH: torch.Tensor, value_RGH: torch.Tensor) -> None:
        """Make the buffers of a layer; keys and values of one width lie in one buffer."""
        slots = self.num_rows * self.num_slots
        # Zeros, not empty: masked slots still enter the product, and 0 * garbage may be NaN.
        if key_RGH.shape == value_RGH.shape:
            self.joined[layer] = key_RGH.new_zeros(slots, 2 * key_RGH.shape[1], key_RGH.shape[2])
            keys, values = self.joined[layer].chunk(2, dim=1)
        else:
            keys, values = (x.new_zeros(slots, *x.shape[1:]) for x in (key_RGH, value_RGH))
        self.layers[layer] = keys, values

    def visible(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [B, G, slots, H] of the keys and values up to the last position in use, or further."""
        keys, values = (self._view(x) for x in self.layers[layer])
        return keys, values

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a buffer by row, group and slot: one call, where slicing would take five."""
        _, num_groups, width = buffer.shape
        per_slot, per_group, _ = buffer.stride()
        size = (len(self.positions_BK), num_groups, self.end, width)
        stride = (self.num_slots * per_slot, per_group, per_slot, 1)
        return buffer.as_strided(size, stride, buffer.storage_offset())

    def mask(self, repeats: int, window: int | None) -> torch.Tensor:
        """Return which slots of its row each new token sees, bool [B, 1, repeats * K, slots].

        The K tokens stand there `repeats` times.
        """
        if (repeats, window) not in self._masks:
            slots = torch.arange(self.end, device=self.positions_BK.device)
            positions = self.positions_BK[:, None, :, None]
            seen = slots <= positions
            if window is not None:
                seen &= slots > positions - window
            self._masks[repeats, window] = seen.repeat(1, 1, repeats, 1)
        return self._masks[repeats, window]

    def bias(self, repeats: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return `mask` as what it adds to scores: 0 where a token sees a slot, else minus infinity."""
        if (repeats, window) not in self._biases:
            seen = self.mask(repeats, window)
            hidden = torch.full_like(seen, float("-inf"), dtype=dtype)
            self._biases[repeats, window] = hidden.masked_fill_(seen, 0.0)
        return self._biases[repeats, window]

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Move row rows[i] to row i; rows[i] is i, or a row behind the last one that stays."""
        for buffers in self.layers.values():
            for buffer in buffers:
                move_rows(buffer.unflatten(0, (-1, self.num_slots)), rows)


@dataclass
class TokenCache:
    """Tokens of rows decoded by whole forwards: for targets whose state is more than keys and values.

    Price: every step reads every row again, so an answer costs the square of its length.
    """

    num_rows: int  # at most
    num_slots: int

    def begin_packed(self, rows_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        """Set the row and the position of each token of the next `store`."""
        self.written = rows_T * self.num_slots + positions_T

    def begin(self, positions_BK: torch.Tensor) -> None:
        """Set the positions of the tokens of the next `store`, in rows 0..B-1."""
        self.num_live, self.end = len(positions_BK), int(positions_BK.max()) + 1
        assert self.end <= self.num_slots, f"position {self.end - 1} in a cache of {self.num_slots} slots"
        rows_B1 = torch.arange(self.num_live, device=positions_BK.device)[:, None]
        self.written = (rows_B1 * self.num_slots + positions_BK).flatten()

    def store(self, token_ids: torch.Tensor) -> None:
        """Store the tokens at the places that were set."""
        if not hasattr(self, "tokens"):
            self.tokens = token_ids.new_zeros(self.num_rows * self.num_slots)
        self.tokens[self.written] = token_ids

    def rows(self) -> torch.Tensor:
        """Return the tokens [B, S] of the rows in use, up to the last position in use."""
        return self.tokens.view(self.num_rows, self.num_slots)[: self.num_live, : self.end]

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Move row rows[i] to row i, as `DecodeCache.keep_rows` does."""
        move_rows(self.tokens.view(self.num_rows, self.num_slots), rows)


def _rounded_up(slots: int) -> int:
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def move_rows(buffer: torch.Tensor, rows: torch.Tensor) -> None:
    """Set buffer[i] = buffer[rows[i]], in place, where i and rows[i] differ."""
    places = torch.arange(len(rows), device=rows.device)
    moved = rows != places
    buffer[places[moved]] = buffer[rows[moved]]
