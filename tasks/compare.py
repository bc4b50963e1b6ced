"""The comparison's own task: one report over all runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash_core import run_statistics as comparison
from dflash_core.config import RunConfig, from_dict
from dflash_core.files import content_digest, write_json
from tasks import report
from tasks.plans import Lengths
from tasks.reporting import mlflow_client, tables
from tasks.reporting import prefect_artifacts as artifacts
from tasks.storage import run_directory as runs
from tasks.storage.stages import PUBLISH_SECONDS, RETRY_IO

SHOWN = {  # column of the report: figure
    "real tokens/s": "tokens_per_second",
    "to sorted": "throughput_ratio_to_sorted",
    "capture tokens/s": "capture_tokens_per_second",
    "drafter tokens/s": "drafter_tokens_per_second",
    "predicted / measured seconds": "predicted_to_measured",
    "padding efficiency": "padding_efficiency",
    "mixing, microbatch": "mixing_microbatch",
    "mixing, step": "mixing_step",
    "pairs that meet again": "repeated_pair_share",
}
TRAINED = {
    "updates": "updates",
    "samples": "samples",
    "tokens a step": "tokens_per_step",
    "initial loss": "initial_loss",
    "last loss": "loss_last",
    "validation loss": "validation_loss",
    "steps to level": "steps_to_level",
    "acceptance": "acceptance_length",
    "95% interval": "acceptance_interval",
    "lossless": "lossless",
}
STATISTICS = {
    "variance of step loss": "loss_variance",
    "around its trend": "loss_variance_around_trend",
    "explained by composition (R2)": "r2_composition",
    "lag-1 of the rest": "residual_lag1",
    "variance of gradient norm": "grad_norm_variance",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a comparison knows of one run."""

    strategy: str
    seed: int
    plans: list[dict[str, Any]]
    trained: dict[str, Any]
    evaluation: dict[str, Any]
    predicted_seconds: float | None  # of capture and drafter, by the calibrated cost model
    initial: dict[str, Any] | None


def read_initial_loss(run_dir: Path) -> dict[str, Any] | None:
    """What a run found for its first weights over its first epoch; None for one that resumed within it."""
    kept = run_dir / "initial_loss.json"
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    get_run_logger().warning("%s: loss of the first weights not checked, the run was resumed", run_dir)
    return None


def step_composition(plan: Any, lengths: Lengths) -> NDArray[np.float64]:
    """Share of each source in the samples of each step: float64 [steps, sources].

    Two steps with sources 0 0 1 and 1 1: [[2/3, 1/3], [0, 1]].
    """
    sources = lengths.source_id[plan.order].astype(np.int64)
    step_of_sample = np.repeat(plan.step_of_microbatch().astype(np.int64), plan.samples_per_microbatch)
    shares = np.zeros((plan.num_steps, int(lengths.source_id.max(initial=0)) + 1))
    np.add.at(shares, (step_of_sample, sources), 1.0)
    return shares / shares.sum(axis=1, keepdims=True)


def read_metrics(result: Result, plans: Sequence[Any], lengths: Lengths) -> comparison.RunMetrics:
    """A run's metrics beside the composition of its steps; `plans` are the epochs that it trained on."""
    shares = np.concatenate([step_composition(plan, lengths) for plan in plans])
    epochs = np.concatenate([np.full(plan.num_steps, epoch) for epoch, plan in enumerate(plans)])
    lines = runs.read_metrics(Path(result.trained["run_dir"]))
    return comparison.read_run(result.strategy, result.seed, lines, shares, epochs)


