"""Artifacts of a flow run in Prefect's UI: tables, pages and links.

Every artifact is also a file under the storage root or a figure in MLflow: nothing is lost with Prefect's
database.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

IMAGE = re.compile(r"!\[([^]]*)\]\(([^)]+\.png)\)")


def slug(text: str) -> str:
    """Return lower-case letters, digits and dashes only, as Prefect requires of a key."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "run"


def with_images(markdown: str, directory: Path) -> str:
    """Embed the PNG files that a Markdown text names, since a page in the UI cannot read them.

    Names are relative to `directory`; a file that does not exist, or lies elsewhere, stays a link.
    """

    def embed(match: re.Match[str]) -> str:
        path = directory / match[2]
        if not path.is_file() or not path.resolve().is_relative_to(directory.resolve()):
            return match[0]
        return f"![{match[1]}](data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()})"

    return IMAGE.sub(embed, markdown)


def table(key: str, deployment: str, rows: list[dict[str, Any]], description: str) -> None:
    """Publish a table under `<key>-<deployment>`."""
    create_table_artifact(rows, key=f"{key}-{slug(deployment)}", description=description)


def page(key: str, deployment: str, markdown: str, directory: Path, description: str) -> None:
    """Publish a Markdown page under `<key>-<deployment>`, with the plots that lie in `directory`."""
    text = with_images(markdown, directory)
    create_markdown_artifact(text, key=f"{key}-{slug(deployment)}", description=description)


def link(key: str, deployment: str, url: str, text: str) -> None:
    """Publish a link under `<key>-<deployment>`."""
    create_link_artifact(url, link_text=text, key=f"{key}-{slug(deployment)}", description=text)
