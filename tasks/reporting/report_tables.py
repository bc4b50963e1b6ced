"""Rows and Markdown of the reports: data, plans, training, acceptance.

A row is a pair (name, text) for `tables.print_table`, or a mapping column -> value for a table in Prefect's
UI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.reporting.tables import markdown_table, show

PROFILE_FIGURES = (
    "num_samples",
    "num_tokens",
    "num_supervised_tokens",
    "mean_length",
    "median_length",
    "p90_length",
    "p99_length",
    "max_length",
)
# Rows of a table by source.
SHOWN_SOURCES = 100
PLAN_FIGURES = (
    "padding_efficiency",
    "num_microbatches",
    "mixing_microbatch",
    "mixing_step",
    "repeated_pair_share",
)
LENGTH_FIGURES = ("min_length", "median_length", "mean_length", "p90_length", "p99_length", "max_length")


def source_rows(profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the length profile: a row for each of the `SHOWN_SOURCES` largest sources, and one for all."""
    rows, num_more = profile["sources"], len(profile["sources"]) - SHOWN_SOURCES
    if num_more > 0:
        largest = sorted(rows, key=lambda row: -row["num_tokens"])[:SHOWN_SOURCES]
        rows = [*largest, {"source": f"{num_more:,} more, in profile.json"}]
    rows = [*rows, {"source": "all", **profile["stats"]}]
    return [{"source": row["source"]} | _columns(row, PROFILE_FIGURES) for row in rows]


