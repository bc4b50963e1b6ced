"""Labels that are the target's own tokens."""

import numpy as np
import torch

from dflash_core.target.labels import label_rows, target_labels
from tests.support.host_syncs import HostSyncs


def test_labels_of_the_target_come_from_the_row_before():
    """The hidden state of row p predicts p + 10: row p is labelled 10 + (p - 1)."""
    last_hidden, head = torch.eye(8), torch.zeros(20, 8)
    head[torch.arange(8) + 10, torch.arange(8)] = 1.0
    # samples 0..3 and 4..7; row 4 opens the second
    mask = np.array([0, 1, 1, 1, 1, 1, 0, 1], np.uint8)
    rows = label_rows(mask, np.array([0, 4, 8], np.int32))
    assert rows.tolist() == [2, 3, 5]
    with HostSyncs() as syncs:
        labels = target_labels(last_hidden, head, torch.from_numpy(rows))
    assert labels.tolist() == [-1, -1, 11, 12, -1, 14, -1, -1]
    assert syncs.found == []


def test_what_makes_the_host_wait_is_found():
    with HostSyncs() as syncs:
        torch.ones(3).nonzero()
        torch.ones(3)[torch.ones(3) > 0]
        torch.ones(3)[torch.tensor([0])].sum().item()
    assert len(syncs.found) == 3


def test_samples_without_tokens_at_the_end_label_nothing():
    assert label_rows(np.array([1, 1], np.uint8), np.array([0, 2, 2], np.int32)).tolist() == [1]
    assert label_rows(np.zeros(0, np.uint8), np.array([0, 0], np.int32)).tolist() == []