@task(
    name="compare",
    task_run_name="comparison",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=PUBLISH_SECONDS,
    **RETRY_IO,
)
def write_comparison(
    config: dict[str, Any], results: list[Result], metrics: list[comparison.RunMetrics], edges: list[int]
) -> dict[str, Any]:
    """Writes comparison-<key>/report.json, report.md and plots, and links `latest` to them."""
    settings: RunConfig = from_dict(RunConfig, config)
    by_run = {(r.strategy, r.seed): r for r in results}
    recorded = {(m.strategy, m.seed): m for m in metrics}
    found = comparison.summarise(
        metrics,
        report.plan_figures({r.strategy: r.plans for r in results}),
        {key: r.trained["summary"] for key, r in by_run.items()},
        {key: r.evaluation for key, r in by_run.items()},
        {key: r.initial["loss"] for key, r in by_run.items() if r.initial is not None},
    )
    for strategy, row in found["strategies"].items():
        row["predicted_to_measured"] = predicted_to_measured([r for r in results if r.strategy == strategy])
    found |= {
        "deployment": settings.deployment,
        "edges": edges,
        "anchors_equal": anchors_equal(results),
        "runs": {f"{s} seed {n}": r.trained["mlflow_run_id"] for (s, n), r in by_run.items()},
    }
    key = content_digest(sorted(r.trained["key"] for r in results))
    directory = Path(settings.storage_root).resolve() / settings.deployment / f"comparison-{key[:12]}"
    (directory / "plots").mkdir(parents=True, exist_ok=True)
    draw(found, metrics, directory / "plots")
    text = to_markdown(found)
    (directory / "report.md").write_text(text, encoding="utf-8")
    write_json(directory / "report.json", found)
    runs.point_latest(directory)
    artifacts.page("report", settings.deployment, text, directory, found["recommendation"])
    for result in results:
        mlflow_client.log_summary(
            settings,
            result.trained["mlflow_run_id"],
            metrics=run_metrics(
                found["strategies"][result.strategy],
                result,
                recorded[result.strategy, result.seed],
                level=found["loss_level"],
                window=comparison.last_window(metrics),
            ),
            artifacts=[
                (directory / "report.md", "comparison"),
                (directory / "report.json", "comparison"),
                (directory / "plots", "comparison/plots"),
            ],
        )
    get_run_logger().info("comparison: %s", directory / "report.md")
    return found | {"directory": str(directory)}


def predicted_to_measured(results: Sequence[Result]) -> float | None:
    """Seconds by the cost model over seconds spent in capture and drafter, means over seeds."""
    predicted = [r.predicted_seconds for r in results if r.predicted_seconds is not None]
    summaries = [r.trained["summary"] for r in results]
    spent = sum(s.get(part, 0.0) for s in summaries for part in ("capture_seconds", "drafter_seconds"))
    return sum(predicted) / spent if len(predicted) == len(results) and spent else None


def anchors_equal(results: Sequence[Result]) -> bool | None:
    """Whether all runs of a seed had the same samples with the same anchors in the first epoch."""
    digests: dict[int, set[str]] = {}
    for result in results:
        if result.initial is None:
            return None
        digests.setdefault(result.seed, set()).add(result.initial["anchor_digest"])
    return all(len(found) == 1 for found in digests.values())


def run_metrics(
    row: dict[str, Any], result: Result, run: comparison.RunMetrics, *, level: float, window: int
) -> dict[str, float]:
    """Summary metrics of one run, for sorting in MLflow; `row` is its strategy's, means over the seeds."""
    evaluation = result.evaluation
    validation = result.trained["summary"].get("validation_last") or {}
    figures = {
        "loss_last": float(np.nanmean(run.loss[-window:])),
        "validation_loss": validation.get("validation/loss"),
        "acceptance_length": evaluation.get("acceptance_length"),
        "steps_to_level": comparison.steps_to_reach(run.loss, level, window),
        "throughput_ratio_to_sorted": row.get("throughput_ratio_to_sorted"),
        **{n: v for n, v in comparison.throughput(run).items() if n.endswith("tokens_per_second")},
        **comparison.loss_statistics(run),
    }
    found = {
        **{f"final/{name}": value for name, value in figures.items()},
        **report.plan_metrics(report.plan_figures({result.strategy: result.plans})[result.strategy]),
        **report.acceptance_metrics(evaluation),
    }
    return {name: float(value) for name, value in found.items() if value is not None and np.isfinite(value)}