def target_check_rows(check: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per way in which a target was compared with the model alone."""
    return [
        {
            "path": path,
            "largest relative difference": None if difference is None else float(f"{difference:.2g}"),
            "allowed": check["tolerance"],
            "used": check["reasons"].get(path, "yes"),
        }
        for path, difference in check["differences"].items()
    ]


def bucket_rows(lengths: Sequence[int], counts: Sequence[int], edges: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row per bucket: its samples are longer than the previous edge and up to its own.

    Lengths 3 and 8, two samples each, with edges 0, 4, 8: rows of 2 samples with 6 and 16 tokens.
    """
    rows = []
    for low, high in zip(edges, edges[1:]):
        bucket = [(length, count) for length, count in zip(lengths, counts) if low < length <= high]
        samples, tokens = sum(count for _, count in bucket), sum(length * count for length, count in bucket)
        # Share of rows that are as wide as the bucket.
        filled = round(tokens / (samples * high), 4) if samples else None
        rows.append(
            {"longer than": low, "up to": high, "samples": samples, "tokens": tokens, "filled": filled}
        )
    return rows


def plan_rows(figures: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per strategy, with the figures that are named."""
    return [{"strategy": strategy} | _columns(values, names) for strategy, values in figures.items()]


def _columns(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    rounded = {n: round(v, 4) if isinstance(v, float) else v for n, v in values.items()}
    return {name.replace("_", " "): rounded.get(name) for name in names}


def over_length_text(data: Mapping[str, Any]) -> str:
    """Return the number of rows over data.max_length, and the share of all tokens that it costs.

    Rows that were too long to be encoded count with the tokens that they have at least.
    """
    lost = data.get("num_over_length_tokens") or 0
    share = lost / max(lost + data["num_tokens"], 1)
    return f"{show(data.get('num_over_length'))}, at least {share:.1%}" if lost else "0, 0.0%"


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a run's report for the terminal."""
    data, train, validation = report["dataset"], report["train"], report["validation"]
    plan = report["plans"][report["strategy"]]
    return [
        ("samples, tokens", f"{show(data['num_samples'])}, {show(data['num_tokens'])}"),
        ("rows rejected, exact repeats kept", f"{show(data['num_rejected'])}, {show(data['num_repeats'])}"),
        ("rows over data.max_length, tokens lost by it", over_length_text(data)),
        ("strategy, padding efficiency", f"{report['strategy']}, {show(plan['padding_efficiency'], 4)}"),
        ("steps, samples seen", f"{steps_text(train)}, {show(train['samples'])}"),
        ("real tokens/s", show(train["tokens_per_second"], 0)),
        ("training loss", f"{show(train['loss_first'])} -> {show(train['loss_last'])}"),
        ("validation loss", f"{show(validation['loss_first'])} -> {show(validation['loss_last'])}"),
        *evaluation_rows(report["evaluation"]),
        *serving_rows(report.get("serve_check")),
        ("MLflow run", str(report["mlflow_run_id"])),
    ]


def steps_text(train: Mapping[str, Any]) -> str:
    """Return the number of steps, next to that of the plans where a time limit left some out."""
    steps, planned = train["steps"], train.get("planned_steps") or train["steps"]
    if steps == planned:
        return show(steps)
    return f"{show(steps)} of {show(planned)} (training.max_minutes {train['max_minutes']:g})"


def evaluation_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of an evaluation for the terminal."""
    plain, speculative = (
        show(evaluation.get(f"{kind}_tokens_per_second"), 1) for kind in ("baseline", "speculative")
    )
    return [
        ("target runs with", show(evaluation.get("target_mode"))),
        ("acceptance length (95% interval)", _acceptance_text(evaluation)),
        ("output equals the target's own", show(evaluation.get("lossless"))),
        ("decoding, tokens/s: plain, speculative", f"{plain}, {speculative}"),
    ]


def acceptance_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the acceptance length of each prompt set, of each category, and of all prompts pooled."""
    groups = {**(evaluation.get("sets") or {}), **(evaluation.get("categories") or {}), "all": evaluation}
    return [(f"acceptance length, {name}", _acceptance_text(group)) for name, group in groups.items()]


def _acceptance_text(group: Mapping[str, Any]) -> str:
    length, interval = show(group.get("acceptance_length")), show(group.get("acceptance_interval"))
    return f"{length} ({interval}) on {show(group.get('prompts'))} prompts"


def serving_rows(serve_check: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the row of a serve check, if there is one; serve_check.md has the rest."""
    if serve_check is None:
        return []
    compared = serve_check["comparison"]
    engine, evaluator = (show(compared[f"{side}_acceptance_length"]) for side in ("engine", "evaluator"))
    verdict = "agree" if serve_check["passed"] else "; ".join(serve_check["failures"])
    name = f"acceptance length in {serve_check['engine']}, evaluator on the same text"
    return [(name, f"{engine}, {evaluator}: {verdict}")]


def plans_table(plans: Mapping[str, Mapping[str, float]]) -> str:
    """Return efficiency and mixing of each strategy as Markdown, one row per strategy."""
    header = ["strategy", *(name.replace("_", " ") for name in PLAN_FIGURES)]
    rows = [
        [strategy, *(show(figures.get(name), 4) for name in PLAN_FIGURES)]
        for strategy, figures in plans.items()
    ]
    return markdown_table(header, rows)


def all_plan_figures(plans: Mapping[str, Mapping[str, float]]) -> str:
    """Return every plan metric as Markdown, one row per metric and one column per strategy."""
    names = dict.fromkeys(name for figures in plans.values() for name in figures)
    rows = [
        [name.replace("_", " "), *(show(figures.get(name), 4) for figures in plans.values())]
        for name in names
    ]
    return markdown_table(["", *plans], rows)


def to_markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md."""
    data, plans = report["dataset"], report["plans"]
    lengths = [show(data.get(name), 1) for name in LENGTH_FIGURES]
    parts = [
        f"# {report['deployment']}: {report['strategy']}",
        _pairs_table(summary_rows(report)),
        "## Data",
        markdown_table([name.replace("_", " ") for name in LENGTH_FIGURES], [lengths]),
        "Rejected rows:\n\n" + _counts_table("reason", data["rejects"]),
        "Remarks on rows that were kept:\n\n" + _counts_table("remark", data["notes"]),
        "![lengths](plots/lengths.png)",
        f"## Batches\n\nBucket edges: {', '.join(map(str, report['edges']))}. Mixing is the variance of the "
        "mean length between microbatches or steps over its value for samples drawn at random: 1 is as good "
        "as random.",
        plans_table(plans),
        "All figures of the plans (`dflash_core/batching/metrics.py`):",
        all_plan_figures(plans),
        "![efficiency by strategy](plots/efficiency_by_strategy.png) ![efficiency](plots/efficiency.png)",
        "## Training\n\n![loss](plots/loss.png)",
        "## Acceptance",
        _pairs_table(acceptance_rows(report["evaluation"])),
        "![acceptance by position](plots/acceptance.png)",
        f"Run `{report['run_key']}`, MLflow run `{report['mlflow_run_id']}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _pairs_table(rows: Sequence[tuple[str, str]]) -> str:
    return markdown_table(["", ""], [list(row) for row in rows])


def _counts_table(name: str, counts: Mapping[str, int]) -> str:
    """Return the number of rows by reason or remark."""
    if not counts:
        return "None."
    return markdown_table([name, "rows"], [[text, show(count)] for text, count in counts.items()])
