"""Supervision, weights, labels and metrics: 8-token samples that can be checked by eye."""

import math
from dataclasses import replace

import pytest
import torch

from dflash_core.config import ObjectiveConfig
from dflash_core.errors import UserError
from dflash_core.objective.labels import supervised_slots
from dflash_core.objective.loss import LossSums
from dflash_core.objective.weights import decay_gamma, decay_weights, dpace_weights
from dflash_core.target.labels import target_labels
from tests.support.drafter_cases import assert_sums_close, make_case, make_drafter, run


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


def test_stop_at_disagreement_of_a_microbatch():
    case, drafter = make_case(), make_drafter()
    labels = case.token_ids.clone()
    # only the block at row 2 has slots after row 3: rows 4 and 5
    labels[3] += 1
    objective = ObjectiveConfig(labels="target", stop_at_disagreement=True)
    sums = run(drafter, case, objective, labels_T=labels)
    # [0, 12, 7, 6] without the stop
    assert sums.count_K.tolist() == [0, 12, 6, 5]
    with pytest.raises(UserError, match="objective.stop_at_disagreement"):
        ObjectiveConfig(stop_at_disagreement=True)


def test_supervision_counts_of_a_microbatch():
    """The five samples of `make_case`: 2 3 6 | 1 4 5 | 3 | none | 0 1 4 5 10, block size 4."""
    sums = run(make_drafter(), make_case(), ObjectiveConfig())
    assert sums.count_K.tolist() == [0, 12, 7, 6]
    assert (int(sums.num_blocks), int(sums.num_slots)) == (12, 48)
    w = [1, math.exp(-1 / 2), math.exp(-2 / 2)]  # gamma 2 for block size 4
    assert float(sums.weight_sum) == pytest.approx(12 * w[0] + 7 * w[1] + 6 * w[2])


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


def test_labels_of_the_target_come_from_the_row_before():
    """The hidden state of row p predicts p + 10: row p is labelled 10 + (p - 1)."""
    last_hidden, head = torch.eye(8), torch.zeros(20, 8)
    head[torch.arange(8) + 10, torch.arange(8)] = 1.0
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 0, 1])  # samples 0..3 and 4..7; row 4 opens the second
    labels = target_labels(last_hidden, head, mask, torch.tensor([0, 4, 8]))
    assert labels.tolist() == [-1, -1, 11, 12, -1, 14, -1, -1]


def test_labels_of_the_target_are_used_and_may_be_given():
    case, drafter = make_case(), make_drafter()
    objective = ObjectiveConfig(labels="target")
    labels = target_labels(case.last_hidden, case.ends.head_VD, case.loss_mask, case.cu_seqlens)
    computed = run(drafter, case, objective, backward=False)
    given = run(drafter, case, objective, backward=False, labels_T=labels)
    assert_sums_close(given, computed)
    data = run(drafter, case, ObjectiveConfig(), backward=False)
    assert abs(computed.loss() - data.loss()) > 1e-3
    same = run(drafter, case, objective, backward=False, labels_T=case.token_ids)
    assert_sums_close(same, data)


def test_acceptance_length_by_hand():
    """Three blocks with 2, 0 and 1 leading correct slots: 1 + 3 / 3 = 2; variance 5/3 - 1 = 2/3."""
    zeros = LossSums.zeros(4)
    counts = {"accepted_sum": 3, "accepted_square_sum": 5, "num_blocks": 3}
    sums = replace(zeros, **{name: torch.tensor(count) for name, count in counts.items()})
    length, low, high = sums.simulated_acceptance_length()
    assert length == 2
    assert high - length == pytest.approx(1.96 * math.sqrt(2 / 9))
    assert length - low == pytest.approx(high - length)
    assert zeros.simulated_acceptance_length() == (1.0, 1.0, 1.0)


def test_acceptance_counts_the_leading_correct_slots():
    """All logits equal, so id 0 is drafted everywhere; blocks 0 0 5 | 5 0 0 | 0 after their anchors."""
    case, drafter = make_case().samples(0, 1), make_drafter()
    case.token_ids[:] = torch.tensor([4, 4, 4, 0, 0, 5, 0, 0])
    case.anchors = torch.tensor([2, 4, 6], dtype=torch.int32)
    case.ends.head_VD.zero_()
    sums = run(drafter, case, ObjectiveConfig())
    assert sums.correct_K.tolist() == [0, 2, 2, 1]
    assert int(sums.accepted_sum) == 2 + 0 + 1
    assert int(sums.accepted_square_sum) == 4 + 0 + 1
    assert sums.accuracy_K() == pytest.approx([0, 2 / 3, 1, 1 / 2])


def test_loss_is_the_logarithm_of_the_vocabulary_when_all_logits_are_equal():
    case, drafter = make_case(), make_drafter()
    case.ends.head_VD.zero_()
    for weighting in ("decay", "dpace"):
        sums = run(drafter, case, ObjectiveConfig(weighting=weighting))
        assert sums.loss() == pytest.approx(math.log(61), rel=1e-6)
