"""Answers of a serving engine, made by hand."""

from __future__ import annotations

from typing import Any


def engine_answer(emitted: list[list[int]], steps: int, accepted: list[int], **more: Any) -> dict[str, Any]:
    """Return an answer whose metrics count `steps`, and accepted drafts by position."""
    metrics = {
        "steps": steps,
        "drafted": 3 * steps,
        "accepted": sum(accepted),
        "accepted_by_position": accepted,
    }
    return {"emitted": emitted, "metrics": metrics, "version": "0", "seconds": 2.0} | more
