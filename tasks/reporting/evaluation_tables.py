"""An evaluation as sentences, tables, Markdown and MLflow metrics.

Figures of evaluations that older versions made may be missing; they show as `-`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.reporting.tables import markdown_table, show

Figures = Mapping[str, Any]
HEADER = ("prompt set", "prompts", "steps", "acceptance length (95%)", "accepted by position")


def headline(evaluation: Figures) -> str:
    """Return the speed and the acceptance by position in one sentence.

    Example: one prompt at a time: plain 45 tokens/s, speculative 72 tokens/s: 1.6 times (95%: 1.5 to 1.7);
    drafts accepted by position: 0.62, 0.31, 0.14
    """
    engine = evaluation.get("engine")
    speed = speed_text((engine or evaluation).get("one_at_a_time"))
    where = f" in {engine['name']} {engine['version']}" if engine else ""
    return f"one prompt at a time{where}: {speed}; drafts accepted by position: {positions_text(evaluation)}"


def speed_text(figures: Figures | None) -> str:
    """Return tokens per second of both decoders and their ratio with its interval; `-` without figures."""
    if not figures or figures.get("speedup") is None:
        return "-"
    plain, speculative = (figures[f"{kind}_tokens_per_second"] for kind in ("plain", "speculative"))
    return f"plain {_rate(plain)}, speculative {_rate(speculative)}: {ratio_text(figures)}"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 10 else 1}f} tokens/s"


def ratio_text(figures: Figures | None) -> str:
    """Return a speed-up with its interval: `1.60 times (95%: 1.52 to 1.71)`."""
    if not figures or figures.get("speedup") is None:
        return "-"
    interval = figures.get("speedup_interval")
    return f"{figures['speedup']:.2f} times" + (f" (95%: {show(interval, 2)})" if interval else "")


def positions_text(figures: Figures) -> str:
    """Return the share of steps that accepted the drafts up to each position."""
    return ", ".join(f"{rate:.2f}" for rate in figures.get("acceptance_by_position") or ()) or "-"


def protocol_text(evaluation: Figures) -> str:
    """Return all that figures of other evaluations have to agree in, to be compared with these."""
    protocol = evaluation.get("protocol") or {}
    parts = [
        f"{name.replace('_', ' ')} {json.dumps(value) if isinstance(value, dict) else show(value, 2)}"
        for name, value in protocol.items()
    ]
    without_room = evaluation.get("turns_without_room")
    if without_room:
        parts.append(f"{show(without_room)} later turns left out, which the target has no positions for")
    counts = (f"{show(evaluation.get(name))} {name}" for name in ("prompts", "steps"))
    return ", ".join([*parts, *counts])


def evaluation_rows(evaluation: Figures) -> list[tuple[str, str]]:
    """Return the rows of an evaluation for the terminal."""
    batched = evaluation.get("batched")
    rows = [
        ("target runs with", show(evaluation.get("target_mode"))),
        ("acceptance length (95% interval)", acceptance_text(evaluation)),
        ("drafts accepted by position", positions_text(evaluation)),
        ("output equals the target's own", lossless_text(evaluation)),
        ("one prompt at a time", _pass_text(evaluation.get("one_at_a_time"))),
    ]
    if batched:
        rows.append((f"in batches of {show(batched.get('batch_size'))}", _pass_text(batched)))
    return [*rows, *_engine_rows(evaluation.get("engine")), ("protocol", protocol_text(evaluation))]


def lossless_text(evaluation: Figures) -> str:
    """Return whether output is the target's own, and how many answers rounding alone made different."""
    text, equal = show(evaluation.get("lossless")), evaluation.get("prompts_equal")
    if equal is None or equal == evaluation["prompts"]:
        return text
    prompts, ties = evaluation["prompts"], evaluation["near_ties"]
    text += f"; {show(prompts - equal)} of {show(prompts)} answers differ, {show(ties)} from a near tie on"
    return f"{text}: a block rounds differently from single tokens, whatever was drafted" if ties else text


