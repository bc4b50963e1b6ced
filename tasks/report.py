"""The report of a run: one JSON, one Markdown file with plots, one table for the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import RunConfig, from_dict
from dflash_core.files import content_digest, write_json
from tasks.reporting import mlflow_client
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting.tables import markdown_table, show
from tasks.storage.stages import PUBLISH_SECONDS, RETRY_IO

PLAN_FIGURES = (
    "padding_efficiency",
    "num_microbatches",
    "mixing_microbatch",
    "mixing_step",
    "repeated_pair_share",
)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are complete, in order."""
    try:
        text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    found = [(int(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def plan_figures(plans: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """All of each strategy's plan metrics, means over the epochs that were planned; what compares with the
    epoch before from the second epoch on.
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
    """The data set in figures: rejected rows by reason, and what was done to rows that were kept (`notes`)."""
    return {
        **stats,
        "num_files": len(ingested),
        "num_rejected": sum(pointer["num_rejected"] for pointer in ingested),
        "num_repeats": num_repeats,
        "rejects": counts_of(ingested, "rejects"),
        "notes": counts_of(ingested, "notes"),
    }


def counts_of(ingested: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """`rejects` or `notes` of all files, most frequent first."""
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
    trained: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> dict[str, Any]:
    """report.json: everything that a reader compares between runs."""
    lines = read_metrics(Path(trained["run_dir"]))
    losses, validation = series(lines, "train/loss")[1], series(lines, "validation/loss")[1]
    return {
        "deployment": config.deployment,
        "strategy": config.batching.strategy,
        "run_key": trained["key"],
        "target": config.target.name,
        "dataset": dict(dataset),
        "edges": list(edges),
        "plans": plan_figures(plans),
        "train": {
            **train_figures(trained["summary"]),
            "loss_first": _first(losses),
            "loss_last": _last(losses),
        },
        "validation": {"loss_first": _first(validation), "loss_last": _last(validation)},
        "evaluation": dict(evaluation),
        "serve_check": _read_serve_check(Path(trained["run_dir"])),
        "mlflow_run_id": trained["mlflow_run_id"],
    }


def _read_serve_check(run_dir: Path) -> dict[str, Any] | None:
    """What `serve-check` has found for this run's drafter, if it ran."""
    try:
        return json.loads((run_dir / "serve_check.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def add_serve_check(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Puts the comparison with the engine into the run's report, where there is one."""
    written = run_dir / "report.json"
    if written.exists():
        report = json.loads(written.read_text(encoding="utf-8")) | {"serve_check": dict(result)}
        (run_dir / "report.md").write_text(to_markdown(report), encoding="utf-8")
        write_json(written, report)


def train_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Counts and rates of a training, from its summary.json."""
    names = (
        "steps",
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
    return {name: summary.get(name) for name in names}


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the terminal shows: name and text."""
    data, train, evaluation = report["dataset"], report["train"], report["evaluation"]
    plan = report["plans"][report["strategy"]]
    return [
        ("samples, tokens", f"{show(data['num_samples'])}, {show(data['num_tokens'])}"),
        ("rows rejected, exact repeats kept", f"{show(data['num_rejected'])}, {show(data['num_repeats'])}"),
        ("strategy, padding efficiency", f"{report['strategy']}, {show(plan['padding_efficiency'], 4)}"),
        ("steps, samples seen", f"{show(train['steps'])}, {show(train['samples'])}"),
        ("real tokens/s", show(train["tokens_per_second"], 0)),
        ("training loss", f"{show(train['loss_first'])} -> {show(train['loss_last'])}"),
        (
            "validation loss",
            f"{show(report['validation']['loss_first'])} -> {show(report['validation']['loss_last'])}",
        ),
        *evaluation_rows(evaluation),
        *serving_rows(report.get("serve_check")),
        ("MLflow run", str(report["mlflow_run_id"])),
    ]


def evaluation_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the terminal shows of an evaluation."""
    return [
        (
            "acceptance length (95% interval)",
            f"{show(evaluation.get('acceptance_length'))} ({show(evaluation.get('acceptance_interval'))}) "
            f"on {show(evaluation.get('prompts'))} prompts",
        ),
        ("output equals the target's own", show(evaluation.get("lossless"))),
        (
            "decoding, tokens/s: plain, speculative",
            f"{show(evaluation.get('baseline_tokens_per_second'), 1)}, "
            f"{show(evaluation.get('speculative_tokens_per_second'), 1)}",
        ),
    ]


def acceptance_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Acceptance length of each prompt set, each category, and all prompts pooled."""
    groups = {**(evaluation.get("sets") or {}), **(evaluation.get("categories") or {}), "all": evaluation}
    return [
        (
            f"acceptance length, {name}",
            f"{show(found.get('acceptance_length'))} ({show(found.get('acceptance_interval'))}) "
            f"on {show(found.get('prompts'))} prompts",
        )
        for name, found in groups.items()
    ]


def serving_rows(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What a report shows of a serve check; serve_check.md has the rest."""
    if found is None:
        return []
    compared = found["comparison"]
    lengths = f"{show(compared['engine_acceptance_length'])}, {show(compared['evaluator_acceptance_length'])}"
    verdict = "agree" if found["passed"] else "; ".join(found["failures"])
    return [(f"acceptance length in {found['engine']}, evaluator on the same text", f"{lengths}: {verdict}")]


def plans_table(plans: Mapping[str, Mapping[str, float]]) -> str:
    """Efficiency and mixing of each strategy as Markdown."""
    header = ["strategy", *(name.replace("_", " ") for name in PLAN_FIGURES)]
    rows = [
        [strategy, *(show(figures.get(name), 4) for name in PLAN_FIGURES)]
        for strategy, figures in plans.items()
    ]
    return markdown_table(header, rows)


def all_plan_figures(plans: Mapping[str, Mapping[str, float]]) -> str:
    """Every metric of `plan_metrics`, a row each, a strategy a column."""
    names = dict.fromkeys(name for figures in plans.values() for name in figures)
    rows = [
        [name.replace("_", " "), *(show(figures.get(name), 4) for figures in plans.values())]
        for name in names
    ]
    return markdown_table(["", *plans], rows)


def to_markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    data = report["dataset"]
    rejected, notes = (
        markdown_table([head, "rows"], [[text, show(n)] for text, n in data[name].items()])
        if data[name]
        else "None."
        for head, name in (("reason", "rejects"), ("remark", "notes"))
    )
    lengths = ("min_length", "median_length", "mean_length", "p90_length", "p99_length", "max_length")
    parts = [
        f"# {report['deployment']}: {report['strategy']}",
        markdown_table(["", ""], [list(row) for row in summary_rows(report)]),
        "## Data",
        markdown_table([n.replace("_", " ") for n in lengths], [[show(data.get(n), 1) for n in lengths]]),
        "Rejected rows:\n\n" + rejected,
        "Remarks on rows that were kept:\n\n" + notes,
        "![lengths](plots/lengths.png)",
        f"## Batches\n\nBucket edges: {', '.join(map(str, report['edges']))}. Mixing is the variance of the "
        "mean length between microbatches or steps over its value for samples drawn at random: 1 is as good "
        "as random.",
        plans_table(report["plans"]),
        "All figures of the plans (`dflash_core/batching/metrics.py`):",
        all_plan_figures(report["plans"]),
        "![efficiency by strategy](plots/efficiency_by_strategy.png) ![efficiency](plots/efficiency.png)",
        "## Training\n\n![loss](plots/loss.png)",
        "## Acceptance",
        markdown_table(["", ""], [list(row) for row in acceptance_rows(report["evaluation"])]),
        "![acceptance by position](plots/acceptance.png)",
        f"Run `{report['run_key']}`, MLflow run `{report['mlflow_run_id']}`.",
    ]
    return "\n\n".join(parts) + "\n"


@task(
    name="report",
    task_run_name="report",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=PUBLISH_SECONDS,
    **RETRY_IO,
)
def write_report(
    config: dict[str, Any],
    *,
    dataset: dict[str, Any],
    edges: dict[str, Any],
    plans: dict[str, list[dict[str, Any]]],
    trained: dict[str, Any],
    evaluated: dict[str, Any],
    edges_directory: str,
) -> dict[str, Any]:
    """Writes report.json, report.md and plots into the run's directory, and their like to MLflow and Prefect.

    What was drawn and published before is not drawn and published again.
    """
    settings: RunConfig = from_dict(RunConfig, config)
    run_dir = Path(trained["run_dir"])
    report = build_report(
        settings,
        dataset=dataset,
        edges=edges["edges"],
        plans=plans,
        trained=trained,
        evaluation=evaluated["evaluation"],
    )
    written, text = run_dir / "report.json", to_markdown(report)
    published = run_dir / "published.json"  # after MLflow has it: a report that failed half-way is sent again
    digest = {"report": content_digest(json.dumps(report))}
    if published.exists() and json.loads(published.read_text(encoding="utf-8")) == digest:
        get_run_logger().info("report: up to date, %s", run_dir / "report.md")
        artifacts.report("report", settings.deployment, text, run_dir, "report of the run")
        return report
    draw_plots(report, run_dir, Path(edges_directory))
    (run_dir / "report.md").write_text(text, encoding="utf-8")
    write_json(written, report)
    artifacts.report("report", settings.deployment, text, run_dir, "report of the run")
    mlflow_client.log_summary(
        settings,
        trained["mlflow_run_id"],
        tags={"deployment": settings.deployment},
        metrics=final_metrics(report),
        artifacts=[
            (run_dir / "report.md", None),
            (written, None),
            (run_dir / "run.json", None),
            (run_dir / "plots", "plots"),
            (run_dir / "drafter", "drafter"),
        ],
    )
    mlflow_client.register_drafter(
        settings,
        trained["mlflow_run_id"],
        f"dflash-{settings.deployment}",
        provenance(report),
    )
    write_json(published, digest)
    return report


def provenance(report: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a registered drafter: what it was made from and what it is worth."""
    acceptance = report["evaluation"].get("acceptance_length")
    return {
        "run_key": report["run_key"],
        "target": report["target"],
        "strategy": report["strategy"],
        "deployment": report["deployment"],
        "steps": str(report["train"]["steps"]),
        "validation_loss": show(report["validation"]["loss_last"], 4),
        "acceptance_length": show(acceptance, 4),
        "lossless": show(report["evaluation"].get("lossless")),
    }


def final_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """The scalars by which runs are sorted in MLflow."""
    plan, evaluation = report["plans"][report["strategy"]], report["evaluation"]
    metrics = {
        "final/loss": report["train"]["loss_last"],
        "final/validation_loss": report["validation"]["loss_last"],
        "final/tokens_per_second": report["train"]["tokens_per_second"],
        "final/acceptance_length": evaluation.get("acceptance_length"),
        **plan_metrics(plan),
    }
    metrics |= acceptance_metrics(evaluation)
    return {name: float(value) for name, value in metrics.items() if value is not None}


def plan_metrics(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a strategy's plans by which runs are sorted; the report has them all."""
    return {"batch/mixing_step": plan.get("mixing_step")} | {f"final/{n}": plan.get(n) for n in PLAN_FIGURES}


def acceptance_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """`accept/position_1`, ...: share of blocks accepted up to each position."""
    rates = evaluation.get("acceptance_by_position") or []
    return {f"accept/position_{position}": rate for position, rate in enumerate(rates, start=1)}


def draw_plots(report: Mapping[str, Any], run_dir: Path, edges_directory: Path) -> None:
    """All plots of the report into `plots/`."""
    import shutil

    from tasks.reporting import plots

    directory = run_dir / "plots"
    directory.mkdir(exist_ok=True)
    for name in ("lengths.png", "efficiency.png"):
        shutil.copyfile(edges_directory / name, directory / name)
    efficiency = {strategy: figures["padding_efficiency"] for strategy, figures in report["plans"].items()}
    plots.efficiency_by_strategy(directory / "efficiency_by_strategy.png", efficiency)
    lines = read_metrics(run_dir)
    curves = {"training": series(lines, "train/loss"), "validation": series(lines, "validation/loss")}
    plots.loss_curves(directory / "loss.png", {k: v for k, v in curves.items() if v[0]}, "optimizer step")
    by_set = {
        name: found["acceptance_by_position"]
        for name, found in (report["evaluation"].get("sets") or {}).items()
    }
    plots.acceptance_by_position(directory / "acceptance.png", by_set)