def table(found: dict[str, Any], columns: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Header and one row a strategy."""
    rows = [
        [strategy, *(tables.show(row.get(figure)) for figure in columns.values())]
        for strategy, row in found["strategies"].items()
    ]
    return ["strategy", *columns], rows


def to_markdown(found: dict[str, Any]) -> str:
    """report.md of a comparison."""
    spread = found["initial_loss_spread"]
    checks = [
        f"Real tokens per step differ by {found['tokens_per_step_spread']:.2%} between strategies"
        + (", so they are ranked." if found["ranked"] else ": too much for a ranking."),
        "Samples and anchors of an epoch: "
        + {True: "the same for all.", False: "NOT the same.", None: "not checked."}[found["anchors_equal"]],
        f"Mean loss of the initial weights over the epoch: {tables.show(found['initial_loss_level'], 5)}, "
        f"largest relative difference {spread:.1e}."
        if spread is not None
        else "Mean loss of the initial weights: not checked.",
    ]
    parts = [
        f"# {found['deployment']}",
        f"**{found['recommendation']}**",
        f"Seeds: {', '.join(map(str, found['seeds']))}. Bucket edges: {', '.join(map(str, found['edges']))}.",
        "## Throughput and batches",
        tables.markdown_table(*table(found, SHOWN)),
        "Throughput leaves out the first steps of runs of more than six; tokens are real tokens, never slots. "
        "Capture and drafter are "
        "each measured alone. Predicted seconds are those of the cost model, calibrated before training on a few "
        "microbatches of this data on this machine. Mixing 1 is as good as random samples.",
        "![throughput](plots/throughput.png) ![efficiency](plots/efficiency_by_strategy.png)",
        "## Training",
        tables.markdown_table(*table(found, TRAINED)),
        f"Level: loss {tables.show(found['loss_level'])}, which every run reaches at its end.",
        "\n".join(f"- {line}" for line in checks),
        "![loss by samples](plots/loss_samples.png) ![loss by time](plots/loss_seconds.png)",
        "![acceptance](plots/acceptance.png)",
        "## Does composition make the loss swing?",
        tables.markdown_table(*table(found, STATISTICS)),
        "Within each epoch the step loss is regressed on a cubic trend, then on it, the step's mean "
        "length and its source shares. R2 is the share of the swings around the trend that length and "
        "sources explain; the lag-1 autocorrelation of the rest shows clusters of similar steps. `-`: too few "
        "steps an epoch for a regression.",
    ]
    return "\n\n".join(parts) + "\n"


def draw(found: dict[str, Any], metrics: Sequence[comparison.RunMetrics], directory: Path) -> None:
    """All plots of a comparison."""
    from tasks.reporting import plots

    rows = found["strategies"]
    plots.efficiency_by_strategy(
        directory / "efficiency_by_strategy.png",
        {name: row["padding_efficiency"] for name, row in rows.items()},
    )
    plots.bars_with_intervals(
        directory / "throughput.png",
        "Throughput",
        "real tokens/s",
        {name: row["tokens_per_second"] for name, row in rows.items()},
        {},
    )
    lengths = {name: row["acceptance_length"] for name, row in rows.items() if row["acceptance_length"]}
    intervals = {name: tuple(rows[name]["acceptance_interval"]) for name in lengths}
    plots.bars_with_intervals(
        directory / "acceptance.png",
        "Acceptance length, 95% interval",
        "tokens a verification",
        lengths,
        intervals,
    )
    for name, axis in (("samples", "samples"), ("seconds", "seconds")):
        bands = {
            strategy: [(np.cumsum(getattr(m, axis)), m.loss) for m in metrics if m.strategy == strategy]
            for strategy in rows
        }
        plots.loss_bands(directory / f"loss_{name}.png", bands, axis)
