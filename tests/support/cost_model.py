"""A cost model with constants that a person can multiply."""

from __future__ import annotations

from dflash_core.batching.cost import CostModel

MODEL = CostModel(
    capture_slot=1e-3,
    capture_pair=1e-6,
    capture_token=5e-5,
    capture_microbatch=0.1,
    train_token=2e-4,
    train_draft_slot=3e-4,
    train_draft_pair=0.0,
    train_microbatch=0.05,
)
