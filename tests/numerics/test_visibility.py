"""Context rows that each slot sees: hand-drawn masks."""

import pytest
import torch

from dflash_core.visibility import context_bounds, context_mask


def drawn(text: str) -> list[list[bool]]:
    return [[c == "x" for c in line.split()[-1]] for line in text.strip().splitlines()]


def test_two_samples_in_a_pack():
    """Samples in rows 0..3 and 4..8, block size 2, anchors at rows 2 and 6, as in the module's docstring."""
    mask = context_mask(torch.tensor([0, 4]), torch.tensor([2, 6]), num_rows=9, block_size=2)
    assert mask.flatten(0, 1).tolist() == drawn("""
        2.0  xx.......
        2.1  xx.......
        6.0  ....xx...
        6.1  ....xx...""")


def test_sliding_window():
    """(a + k) - r < 3. The second slot of a block sees one row less."""
    starts, anchors = torch.tensor([0, 4]), torch.tensor([2, 6])
    mask = context_mask(starts, anchors, num_rows=9, block_size=2, sliding_window=3)
    assert mask.flatten(0, 1).tolist() == drawn("""
        2.0  xx.......
        2.1  .x.......
        6.0  ....xx...
        6.1  .....x...""")


def test_overlapping_blocks_and_an_anchor_at_the_start():
    """Of anchors 1 apart each sees one row more; an anchor on a sample's first token sees no context."""
    mask = context_mask(torch.tensor([0, 0, 3, 3]), torch.tensor([1, 2, 3, 4]), num_rows=5, block_size=1)
    assert mask[:, 0].tolist() == drawn("""
        x....
        xx...
        .....
        ...x.""")


@pytest.mark.parametrize("window", [None, 4, 6, 100])
def test_bounds_are_the_mask(window):
    start, anchor = torch.tensor([0, 0, 0, 9, 9]), torch.tensor([0, 5, 8, 9, 15])
    first, end = context_bounds(start, anchor, block_size=4, sliding_window=window)
    mask = context_mask(start, anchor, num_rows=16, block_size=4, sliding_window=window)
    for a in range(5):
        for k in range(4):
            assert mask[a, k].nonzero()[:, 0].tolist() == list(range(int(first[a, k]), int(end[a, k])))
