"""Eligible positions and drawn anchors. Expected values can be checked by eye."""

import numpy as np
import pytest

from dflash_core.anchors import anchor_key, draft_slots, draw_anchors, eligible_positions, philox4x32


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([0, 0, 1, 1, 1, 0, 0, 0], [2, 3]),
        # two answers: no anchor on the last token of either
        ([0, 1, 1, 0, 1, 1, 1, 0], [1, 4, 5]),
        # the block at 6 is partial: one supervised token follows
        ([0, 0, 0, 0, 0, 1, 1, 1], [5, 6]),
        # exactly one
        ([0, 0, 0, 1, 1, 0, 0, 0], [3]),
        # none: no supervised token is followed by another
        ([0, 1, 0, 1, 0, 1, 0, 1], []),
        ([0, 0, 0, 0, 0, 0, 0, 1], []),
        ([1, 1], [0]),
        ([1], []),
        ([], []),
    ],
)
def test_eligible_positions(mask, expected):
    result = eligible_positions(np.array(mask, dtype=np.uint8))
    assert result.dtype == np.int32
    assert result.tolist() == expected


# the known-answer vectors that Random123 ships for philox4x32-10
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    # a second counter must not disturb the first
    columns = np.array([counter, [1, 2, 3, 4]], dtype=np.uint32).T
    assert philox4x32(columns, key)[:, 0].tolist() == expected


def test_drawn_are_the_smallest_values():
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1], dtype=np.uint8)  # eligible 2..6
    key = anchor_key(7, 3, b"0123456789abcdef")
    value = {p: int(philox4x32(np.array([[p], [0], [0], [0]], np.uint32), key)[0, 0]) for p in range(2, 7)}
    for n in range(1, 6):
        drawn = draw_anchors(mask, num_anchors=n, seed=7, epoch=3, sample_id=b"0123456789abcdef")
        assert drawn.tolist() == sorted(sorted(value, key=value.get)[:n])


def test_draws_are_pinned():
    """A change here changes the anchors of every run: older checkpoints would no longer resume exactly."""
    mask = np.ones(40, dtype=np.uint8)
    draw = draw_anchors(mask, num_anchors=6, seed=0, epoch=0, sample_id=bytes(16))
    assert draw.tolist() == [5, 8, 11, 18, 32, 34]


def test_draws_differ_by_seed_epoch_and_sample_only():
    mask = np.ones(200, dtype=np.uint8)
    base = {"num_anchors": 20, "seed": 0, "epoch": 0, "sample_id": b"a" * 16}
    first = draw_anchors(mask, **base).tolist()
    assert draw_anchors(mask, **base).tolist() == first
    for change in ({"seed": 1}, {"epoch": 1}, {"sample_id": b"b" * 16}):
        assert draw_anchors(mask, **{**base, **change}).tolist() != first
    assert set(first) < set(draw_anchors(mask, **{**base, "num_anchors": 21}).tolist())


def test_all_eligible_when_the_budget_allows():
    mask = np.array([0, 1, 1, 0, 1, 1, 1, 0], dtype=np.uint8)
    for n in (3, 512):
        drawn = draw_anchors(mask, num_anchors=n, seed=0, epoch=0, sample_id=b"x")
        assert drawn.tolist() == [1, 4, 5]


def test_every_position_is_drawn_equally_often():
    mask, counts = np.ones(9, dtype=np.uint8), np.zeros(8)
    for epoch in range(2000):
        counts[draw_anchors(mask, num_anchors=2, seed=1, epoch=epoch, sample_id=b"s")] += 1
    assert counts.sum() == 4000
    # five standard deviations
    assert np.abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_draft_slots():
    slots = draft_slots(np.array([0, 1, 3, 900], np.int32), num_anchors=3, block_size=4)
    assert slots.tolist() == [0, 4, 12, 12]
