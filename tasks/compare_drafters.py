"""Task `compare-drafters`: two or more drafters on the same target and prompts, with paired differences.

The figures come from the evaluations' records (`dflash_core/decoding/paired.py`); here they are rendered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import RunConfig
from dflash_core.decoding.paired import ALL, compare_records
from dflash_core.files import complete_file, content_digest, publish_directory, write_json
from dflash_core.redaction import redacted_exceptions
from tasks.evaluate import RECORDS
from tasks.reporting import evaluation_tables, mlflow_client, tables
from tasks.reporting import prefect_artifacts as artifacts
from tasks.storage import run_directory as runs
from tasks.storage.pointers import EvaluationPointer, root_of
from tasks.storage.stages import PUBLISH_SECONDS, RETRY_IO

HEADER = ("second - first", "prompt set", "prompts", "first", "second", "difference (95%)")
FIGURES = {"acceptance_length": "Acceptance length", "speedup": "Speed-up, one prompt at a time"}


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A drafter of the comparison and its evaluation."""

    name: str
    directory: str
    pointer: EvaluationPointer

    @property
    def figures(self) -> Mapping[str, Any]:
        return self.pointer["evaluation"]


def names_of(directories: Sequence[Path], storage_root: Path) -> list[str]:
    """Return a name per drafter: its path in the storage root, elsewhere its directory; numbered if equal."""
    names: list[str] = []
    for directory in directories:
        run = directory.parent if directory.name == "drafter" else directory
        name = run.relative_to(storage_root).as_posix() if run.is_relative_to(storage_root) else run.name
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names


