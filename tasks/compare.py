"""Task `compare`: one report, with plots and MLflow metrics, over all runs of a comparison.

The figures come from `dflash_core/run_statistics.py`; here they are read from run directories and rendered.
"""

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

from dflash_core import run_statistics
from dflash_core.config import RunConfig
from dflash_core.files import complete_file, content_digest, publish_directory, write_json
from dflash_core.redaction import redacted_exceptions
from dflash_core.run_statistics import RunMetrics
from tasks import report
from tasks.plans import Lengths, lengths_of, load_plan
from tasks.reporting import evaluation_tables, mlflow_client, tables
from tasks.reporting import prefect_artifacts as artifacts
from tasks.storage import run_directory as runs
from tasks.storage.pointers import Dataset, EdgesPointer, PlanPointer, TrainedRun
from tasks.storage.stages import PUBLISH_SECONDS, RETRY_IO

# Column of the report: figure.
SHOWN = {
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
    "tokens per step": "tokens_per_step",
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
    """One run of a comparison: its plans, training and evaluation as their stages returned them."""

    strategy: str
    seed: int
    plans: list[PlanPointer]
    trained: TrainedRun
    evaluation: dict[str, Any]
    # Of capture and drafter, by the calibrated cost model.
    predicted_seconds: float | None
    # See `read_initial_loss`.
    initial: dict[str, Any] | None


def read_initial_loss(run_dir: Path) -> dict[str, Any] | None:
    """Return the loss of a run's initial weights over its first epoch, and the digest of the anchors.

    None for a run that resumed within that epoch.
    """
    path = run_dir / "initial_loss.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    get_run_logger().warning("%s: loss of the initial weights not checked, the run was resumed", run_dir)
    return None


def step_composition(plan: Any, lengths: Lengths) -> NDArray[np.float64]:
    """Return the share of each source in the samples of each step: float64 [steps, sources].

    Two steps with sources 0 0 1 and 1 1: [[2/3, 1/3], [0, 1]].
    """
    sources = lengths.source_id[plan.order].astype(np.int64)
    step_of_sample = np.repeat(plan.step_of_microbatch().astype(np.int64), plan.samples_per_microbatch)
    shares = np.zeros((plan.num_steps, int(lengths.source_id.max(initial=0)) + 1))
    np.add.at(shares, (step_of_sample, sources), 1.0)
    return shares / shares.sum(axis=1, keepdims=True)


def read_metrics(result: Result, plans: Sequence[Any], lengths: Lengths) -> RunMetrics:
    """Read a run's metrics and the composition of its steps; `plans` are the epochs it trained on."""
    shares = np.concatenate([step_composition(plan, lengths) for plan in plans])
    epochs = np.concatenate([np.full(plan.num_steps, epoch) for epoch, plan in enumerate(plans)])
    lines = runs.read_metrics(Path(result.trained["run_dir"]))
    return run_statistics.read_run(result.strategy, result.seed, lines, shares, epochs)


def report_comparison(
    config: RunConfig, dataset: Dataset, edges: EdgesPointer, results: list[Result]
) -> dict[str, Any]:
    """Write the comparison's report; print its tables and the recommendation."""
    lengths, epochs = lengths_of(config, dataset.shards), config.training.epochs
    metrics = [
        read_metrics(result, [load_plan(config, plan) for plan in result.plans[:epochs]], lengths)
        for result in results
    ]
    comparison = write_comparison(config, results, metrics, edges["edges"])
    for title, columns in (("throughput and batches", SHOWN), ("training", TRAINED)):
        tables.print_wide_table(f"{config.deployment}: {title}", *table(comparison, columns))
    rows = [("", comparison["recommendation"]), ("report", f"{comparison['directory']}/report.md")]
    tables.print_table("recommendation", rows)
    return comparison


@task(
    name="compare",
    task_run_name="comparison",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=PUBLISH_SECONDS,
    **RETRY_IO,
)
@redacted_exceptions()
def write_comparison(
    config: RunConfig, results: list[Result], metrics: list[RunMetrics], edges: list[int]
) -> dict[str, Any]:
    """Write comparison-<key>/report.json, report.md and plots, and link `latest` to them."""
    comparison = summarise(results, metrics) | {
        "deployment": config.deployment,
        "edges": edges,
        "anchors_equal": anchors_equal(results),
        "runs": {f"{r.strategy} seed {r.seed}": r.trained["mlflow_run_id"] for r in results},
    }
    key = content_digest(sorted(r.trained["key"] for r in results))
    directory = Path(config.storage_root).resolve() / config.deployment / f"comparison-{key[:12]}"
    with publish_directory(directory / "plots") as plots:
        draw(comparison, metrics, plots)
    text = to_markdown(comparison)
    with complete_file(directory / "report.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    write_json(directory / "report.json", comparison)
    runs.point_latest(directory)
    artifacts.page("report", config.deployment, text, directory, comparison["recommendation"])
    recorded = {(m.strategy, m.seed): m for m in metrics}
    for result in results:
        mlflow_client.log_summary(
            config,
            result.trained["mlflow_run_id"],
            metrics=run_metrics(
                comparison["strategies"][result.strategy],
                result,
                recorded[result.strategy, result.seed],
                level=comparison["loss_level"],
                window=run_statistics.last_window(metrics),
            ),
            artifacts=[
                (directory / "report.md", "comparison"),
                (directory / "report.json", "comparison"),
                (directory / "plots", "comparison/plots"),
            ],
        )
    get_run_logger().info("comparison: %s", directory / "report.md")
    return comparison | {"directory": str(directory)}


def summarise(results: Sequence[Result], metrics: Sequence[RunMetrics]) -> dict[str, Any]:
    """Return the figures of `run_statistics.summarise`, and predicted / measured seconds of each strategy."""
    by_run = {(r.strategy, r.seed): r for r in results}
    comparison = run_statistics.summarise(
        metrics,
        report.plan_figures({r.strategy: r.plans for r in results}),
        {key: r.trained["summary"] for key, r in by_run.items()},
        {key: r.evaluation for key, r in by_run.items()},
        {key: r.initial["loss"] for key, r in by_run.items() if r.initial is not None},
    )
    for strategy, row in comparison["strategies"].items():
        row["predicted_to_measured"] = predicted_to_measured([r for r in results if r.strategy == strategy])
    return comparison


def predicted_to_measured(results: Sequence[Result]) -> float | None:
    """Return predicted seconds / seconds spent in capture and drafter, over all seeds; None where unknown."""
    predicted = [r.predicted_seconds for r in results if r.predicted_seconds is not None]
    summaries = [r.trained["summary"] for r in results]
    spent = sum(s.get(part, 0.0) for s in summaries for part in ("capture_seconds", "drafter_seconds"))
    return sum(predicted) / spent if len(predicted) == len(results) and spent else None


def anchors_equal(results: Sequence[Result]) -> bool | None:
    """Check that all runs of a seed had the same samples and anchors in epoch 0; None if unchecked."""
    digests: dict[int, set[str]] = {}
    for result in results:
        if result.initial is None:
            return None
        digests.setdefault(result.seed, set()).add(result.initial["anchor_digest"])
    return all(len(distinct) == 1 for distinct in digests.values())


def run_metrics(
    row: dict[str, Any], result: Result, run: RunMetrics, *, level: float, window: int
) -> dict[str, float]:
    """Return the summary metrics of one run, for sorting in MLflow.

    Args:
        row: figures of its strategy, means over the seeds.
        level, window: as in `run_statistics.steps_to_reach`.
    """
    evaluation = result.evaluation
    validation = result.trained["summary"].get("validation_last") or {}
    figures = {
        "loss_last": float(np.nanmean(run.loss[-window:])),
        "validation_loss": validation.get("validation/loss"),
        "acceptance_length": evaluation.get("acceptance_length"),
        "steps_to_level": run_statistics.steps_to_reach(run.loss, level, window),
        "throughput_ratio_to_sorted": row.get("throughput_ratio_to_sorted"),
        **{n: v for n, v in run_statistics.throughput(run).items() if n.endswith("tokens_per_second")},
        **run_statistics.loss_statistics(run),
    }
    metrics = {
        **{f"final/{name}": value for name, value in figures.items()},
        **report.plan_metrics(report.plan_figures({result.strategy: result.plans})[result.strategy]),
        **evaluation_tables.mlflow_metrics(evaluation),
    }
    return {name: float(value) for name, value in metrics.items() if value is not None and np.isfinite(value)}


def table(comparison: dict[str, Any], columns: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per strategy."""
    rows = [
        [strategy, *(tables.show(row.get(figure)) for figure in columns.values())]
        for strategy, row in comparison["strategies"].items()
    ]
    return ["strategy", *columns], rows


def to_markdown(comparison: dict[str, Any]) -> str:
    """Return the text of a comparison's report.md."""
    seeds, edges = (", ".join(map(str, comparison[name])) for name in ("seeds", "edges"))
    parts = [
        f"# {comparison['deployment']}",
        f"**{comparison['recommendation']}**",
        f"Seeds: {seeds}. Bucket edges: {edges}.",
        "## Throughput and batches",
        tables.markdown_table(*table(comparison, SHOWN)),
        "Throughput leaves out the first steps of runs with more than six; tokens are real tokens, never "
        "slots. Capture and drafter are each measured alone. Predicted seconds are those of the cost model, "
        "calibrated before training on a few microbatches of this data on this machine. Mixing 1 is as good "
        "as random samples.",
        "![throughput](plots/throughput.png) ![efficiency](plots/efficiency_by_strategy.png)",
        "## Training",
        tables.markdown_table(*table(comparison, TRAINED)),
        f"Level: loss {tables.show(comparison['loss_level'])}, which every run reaches at its end.",
        "\n".join(f"- {line}" for line in _checks(comparison)),
        "![loss by samples](plots/loss_samples.png) ![loss by time](plots/loss_seconds.png)",
        "![acceptance](plots/acceptance.png)",
        "## Does composition make the loss swing?",
        tables.markdown_table(*table(comparison, STATISTICS)),
        "Within each epoch the step loss is regressed on a cubic trend, then on that, the step's mean length "
        "and its source shares. R2 is the share of the swings around the trend that length and sources "
        "explain; the lag-1 autocorrelation of the residual shows clusters of similar steps. `-`: too few "
        "steps per epoch for a regression.",
    ]
    return "\n\n".join(parts) + "\n"


def _checks(comparison: dict[str, Any]) -> list[str]:
    """Return one sentence per condition of a fair comparison."""
    verdict = ", so they are ranked." if comparison["ranked"] else ": too much for a ranking."
    anchors = {True: "the same for all.", False: "NOT the same.", None: "not checked."}
    level, spread = comparison["initial_loss_level"], comparison["initial_loss_spread"]
    initial = ": not checked."
    if spread is not None:
        initial = f" over the epoch: {tables.show(level, 5)}, largest relative difference {spread:.1e}."
    tokens = f"{comparison['tokens_per_step_spread']:.2%}"
    return [
        f"Real tokens per step differ by {tokens} between strategies{verdict}",
        f"Samples and anchors of an epoch: {anchors[comparison['anchors_equal']]}",
        f"Mean loss of the initial weights{initial}",
    ]


def draw(comparison: dict[str, Any], metrics: Sequence[RunMetrics], directory: Path) -> None:
    """Draw all plots of a comparison."""
    from tasks.reporting import plots

    rows = comparison["strategies"]
    efficiency = {name: row["padding_efficiency"] for name, row in rows.items()}
    plots.efficiency_by_strategy(directory / "efficiency_by_strategy.png", efficiency)
    rates = {name: row["tokens_per_second"] for name, row in rows.items()}
    plots.bars_with_intervals(directory / "throughput.png", "Throughput", "real tokens/s", rates, {})
    lengths = {name: row["acceptance_length"] for name, row in rows.items() if row["acceptance_length"]}
    intervals = {name: tuple(rows[name]["acceptance_interval"]) for name in lengths}
    title, axis = "Acceptance length, 95% interval", "tokens per verification"
    plots.bars_with_intervals(directory / "acceptance.png", title, axis, lengths, intervals)
    for axis in ("samples", "seconds"):
        bands = {
            strategy: [(np.cumsum(getattr(m, axis)), m.loss) for m in metrics if m.strategy == strategy]
            for strategy in rows
        }
        plots.loss_bands(directory / f"loss_{axis}.png", bands, axis)
