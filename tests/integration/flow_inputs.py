"""Small settings and data for tests that run whole flows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "batching": {"strategy": "packed", "token_budget": 512, "tokens_per_step": 512, "num_buckets": 4},
    "drafter": {"num_layers": 1, "block_size": 4, "target_layer_ids": [1, 2], "mask_token_id": 3},
    "objective": {"num_anchors": 8},
    "training": {"epochs": 1, "device": "cpu", "num_validation_samples": 4, "validate_every": 1000},
    "evaluation": {"num_prompts": 2, "max_new_tokens": 8},
}


def write_rows(path: Path, num_rows: int, *, seed: int) -> None:
    """A JSONL file of conversations of very different lengths."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for i in range(num_rows):
            body = "\n".join(
                f"def area_{j}(a): return a * {rng.randint(0, 99)}" for j in range(rng.choice([1, 2, 6]))
            )
            messages = [
                {"role": "user", "content": f"Write function {i} of {seed}"},
                {"role": "assistant", "content": body},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
