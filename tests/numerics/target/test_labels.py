"""Labels that are the target's own tokens."""

import torch

from dflash_core.target.labels import target_labels


def test_labels_of_the_target_come_from_the_row_before():
    """The hidden state of row p predicts p + 10: row p is labelled 10 + (p - 1)."""
    last_hidden, head = torch.eye(8), torch.zeros(20, 8)
    head[torch.arange(8) + 10, torch.arange(8)] = 1.0
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 0, 1])  # samples 0..3 and 4..7; row 4 opens the second
    labels = target_labels(last_hidden, head, mask, torch.tensor([0, 4, 8]))
    assert labels.tolist() == [-1, -1, 11, 12, -1, 14, -1, -1]
