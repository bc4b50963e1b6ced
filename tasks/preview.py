"""Samples as text: what is supervised, where blocks may start, where they start in the first epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from dflash_core.config import RunConfig
from dflash_core.data.preview import pieces


def choose(lengths: np.ndarray, num_samples: int) -> list[int]:
    """Samples spread over the lengths: shortest, longest and those between; indices into `lengths`."""
    order = np.argsort(lengths, kind="stable")
    positions = np.linspace(0, len(order) - 1, min(num_samples, len(order)))
    return [int(order[round(position)]) for position in positions]


def render_sample(store: Any, row: int, tokenizer: Any, config: RunConfig, *, marks: bool = False) -> Text:
    """One sample: dim what is only context, green what is supervised, underlined the anchors of epoch 0.

    `marks` puts supervised text between two brackets as well, for places without colours.
    """
    from dflash_core.anchors import draw_anchors, eligible_positions

    token_ids, loss_mask = store.token_ids(row), store.loss_mask(row)
    anchors = draw_anchors(
        loss_mask,
        num_anchors=config.objective.num_anchors,
        seed=config.training.seed,
        epoch=0,
        sample_id=store.sample_id(row),
    )
    text = Text()
    text.append(
        f"sample {row}, source {store.sources[store.source_id[row]]}: {len(token_ids)} tokens, "
        f"{int(loss_mask.sum())} supervised, {len(eligible_positions(loss_mask))} eligible anchors, "
        f"{len(anchors)} drawn, {'validation' if store.is_validation[row] else 'training'}\n",
        style="bold",
    )
    starts = np.zeros(len(token_ids), dtype=bool)
    starts[anchors] = True
    styles = [
        f"{'green' if supervised else 'dim'}{f' underline {i}' if start else ''}"
        for i, (supervised, start) in enumerate(zip(loss_mask, starts))
    ]
    inside = False
    for piece, style in pieces(token_ids, styles, tokenizer.decode):
        if marks and inside != (inside := str(style).startswith("green")):
            text.append("\u27e6" if inside else "\u27e7")
        text.append(piece, style=" ".join(str(style).split()[:2]))
    return text.append("\u27e7") if marks and inside else text


def file_rows(pointers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What became of each file: its name, and counts of rows, rejected rows and remarks by text."""
    rows = []
    for found in pointers:
        lines = [f"{found['format']}: {found['num_samples']:,} samples of {found['num_rows']:,} rows"]
        lines += [f"{count:,} rejected: {reason}" for reason, count in found["rejects"].items()]
        lines += [f"{count:,} kept: {note}" for note, count in found["notes"].items()]
        rows.append((found["source"], "\n".join(lines)))
    return rows


def show_samples(store: Any, tokenizer: Any, config: RunConfig, num_samples: int) -> list[int]:
    """Prints samples; returns their rows."""
    rows = choose(store.lengths, num_samples)
    console = Console()
    colours = console.color_system is not None
    console.print(
        "supervised tokens are green, anchors of the first epoch underlined, context is dim"
        if colours
        else "supervised tokens stand between \u27e6 and \u27e7"
    )
    for row in rows:
        console.print(render_sample(store, row, tokenizer, config, marks=not colours), highlight=False)
        console.rule()
    return rows
