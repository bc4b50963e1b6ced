"""Eligible anchors, drawn anchors and draft slots. numpy only, so that plans need no torch.

Anchors depend only on the sample, the seed and the epoch: not on the batch, the rank, the padding or the
strategy. So every strategy trains on the same blocks, and a sample's draft slots are known before the run.
Drawing costs about 0.2 ms for a sample of 1,000 tokens.

Shape letters: S tokens of one sample, E eligible positions, A anchors, N samples.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def eligible_positions(loss_mask: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the positions a with loss_mask[a] and loss_mask[a + 1], ascending, int32 [E].

    In decoding (z-lab/dflash, `dflash/model.py`) a block opens at the last token that the target chose
    itself. So here too the anchor is a token of an answer, and the block has at least one supervised token.
    Trainers differ in this; it is our choice. A sample's last position is never eligible.

    Mask 0 1 1 0 1 1 1 0 -> 1, 4, 5.
    """
    supervised = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:]).astype(np.int32)


def draw_anchors(
    loss_mask: NDArray[np.uint8], *, num_anchors: int, seed: int, epoch: int, sample_id: bytes
) -> NDArray[np.int32]:
    """Draw anchors: the min(num_anchors, E) eligible positions with the smallest random values, int32 [A].

    Anchors ascend. The value of a position is the first word of Philox4x32-10 with the position as counter
    and a key made of seed, epoch and sample id; equal values are ordered by position. So raising
    `num_anchors` only adds anchors.

    Args:
        loss_mask: uint8 [S], 1 where the token is supervised.
        num_anchors: most anchors of this sample.
        seed: seed of the run, 0 <= seed < 2**64.
        epoch: counted from 0.
        sample_id: content id of the sample (16 bytes).
    """
    eligible = eligible_positions(loss_mask)
    if len(eligible) <= num_anchors:
        return eligible
    counter = np.zeros((4, len(eligible)), dtype=np.uint32)
    counter[0] = eligible
    values = philox4x32(counter, anchor_key(seed, epoch, sample_id))[0]
    return np.sort(eligible[np.argsort(values, kind="stable")[:num_anchors]])


def draft_slots(num_eligible: NDArray[np.int32], *, num_anchors: int, block_size: int) -> NDArray[np.int32]:
    """Return the draft slots of each sample, int32 [N]: min(num_anchors, E) blocks of `block_size`."""
    return (np.minimum(num_eligible, num_anchors) * block_size).astype(np.int32)


def anchor_key(seed: int, epoch: int, sample_id: bytes) -> tuple[int, int]:
    """Return the Philox key of a sample in an epoch.

    It is 64 bits of blake2b over seed and epoch (u64, little endian each) and sample id.
    """
    message = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little") + sample_id
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Compute Philox4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        counter: uint32 [4, n].
        key: two 32-bit words.

    Returns:
        uint32 [4, n], four random words per counter.
    """
    c0, c1, c2, c3 = counter.astype(np.uint64)
    for round_number in range(10):
        k0, k1 = (np.uint64((k + round_number * step) & 0xFFFFFFFF) for k, step in zip(key, _KEY_STEPS))
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)
