"""Stage `edges`: bucket edges by dynamic programming over the length histogram."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_core.config import BatchingConfig
from tasks.length_profile import read_profile
from tasks.storage.stages import stage

CURVE_BUCKETS = 64  # efficiency is shown for every number of buckets up to this


def edges_inputs(profile: dict[str, Any], batching: BatchingConfig) -> dict[str, Any]:
    """Return the inputs of the stage, by content: new data with equal lengths changes nothing."""
    return {
        "histogram_digest": profile["histogram_digest"],
        "token_budget": batching.token_budget,
        "num_buckets": batching.num_buckets,
        "shapes": batching.shapes,
        "given": None if batching.edges is None else list(batching.edges),
    }


@stage(
    "edges",
    version=1,
    sources=("dflash_core.batching.buckets",),
    key_only=("histogram_digest",),
    locations=("profile_directory",),
)
def bucket_edges(
    out: Path,
    *,
    token_budget: int,
    num_buckets: int,
    shapes: str,
    given: list[int] | None,
    profile_directory: str,
) -> dict[str, Any]:
    """Write edges.json (edges, efficiency against the number of buckets, the knee) and two plots."""
    from dflash_core.batching.buckets import edge_curve
    from tasks.reporting import plots

    histogram = read_profile(Path(profile_directory))
    curve = edge_curve(
        histogram["lengths"],
        histogram["counts"],
        max_buckets=max(CURVE_BUCKETS, num_buckets),
        token_budget=token_budget,
        shapes=shapes,  # type: ignore[arg-type]
    )
    chosen = min(num_buckets, len(curve.edges))
    edges = given or [int(edge) for edge in curve.edges[chosen - 1]]
    shown = min(CURVE_BUCKETS, len(curve.efficiency))
    result: dict[str, Any] = {
        "edges": edges,
        "given": given is not None,
        "expected_efficiency": None if given else float(curve.efficiency[chosen - 1]),
        "knee": curve.knee,
        "num_buckets": list(range(1, shown + 1)),
        "efficiency": [float(value) for value in curve.efficiency[:shown]],
    }
    (out / "edges.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plots.length_histogram(out / "lengths.png", histogram["lengths"], histogram["counts"], edges)
    plots.efficiency_against_buckets(
        out / "efficiency.png", result["num_buckets"], result["efficiency"], len(edges) - 1, curve.knee
    )
    return {"edges": edges, "expected_efficiency": result["expected_efficiency"], "knee": curve.knee}
