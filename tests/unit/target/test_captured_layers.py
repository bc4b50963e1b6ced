"""Layers that a drafter reads: the published formula, and ids that a target does not have."""

from __future__ import annotations

import pytest

from dflash_core.errors import UserError
from dflash_core.target.captured_layers import check_layer_ids, target_layer_ids


def test_layer_ids_as_published() -> None:
    assert target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert target_layer_ids(30, 5) == [1, 8, 14, 20, 27]
    assert target_layer_ids(30, 1) == [15]
    assert target_layer_ids(4, 1) == [2]


def test_impossible_layer_ids_are_rejected() -> None:
    with pytest.raises(UserError, match="drafter.num_captured_layers: 5"):
        target_layer_ids(6, 5)
    for wrong in ([4], [-1, 2], [2, 1], [1, 1], []):
        with pytest.raises(UserError, match="drafter.target_layer_ids.*0 to 3"):
            check_layer_ids(wrong, 4)
