"""What a flow run shows in Prefect's UI: tables, links, reports. The pages come and go; files under the storage root
stay.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

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
IMAGE = re.compile(r"!\[([^]]*)\]\(([^)]+\.png)\)")


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes: what Prefect takes for a key."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "run"


def with_images(markdown: str, directory: Path) -> str:
    """`markdown` with the PNG files that it names, relative to `directory`, within it: a page elsewhere cannot read
    them.
    """

    def embed(found: re.Match[str]) -> str:
        path = directory / found[2]
        if not path.is_file():
            return found[0]
        return f"![{found[1]}](data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()})"

    return IMAGE.sub(embed, markdown)


def source_rows(profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The length profile: a row a source and one for all."""
    rows = [*profile["sources"], {"source": "all", **profile["stats"]}]
    return [
        {"source": row["source"]} | {n.replace("_", " "): _rounded(row[n]) for n in PROFILE_FIGURES}
        for row in rows
    ]


def bucket_rows(lengths: Sequence[int], counts: Sequence[int], edges: Sequence[int]) -> list[dict[str, Any]]:
    """What lies in each bucket: samples longer than the edge before and up to its own.

    Lengths 3 and 8, two samples each, edges 0, 4, 8: rows of 2 samples with 6 and 16 tokens.
    """
    rows = []
    for low, high in zip(edges, edges[1:]):
        here = [(n, count) for n, count in zip(lengths, counts) if low < n <= high]
        samples, tokens = sum(count for _, count in here), sum(n * count for n, count in here)
        filled = round(tokens / (samples * high), 4) if samples else None  # of rows as wide as the bucket
        rows.append(
            {"longer than": low, "up to": high, "samples": samples, "tokens": tokens, "filled": filled}
        )
    return rows


def plan_rows(figures: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row a strategy."""
    return [
        {"strategy": strategy} | {n.replace("_", " "): _rounded(found.get(n)) for n in names}
        for strategy, found in figures.items()
    ]


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def table(key: str, deployment: str, rows: list[dict[str, Any]], description: str) -> None:
    """A table of this flow run, under `<key>-<deployment>`."""
    create_table_artifact(rows, key=f"{key}-{slug(deployment)}", description=description)


def report(key: str, deployment: str, markdown: str, directory: Path, description: str) -> None:
    """A Markdown report of this flow run with the plots that lie beside it."""
    create_markdown_artifact(
        with_images(markdown, directory), key=f"{key}-{slug(deployment)}", description=description
    )


def link(key: str, deployment: str, url: str, text: str) -> None:
    """A link of this flow run."""
    create_link_artifact(url, link_text=text, key=f"{key}-{slug(deployment)}", description=text)
