"""Batches: bucket edges, cut, order, plans and what they cost. Pure functions of sequence lengths; no
torch.
"""

from dflash_core.batching.buckets import EdgeCurve, edge_curve, edges_of_lengths, optimal_edges
from dflash_core.batching.cost import REFERENCE, CostModel, Work
from dflash_core.batching.metrics import plan_metrics
from dflash_core.batching.plan import BatchPlan, build_plan
from dflash_core.config import BatchingConfig

__all__ = [
    "REFERENCE",
    "BatchPlan",
    "BatchingConfig",
    "CostModel",
    "EdgeCurve",
    "Work",
    "build_plan",
    "edge_curve",
    "edges_of_lengths",
    "optimal_edges",
    "plan_metrics",
]
