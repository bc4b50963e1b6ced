"""Supervised slots of blocks, by masks of eight tokens that can be checked by eye."""

import torch

from dflash_core.objective.labels import supervised_slots


def slots(mask, anchors, ends, block_size=4):
    mask, anchors, ends = torch.tensor(mask, dtype=torch.uint8), torch.tensor(anchors), torch.tensor(ends)
    result = supervised_slots(mask, anchors, ends, block_size=block_size)
    return ["".join("x" if s else "." for s in row) for row in result.tolist()]


def test_supervision_inside_a_block():
    #        0  1  2  3  4  5  6  7
    mask = [0, 0, 1, 1, 1, 1, 1, 1]
    # partial blocks at the end
    assert slots(mask, [2, 5, 6], [8, 8, 8]) == [".xxx", ".xx.", ".x.."]


def test_supervision_stops_at_a_gap_and_does_not_start_again():
    mask = [0, 1, 1, 0, 1, 1, 1, 0]
    assert slots(mask, [1, 4], [8, 8]) == [".x..", ".xx."]


def test_supervision_does_not_enter_the_next_sample_of_a_pack():
    """Two samples of 8; the second has no prompt, so that only the sample's end stops the block at row 6."""
    mask = [0, 0, 0, 0, 0, 1, 1, 1] + [1] * 8
    assert slots(mask, [5, 6, 8, 14], [8, 8, 16, 16]) == [".xx.", ".x..", ".xxx", ".x.."]


def test_supervision_stops_after_the_first_disagreement():
    """The target agrees in rows 3, 4, 6. The slot that disagrees is supervised, the next is not."""
    mask, agrees = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 0, 1, 0]).bool()
    anchors, ends = torch.tensor([2, 4, 5, 6]), torch.full((4,), 8)
    result = supervised_slots(mask, anchors, ends, block_size=5, agrees_T=agrees).int().tolist()
    assert result == [[0, 1, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]
