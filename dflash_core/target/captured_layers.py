"""Layers of the target whose hidden states the drafter reads. Needs no torch.

Policy: ids are 0-based decoder layers, ascending; id i means the output of layer i. They are named by
`drafter.target_layer_ids` or follow from the number of layers, spread from near the input to near the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_core.config import DrafterConfig
from dflash_core.errors import UserError


def captured_layers(config: DrafterConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers of an n-layer target that the drafter reads: those given, else by formula.

    Raises:
        UserError: the target does not have them.
    """
    ids = config.target_layer_ids or target_layer_ids(num_layers, config.num_captured_layers)
    return check_layer_ids(ids, num_layers)


def target_layer_ids(num_layers: int, num_captured: int) -> list[int]:
    """Return the layers of an n-layer target that z-lab/dflash chooses.

    One layer: [n // 2]; else round(1 + i (n - 4) / (d - 1)) for i = 0..d-1 (Python's round, to even).
    n = 36, d = 5 -> [1, 9, 17, 25, 33]; n = 30, d = 5 -> [1, 8, 14, 20, 27].

    Raises:
        UserError: more layers asked for than distinct ids exist.
    """
    if num_captured == 1:
        return [num_layers // 2]
    ids = [round(1 + i * (num_layers - 4) / (num_captured - 1)) for i in range(num_captured)]
    if len(set(ids)) < num_captured or ids[0] < 0 or ids[-1] >= num_layers:
        raise UserError(
            f"drafter.num_captured_layers: {num_captured} is not allowed for a target of {num_layers} "
            f"layers; allowed: 1 to {max(1, num_layers - 3)}, or name the layers in drafter.target_layer_ids"
        )
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids if they are distinct, ascending and in 0..n-1.

    Raises:
        UserError: they are not.
    """
    ids = tuple(int(i) for i in layer_ids)
    if not ids or any(not 0 <= i < num_layers for i in ids) or any(a >= b for a, b in zip(ids, ids[1:])):
        raise UserError(
            f"drafter.target_layer_ids: {list(ids)} is not allowed; allowed: ascending layer numbers from 0 "
            f"to {num_layers - 1} of a target of {num_layers} layers"
        )
    return ids
