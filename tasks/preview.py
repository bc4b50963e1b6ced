"""Samples as text: supervised tokens, and the anchors that are drawn in the first epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from dflash_core.config import RunConfig
from dflash_core.data.preview import pieces


def choose(lengths: np.ndarray, num_samples: int) -> list[int]:
    """Return indices of samples spread over the lengths, from the shortest to the longest."""
    order = np.argsort(lengths, kind="stable")
    positions = np.linspace(0, len(order) - 1, min(num_samples, len(order)))
    return [int(order[round(position)]) for position in positions]


def render_sample(store: Any, row: int, tokenizer: Any, config: RunConfig, *, marks: bool = False) -> Text:
    """Return one sample as text: context is dim, supervised text green, the anchors of epoch 0 underlined.

    Args:
        store: token store.
        row: the sample's row in the store.
        tokenizer: decodes the token ids.
        config: settings that decide the anchors.
        marks: put supervised text between brackets too, for terminals without colours.
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
    is_anchor = np.zeros(len(token_ids), dtype=bool)
    is_anchor[anchors] = True
    # The position makes the styles of neighbouring anchors differ, so that each is a separate piece.
    styles = [
        f"{'green' if supervised else 'dim'}{f' underline {i}' if anchor else ''}"
        for i, (supervised, anchor) in enumerate(zip(loss_mask, is_anchor))
    ]
    inside = False
    for piece, style in pieces(token_ids, styles, tokenizer.decode):
        if marks and inside != (inside := str(style).startswith("green")):
            text.append("\u27e6" if inside else "\u27e7")
        text.append(piece, style=" ".join(str(style).split()[:2]))
    return text.append("\u27e7") if marks and inside else text


def file_rows(pointers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the name of each file, and its counts of rows, of rejected rows and of remarks by text."""
    rows = []
    for shard in pointers:
        lines = [f"{shard['format']}: {shard['num_samples']:,} samples of {shard['num_rows']:,} rows"]
        lines += [f"{count:,} rejected: {reason}" for reason, count in shard["rejects"].items()]
        lines += [f"{count:,} kept: {note}" for note, count in shard["notes"].items()]
        rows.append((shard["source"], "\n".join(lines)))
    return rows


def show_samples(store: Any, tokenizer: Any, config: RunConfig, num_samples: int) -> list[int]:
    """Print samples; return their rows in the store."""
    rows = choose(store.lengths, num_samples)
    console = Console()
    has_colours = console.color_system is not None
    if has_colours:
        console.print("supervised tokens are green, anchors of the first epoch underlined, context is dim")
    else:
        console.print("supervised tokens stand between \u27e6 and \u27e7")
    for row in rows:
        console.print(render_sample(store, row, tokenizer, config, marks=not has_colours), highlight=False)
        console.rule()
    return rows
