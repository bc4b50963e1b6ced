"""Batches of an evaluation over the ranks of a torchrun world.

Batches are formed before they are shared out, so every batch is the same at any number of ranks, and every
rank gets all results: the answers to one turn are part of the prompts of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Share:
    """This process's part: items `rank`, `rank + size`, ..."""

    rank: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """Return this rank's numbers among 0..count - 1."""
        return range(self.rank, count, self.size)

    def merge(self, mine: dict[int, Any]) -> list[Any]:
        """Return the values of all ranks by their numbers, the same list on every rank."""
        boxes: list[Any] = [mine]
        if self.size > 1:
            boxes = [None] * self.size
            dist.all_gather_object(boxes, mine)
        everyone = {number: value for box in boxes for number, value in box.items()}
        return [everyone[number] for number in sorted(everyone)]


ALONE = Share()
