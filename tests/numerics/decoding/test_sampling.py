"""The acceptance rules, greedy by hand and sampled against exact probabilities."""

from __future__ import annotations

import numpy as np
import torch

from dflash_core.decoding.sampling import accept_greedy, accept_sampled


def test_accept_greedy_by_hand() -> None:
    drafts = torch.tensor([[5, 7, 9], [1, 7, 4], [5, 7, 4]])
    accepted, bonus = accept_greedy(drafts, torch.tensor([[5, 7, 4, 8]] * 3))
    assert accepted.tolist() == [2, 0, 3]
    assert bonus.tolist() == [4, 5, 8]


def test_sampled_acceptance_keeps_the_targets_distribution() -> None:
    """Three tokens of a five-word Markov chain; each emitted token has the distribution of the chain."""
    rng = np.random.default_rng(0)
    chain = torch.tensor(rng.dirichlet(np.full(5, 0.7), size=5))  # next word given the last
    draft = torch.tensor(rng.dirichlet(np.full(5, 0.7), size=2))  # slots drafted without knowing each other
    n = 200_000
    drafts = torch.stack([torch.tensor(rng.choice(5, size=n, p=q / q.sum())) for q in draft.numpy()], dim=1)
    target_probs = torch.stack([chain[0].expand(n, 5), chain[drafts[:, 0]], chain[drafts[:, 1]]], dim=1)
    accepted, bonus = accept_sampled(
        drafts, draft.expand(n, 2, 5), target_probs, torch.tensor(rng.random((n, 3)))
    )
    tokens = torch.cat([drafts, torch.zeros(n, 1, dtype=torch.int64)], dim=1)
    tokens[torch.arange(n), accepted] = bonus
    first = torch.bincount(tokens[:, 0], minlength=5) / n
    torch.testing.assert_close(first, chain[0].float(), atol=0.005, rtol=0)
    checked = 0
    for slot in (1, 2):
        for word in range(5):
            next_words = tokens[(accepted >= slot) & (tokens[:, slot - 1] == word), slot]
            if len(next_words) > 3000:
                share = torch.bincount(next_words, minlength=5) / len(next_words)
                torch.testing.assert_close(share, chain[word].float(), atol=0.035, rtol=0)
                checked += 1
    assert checked >= 5
    # The chance of acceptance is the overlap of the two distributions
    overlap = float(torch.minimum(chain[0], draft[0]).sum())
    assert abs(float((accepted > 0).double().mean()) - overlap) < 0.005