def _engine_rows(engine: Figures | None) -> list[tuple[str, str]]:
    """Return the speeds of an engine that was measured too (`evaluation.engine`)."""
    if not engine:
        return []
    name = f"{engine['name']} {engine['version']}, {engine['dtype']}"
    rows = [(f"{name}, one prompt at a time", _pass_text(engine["one_at_a_time"]))]
    if batched := engine.get("batched"):
        rows.append((f"{name}, up to {show(batched['batch_size'])} at once", _pass_text(batched)))
    return rows


def _pass_text(figures: Figures | None) -> str:
    if not figures:
        return "-"
    equal = figures.get("prompts_equal")
    same = "" if equal is None else f", output equal for {show(equal)}"
    return f"{speed_text(figures)} on {show(figures.get('prompts'))} prompts{same}"


def acceptance_rows(evaluation: Figures) -> list[tuple[str, str]]:
    """Return the acceptance length of each prompt set, of each category, and of all prompts pooled."""
    return [(f"acceptance length, {name}", acceptance_text(group)) for name, group in _groups(evaluation)]


def acceptance_text(group: Figures) -> str:
    """Return the acceptance length with its interval and the number of prompts."""
    length, interval = show(group.get("acceptance_length")), show(group.get("acceptance_interval"))
    return f"{length} ({interval}) on {show(group.get('prompts'))} prompts"


def _groups(evaluation: Figures) -> list[tuple[str, Figures]]:
    groups = {**(evaluation.get("sets") or {}), **(evaluation.get("categories") or {}), "all": evaluation}
    return list(groups.items())


def set_table(evaluation: Figures) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per prompt set, per category and for all prompts pooled.

    Lengths are sums over steps, never means of means.
    """
    batched = evaluation.get("batched")
    header = [*HEADER, "one at a time"]
    if batched:
        header.append(f"batches of {show(batched.get('batch_size'))}")
    rows = []
    for name, group in _groups(evaluation):
        length, interval = show(group.get("acceptance_length")), show(group.get("acceptance_interval"))
        counts = [show(group.get(key)) for key in ("prompts", "steps")]
        row = [name, *counts, f"{length} ({interval})", positions_text(group)]
        row.append(ratio_text(group.get("one_at_a_time")))
        rows.append([*row, ratio_text(group.get("batched"))] if batched else row)
    return header, rows


def to_markdown(evaluation: Figures, title: str = "## Acceptance and speed") -> str:
    """Return the part of a report that shows an evaluation; its plot is linked by the caller."""
    speeds = [list(row) for row in evaluation_rows(evaluation) if row[0] != "protocol"]
    parts = [
        title,
        f"**{headline(evaluation)[0].upper()}{headline(evaluation)[1:]}.**",
        markdown_table(["", ""], speeds),
        markdown_table(*set_table(evaluation)),
        f"Protocol: {protocol_text(evaluation)}. Acceptance length = emitted tokens / verification steps, "
        "over all steps of a set. Intervals (95%) draw prompts, or batches for the speed-up. Plain and "
        "speculative decoding ran in turns.",
    ]
    return "\n\n".join(parts)


def mlflow_metrics(evaluation: Figures) -> dict[str, float]:
    """Return `accept/position_1`, ..., and the speeds `single/...` (one at a time) and `batched/...`.

    Those of an engine are `engine/single/...` and `engine/batched/...`.
    """
    rates = evaluation.get("acceptance_by_position") or []
    metrics = {f"accept/position_{position}": rate for position, rate in enumerate(rates, start=1)}
    engine = evaluation.get("engine") or {}
    for name, figures in (
        ("single", evaluation.get("one_at_a_time") or {}),
        ("batched", evaluation.get("batched") or {}),
        ("engine/single", engine.get("one_at_a_time") or {}),
        ("engine/batched", engine.get("batched") or {}),
    ):
        for figure in ("plain_tokens_per_second", "speculative_tokens_per_second", "speedup"):
            if figures.get(figure) is not None:
                metrics[f"{name}/{figure}"] = figures[figure]
    return metrics
