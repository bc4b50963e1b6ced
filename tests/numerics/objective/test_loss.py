"""Loss, metrics and labels of a microbatch that can be checked by eye."""

import math
from dataclasses import replace

import pytest
import torch

from dflash_core.config import ObjectiveConfig
from dflash_core.errors import UserError
from dflash_core.objective.loss import LossSums
from tests.support.drafter_cases import assert_sums_close, make_case, make_drafter, run


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


def test_labels_of_the_target_replace_the_datas_tokens():
    case, drafter = make_case(), make_drafter()
    objective = ObjectiveConfig(labels="target")
    sums = run(drafter, case, objective, backward=False)
    data = run(drafter, case, ObjectiveConfig(), backward=False)
    assert abs(sums.loss() - data.loss()) > 1e-3
    # where the target's labels are the data's tokens
    equal = run(drafter, case, objective, backward=False, labels_T=case.token_ids)
    assert_sums_close(equal, data)


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
