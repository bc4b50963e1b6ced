"""Task `report`: one JSON and one Markdown file with plots per run, also published to MLflow and Prefect."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import RunConfig
from dflash_core.files import complete_file, content_digest, publish_directory, write_json
from dflash_core.redaction import redacted_exceptions
from tasks.model_card import write_card
from tasks.reporting import evaluation_tables, mlflow_client
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting.report_tables import PLAN_FIGURES, summary_rows, to_markdown
from tasks.reporting.tables import print_table, show
from tasks.storage.pointers import (
    Dataset,
    EdgesPointer,
    EvaluationPointer,
    PlanPointer,
    ProfilePointer,
    TrainedRun,
    root_of,
)
from tasks.storage.run_directory import locked, read_metrics
from tasks.storage.stages import PUBLISH_SECONDS, RETRY_IO

TRAIN_FIGURES = (
    "steps",
    "planned_steps",
    "updates",
    "samples",
    "tokens",
    "tokens_per_second",
    "train_seconds",
    "capture_seconds",
    "drafter_seconds",
    "nonfinite_steps",
    "best_step",
    "exported_step",
)

# Figures of the files that the data set's are the sums of.
SUMMED_FIGURES = ("num_rejected", "num_over_length", "num_over_length_tokens")


def metric_series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric."""
    points = [(int(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def plan_figures(plans: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return all plan metrics of each strategy: means over the epochs that have the metric.

    A metric that compares with the previous epoch exists from the second epoch on.
    """
    figures: dict[str, dict[str, float]] = {}
    for strategy, epochs in plans.items():
        metrics = [pointer["metrics"] for pointer in epochs]
        figures[strategy] = {}
        for name in dict.fromkeys(name for m in metrics for name in m):
            values = [m[name] for m in metrics if name in m]
            figures[strategy][name] = sum(values) / len(values)
    return figures


def dataset_figures(
    stats: Mapping[str, Any], ingested: Sequence[Mapping[str, Any]], *, num_repeats: int
) -> dict[str, Any]:
    """Return the figures of the data set.

    Args:
        stats: statistics of the length profile.
        ingested: one pointer per file.
        num_repeats: samples that repeat another one exactly.

    Returns:
        The statistics and counts, with rejected rows by reason (`rejects`) and kept rows by remark (`notes`).
    """
    return {
        **stats,
        "num_files": len(ingested),
        **{name: sum(pointer[name] for pointer in ingested) for name in SUMMED_FIGURES},
        "num_repeats": num_repeats,
        "rejects": counts_of(ingested, "rejects"),
        "notes": counts_of(ingested, "notes"),
    }


def counts_of(ingested: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Return `rejects` or `notes` summed over all files, most frequent first."""
    counts: Counter[str] = Counter()
    for pointer in ingested:
        counts.update(pointer[name])
    return dict(counts.most_common())


def build_report(
    config: RunConfig,
    *,
    dataset: Mapping[str, Any],
    edges: Sequence[int],
    plans: Mapping[str, Sequence[Mapping[str, Any]]],
    trained: TrainedRun,
    evaluation: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of report.json: every figure by which runs are compared."""
    run_dir, summary = Path(trained["run_dir"]), trained["summary"]
    lines = read_metrics(run_dir)
    losses, validation = metric_series(lines, "train/loss")[1], metric_series(lines, "validation/loss")[1]
    return {
        "deployment": config.deployment,
        "strategy": config.batching.strategy,
        "run_key": trained["key"],
        "target": config.target.name,
        "dataset": dict(dataset),
        "edges": list(edges),
        "plans": plan_figures(plans),
        "train": {
            **{name: summary.get(name) for name in TRAIN_FIGURES},
            "max_minutes": config.training.max_minutes,
            **_first_and_last(losses),
        },
        "validation": _first_and_last(validation),
        "evaluation": dict(evaluation),
        "serve_check": _read_serve_check(run_dir),
        "mlflow_run_id": trained["mlflow_run_id"],
    }


def _first_and_last(losses: Sequence[float]) -> dict[str, float | None]:
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return {"loss_first": first, "loss_last": last}


def _read_serve_check(run_dir: Path) -> dict[str, Any] | None:
    """Return the result of `serve-check` for this run's drafter, if it ran."""
    try:
        return json.loads((run_dir / "serve_check.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def add_serve_check(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Add the comparison with the engine to the run's report, where there is one."""
    path = run_dir / "report.json"
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8")) | {"serve_check": dict(result)}
        with complete_file(run_dir / "report.md") as temporary:
            temporary.write_text(to_markdown(report), encoding="utf-8")
        write_json(path, report)


def report_run(
    config: RunConfig,
    dataset: Dataset,
    profile: ProfilePointer,
    edges: EdgesPointer,
    plans: dict[str, list[PlanPointer]],
    trained: TrainedRun,
    evaluated: EvaluationPointer,
) -> dict[str, Any]:
    """Write report.json, report.md and plots into the run's directory, and print a table."""
    report = write_report(
        config,
        dataset=dataset_figures(profile["stats"], dataset.pointers, num_repeats=dataset.num_repeats),
        edges=edges,
        plans=plans,
        trained=trained,
        evaluated=evaluated,
        edges_directory=str(root_of(config) / edges["path"]),
    )
    title = f"{config.deployment}, run {Path(trained['run_dir']).name} ({trained['status']})"
    print_table(title, [*summary_rows(report), ("report", f"{trained['run_dir']}/report.md")])
    return report


@task(
    name="report",
    task_run_name="report",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=PUBLISH_SECONDS,
    **RETRY_IO,
)
@redacted_exceptions()
def write_report(
    config: RunConfig,
    *,
    dataset: dict[str, Any],
    edges: EdgesPointer,
    plans: Mapping[str, Sequence[Mapping[str, Any]]],
    trained: TrainedRun,
    evaluated: EvaluationPointer,
    edges_directory: str,
) -> dict[str, Any]:
    """Write report.json, report.md and plots into the run's directory, and send them to MLflow and Prefect.

    A report that is unchanged is neither drawn nor sent to MLflow again.
    """
    run_dir = Path(trained["run_dir"])
    report = build_report(
        config,
        dataset=dataset,
        edges=edges["edges"],
        plans=plans,
        trained=trained,
        evaluation=evaluated["evaluation"],
    )
    text = to_markdown(report)
    # Another flow may have been asked for the same run.
    with locked(run_dir, wait=True):
        is_new = _publish(config, report, text, run_dir=run_dir, edges_directory=Path(edges_directory))
    if not is_new:
        get_run_logger().info("report: up to date, %s", run_dir / "report.md")
    artifacts.page("report", config.deployment, text, run_dir, "report of the run")
    return report


def _publish(
    config: RunConfig, report: dict[str, Any], text: str, *, run_dir: Path, edges_directory: Path
) -> bool:
    """Write the report and its plots and send them to MLflow; return False where that was done before."""
    # Written once MLflow has the report, so that one that failed half-way is sent again.
    published, digest = run_dir / "published.json", {"report": content_digest(json.dumps(report))}
    if _is(published, digest):
        return False
    draw_plots(report, run_dir, edges_directory)
    with complete_file(run_dir / "report.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    write_json(run_dir / "report.json", report)
    write_card(run_dir, report["evaluation"])
    _publish_to_mlflow(config, report, run_dir)
    write_json(published, digest)
    return True


def _is(path: Path, contents: Mapping[str, Any]) -> bool:
    """Return True if a file holds this JSON; a damaged one does not."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == contents)
    except (OSError, ValueError):
        return False


def _publish_to_mlflow(config: RunConfig, report: Mapping[str, Any], run_dir: Path) -> None:
    """Send the final metrics and the run's files, and register the drafter."""
    # A run that MLflow has lost, with its database or by hand, is made anew.
    run_id = mlflow_client.run_of_directory(config, run_dir, f"{report['strategy']}-{config.deployment}")
    files = [(run_dir / name, None) for name in ("report.md", "report.json", "run.json")]
    mlflow_client.log_summary(
        config,
        run_id,
        tags={"deployment": config.deployment},
        metrics=final_metrics(report),
        artifacts=[*files, (run_dir / "plots", "plots"), (run_dir / "drafter", "drafter")],
    )
    mlflow_client.register_drafter(config, run_id, f"dflash-{config.deployment}", provenance(report))


def provenance(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a registered drafter: its origin and its quality."""
    evaluation = report["evaluation"]
    return {
        "run_key": report["run_key"],
        "target": report["target"],
        "strategy": report["strategy"],
        "deployment": report["deployment"],
        "steps": str(report["train"]["steps"]),
        "validation_loss": show(report["validation"]["loss_last"], 4),
        "acceptance_length": show(evaluation.get("acceptance_length"), 4),
        "speedup_one_at_a_time": show((evaluation.get("one_at_a_time") or {}).get("speedup"), 2),
        "lossless": show(evaluation.get("lossless")),
    }


def final_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars by which runs are sorted in MLflow."""
    plan, evaluation = report["plans"][report["strategy"]], report["evaluation"]
    metrics = {
        "final/loss": report["train"]["loss_last"],
        "final/validation_loss": report["validation"]["loss_last"],
        "final/tokens_per_second": report["train"]["tokens_per_second"],
        "final/acceptance_length": evaluation.get("acceptance_length"),
        **plan_metrics(plan),
        **evaluation_tables.mlflow_metrics(evaluation),
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}


def plan_metrics(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a strategy's plans by which runs are sorted; the report has them all."""
    return {"batch/mixing_step": plan.get("mixing_step")} | {f"final/{n}": plan.get(n) for n in PLAN_FIGURES}


def draw_plots(report: Mapping[str, Any], run_dir: Path, edges_directory: Path) -> None:
    """Draw all plots of the report into `plots/`; those of the edges are copied."""
    with publish_directory(run_dir / "plots") as directory:
        _draw(report, read_metrics(run_dir), directory, edges_directory)


def _draw(
    report: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], directory: Path, edges_directory: Path
) -> None:
    from tasks.reporting import plots

    for name in ("lengths.png", "efficiency.png"):
        shutil.copyfile(edges_directory / name, directory / name)
    efficiency = {strategy: figures["padding_efficiency"] for strategy, figures in report["plans"].items()}
    plots.efficiency_by_strategy(directory / "efficiency_by_strategy.png", efficiency)
    series = {
        label: metric_series(lines, f"{name}/loss")
        for label, name in (("training", "train"), ("validation", "validation"))
    }
    curves = {label: (steps, losses) for label, (steps, losses) in series.items() if steps}
    plots.loss_curves(directory / "loss.png", curves, "optimizer step")
    prompt_sets = report["evaluation"].get("sets") or {}
    acceptance = {name: figures["acceptance_by_position"] for name, figures in prompt_sets.items()}
    plots.acceptance_by_position(directory / "acceptance.png", acceptance)