@task(
    name="compare-drafters",
    task_run_name="comparison of drafters",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=PUBLISH_SECONDS,
    **RETRY_IO,
)
@redacted_exceptions()
def compare_drafters(config: RunConfig, evaluated: list[Evaluated]) -> dict[str, Any]:
    """Write comparison-<key>/report.json, report.md and plots, and send them to MLflow and Prefect."""
    root = root_of(config)
    records = [_read_records(root / one.pointer["path"] / RECORDS) for one in evaluated]
    comparison = summarise(config, evaluated, records)
    key = content_digest([one.pointer["key"] for one in evaluated])
    directory = root / config.deployment / f"comparison-{key[: runs.KEY_CHARACTERS]}"
    with publish_directory(directory / "plots") as plots:
        draw(evaluated, plots)
    text = to_markdown(comparison)
    with complete_file(directory / "report.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    write_json(directory / "report.json", comparison)
    runs.point_latest(directory)
    artifacts.page("report", config.deployment, text, directory, "comparison of drafters")
    for one in evaluated:
        _log_to_mlflow(config, one, directory)
    get_run_logger().info("comparison: %s", directory / "report.md")
    return comparison | {"directory": str(directory)}


def _read_records(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def summarise(
    config: RunConfig, evaluated: Sequence[Evaluated], records: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the evaluations, and the paired differences of every two drafters, as JSON types."""
    pairs = itertools.combinations(range(len(evaluated)), 2)
    return {
        "deployment": config.deployment,
        "target": config.target.name,
        "drafters": [
            {"name": one.name, "directory": one.directory, "evaluation": dict(one.figures)}
            for one in evaluated
        ],
        "differences": [
            {
                "first": evaluated[a].name,
                "second": evaluated[b].name,
                "sets": compare_records(records[a], records[b]),
            }
            for a, b in pairs
        ],
    }


def verdict(pair: Mapping[str, Any]) -> str:
    """Return the pooled difference of two drafters in one sentence."""
    found = pair["sets"][ALL]["acceptance_length"]
    first, second = pair["first"], pair["second"]
    if found is None or found["interval"] is None:
        return f"{second} against {first}: too few prompts for an interval."
    low, high = found["interval"]
    if low <= 0 <= high:
        return f"No difference in acceptance length between {second} and {first} is shown: {_signed(found)}."
    better, worse = (second, first) if found["difference"] > 0 else (first, second)
    return f"{better} is accepted longer than {worse}: {second} - {first} = {_signed(found)}."


def _signed(found: Mapping[str, Any] | None) -> str:
    """Return a difference with its sign and interval: `+0.210 (95%: +0.100 to +0.320)`."""
    if found is None:
        return "-"
    interval = " to ".join(f"{value:+.3f}" for value in found["interval"] or ())
    return f"{found['difference']:+.3f}" + (f" (95%: {interval})" if interval else "")


def difference_rows(comparison: Mapping[str, Any], figure: str) -> list[list[str]]:
    """Return one row per two drafters and prompt set, in the columns of `HEADER`; sums as fractions."""
    rows = []
    for pair in comparison["differences"]:
        for name, of_set in pair["sets"].items():
            if (found := of_set[figure]) is not None:
                sides = [_side(found[side], found[f"{side}_sums"]) for side in ("first", "second")]
                names = f"{pair['second']} - {pair['first']}"
                rows.append([names, name, tables.show(found["prompts"]), *sides, _signed(found)])
    return rows


def _side(value: float, sums: Sequence[float]) -> str:
    """Return a ratio and its sums: `1.500 = 300 / 200`; of a speed-up, tokens and seconds of both ways."""
    if len(sums) == 2:
        return f"{value:.3f} = {sums[0]:,.0f} / {sums[1]:,.0f}"
    plain, speculative = (f"{t:,.0f} / {s:.1f} s" for t, s in (sums[:2], sums[2:]))
    return f"{value:.3f} = ({speculative}) / ({plain})"


def drafter_table(comparison: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per drafter."""
    header = ["drafter", "steps", "acceptance length (95%)", "by position", "lossless", "one at a time"]
    rows = []
    for one in comparison["drafters"]:
        figures = one["evaluation"]
        rows.append(
            [
                one["name"],
                tables.show(figures["steps"]),
                evaluation_tables.acceptance_text(figures),
                evaluation_tables.positions_text(figures),
                tables.show(figures["lossless"]),
                evaluation_tables.speed_text(figures["one_at_a_time"]),
            ]
        )
    return header, rows


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the text of report.md."""
    directories = [f"- {one['name']}: `{one['directory']}`" for one in comparison["drafters"]]
    protocol = evaluation_tables.protocol_text(comparison["drafters"][0]["evaluation"])
    parts = [
        f"# {comparison['deployment']}",
        "\n".join(f"- **{verdict(pair)}**" for pair in comparison["differences"]),
        tables.markdown_table(*drafter_table(comparison)),
        "\n".join(directories),
        "![acceptance](plots/acceptance.png) ![by position](plots/positions.png)",
    ]
    for figure, title in FIGURES.items():
        if rows := difference_rows(comparison, figure):
            parts += [f"## {title}, paired differences", tables.markdown_table(HEADER, rows)]
    parts.append(
        f"All drafters decoded the same prompts of {comparison['target']}. Protocol of the first: "
        f"{protocol}. Acceptance length = emitted tokens / steps; speed-up = (speculative tokens / seconds) "
        "/ (plain tokens / seconds), where every drafter has its own plain decoding, in turns. Intervals "
        "draw prompts, for both drafters the same."
    )
    return "\n\n".join(parts) + "\n"


def draw(evaluated: Sequence[Evaluated], directory: Path) -> None:
    """Draw the acceptance lengths and the acceptance by position of all drafters."""
    from tasks.reporting import plots

    lengths = {one.name: one.figures["acceptance_length"] for one in evaluated}
    intervals = {one.name: tuple(one.figures["acceptance_interval"]) for one in evaluated}
    title, axis = "Acceptance length, 95% interval", "tokens per verification"
    plots.bars_with_intervals(directory / "acceptance.png", title, axis, lengths, intervals)
    rates = {one.name: one.figures["acceptance_by_position"] for one in evaluated}
    plots.acceptance_by_position(directory / "positions.png", rates)


def _log_to_mlflow(config: RunConfig, one: Evaluated, directory: Path) -> None:
    """Record a drafter of the comparison as an MLflow run of the comparison's group."""
    place = directory / "drafters" / artifacts.slug(one.name)
    place.mkdir(parents=True, exist_ok=True)
    mlflow_client.log_summary(
        config,
        mlflow_client.run_of_directory(config, place, one.name),
        metrics={
            "final/acceptance_length": one.figures["acceptance_length"],
            **evaluation_tables.mlflow_metrics(one.figures),
        },
        tags={
            "deployment": config.deployment,
            "experiment_group": config.tracking.group or config.deployment,
            "drafter": one.directory,
        },
        artifacts=[
            (directory / "report.md", "comparison"),
            (directory / "report.json", "comparison"),
            (directory / "plots", "comparison/plots"),
        ],
    )
