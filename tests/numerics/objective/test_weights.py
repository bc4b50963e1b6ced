"""Weights of the positions of a block, checked by hand."""

import math

import pytest
import torch

from dflash_core.objective.weights import decay_gamma, decay_weights, dpace_weights


def test_decay_weights():
    weights = decay_weights(8, None)
    assert weights.tolist() == pytest.approx([0, 1] + [math.exp(-k / 4) for k in range(1, 7)])
    assert decay_weights(3, 0.5).tolist() == pytest.approx([0, 1, math.exp(-2)])
    assert [decay_gamma(b) for b in (4, 8, 10, 13, 16, 32)] == [2, 4, 5, 6, 7, 14]


def test_dpace_weights_by_hand():
    """p = 1/2 1/2 1/2: products 1/2 1/4 1/8 -> 7/8 3/8 1/8. With alpha 1/2, q = 3/4: 3/4 9/16 27/64."""
    log_prob = torch.tensor([[0.0, 0.5, 0.5, 0.5]] * 2).log().nan_to_num(neginf=0)
    supervised = torch.tensor([[False, True, True, True], [False, True, False, False]])
    assert dpace_weights(log_prob, supervised, 0.0).tolist() == [[0, 7 / 8, 3 / 8, 1 / 8], [0, 1 / 2, 0, 0]]
    three = [111 / 64, 63 / 64, 27 / 64]
    assert dpace_weights(log_prob, supervised, 0.5).tolist() == [[0, *three], [0, 3 / 4, 0, 0]]


def test_dpace_weights_are_detached_and_count_the_slots_when_all_is_certain():
    """p = 1: the weight of slot j is the number of slots from j on."""
    log_prob = torch.zeros(1, 5, requires_grad=True)
    weights = dpace_weights(log_prob, torch.tensor([[False, True, True, True, True]]), 0.5)
    assert weights.tolist() == [[0, 4, 3, 2, 1]]
    assert not weights.requires_grad
