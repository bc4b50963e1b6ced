"""The batching strategies, one row per strategy: all other code reads their traits and never compares names.

To add a strategy, add its row to `STRATEGIES` and name, in `settings`, the fields of `BatchingConfig` that
decide its plans. Only where no `Grouping` fits, add one here and the groups that it forms to
`cutting._group_of_length`. Settings, forms, forecasts, comparisons and tests go over the whole table.

Imports nothing of the project, so that `dflash_core.config` can read the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What the samples of a padded microbatch have in common: nothing, their length, their length rounded up to a
# multiple of `sort_quantum`, or their bucket.
Grouping = Literal["none", "length", "rounded_length", "bucket"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Traits of one strategy. `name` is the value of `batching.strategy`, `summary` one line for people."""

    name: str
    summary: str
    grouping: Grouping
    # samples lie end to end without padding; the target must be able to run packed
    is_packed: bool = False
    # composition differs between epochs; False: only the order of microbatches does, and that order is random
    redraws: bool = True
    # fields of `BatchingConfig` that decide its plans, in addition to those that decide every plan
    settings: tuple[str, ...] = ()

    @property
    def uses_edges(self) -> bool:
        """True where bucket edges decide its plans; then no microbatch holds samples of two buckets."""
        return self.grouping == "bucket"


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="sorted",
            summary="sorted by length, always the same microbatches in a new random order: the baseline",
            grouping="length",
            redraws=False,
        ),
        Strategy(
            name="sorted_fresh",
            summary="sorted by rounded length, samples of equal rounded length drawn anew in each epoch",
            grouping="rounded_length",
            settings=("sort_quantum",),
        ),
        Strategy(
            name="random",
            summary="in random order, each microbatch padded to its longest sample",
            grouping="none",
        ),
        Strategy(
            name="bucketed",
            summary="in random order within buckets of similar length",
            grouping="bucket",
            settings=("edges", "shapes"),
        ),
        Strategy(
            name="packed",
            summary="in random order, without padding, filled to the token budget",
            grouping="none",
            is_packed=True,
            settings=("pool_size",),
        ),
    )
}
