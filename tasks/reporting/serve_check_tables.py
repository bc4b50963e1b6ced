"""The result of a serve check as tables, Markdown and MLflow metrics."""

from __future__ import annotations

from typing import Any

from dflash_core.serving.check import control_caught, describe_steps
from tasks.reporting.tables import markdown_table, show


def mlflow_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that MLflow shows next to the evaluator's own."""
    compared = result["comparison"]
    return {
        "serve/passed": float(result["passed"]),
        "serve/engine_acceptance_length": compared["engine_acceptance_length"],
        "serve/evaluator_acceptance_length": compared["evaluator_acceptance_length"],
        "serve/near_ties": float(result["greedy"]["near_ties"]),
        "serve/plain_tokens_per_second": result["plain_tokens_per_second"],
        "serve/speculative_tokens_per_second": result["speculative_tokens_per_second"],
        **{f"serve/position_{p['position']}": p["engine_rate"] for p in compared["positions"]},
    }


def summary_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of each figure, for the terminal and the reports."""
    compared, greedy, control = result["comparison"], result["greedy"], result["control"]
    plain, speculative = result["plain_tokens_per_second"], result["speculative_tokens_per_second"]
    rows = [
        ("passed", "; ".join(result["failures"]) or "yes"),
        ("engine", f"vLLM {result['engine_version']}, {result['engine_dtype']}, {result['prompts']} prompts"),
        ("acceptance length: engine, evaluator", ", ".join(_lengths(compared))),
        ("verification steps", f"{show(compared['engine_steps'])}, {show(compared['evaluator_steps'])}"),
        (
            "engine's greedy output with the drafter",
            f"equal for {greedy['prompts_equal']}, differs at a near tie for {greedy['near_ties']}, "
            f"elsewhere for {greedy['not_near_ties']}",
        ),
        ("engine, tokens/s: plain, speculative", f"{show(plain, 1)}, {show(speculative, 1)}"),
    ]
    if control is not None:
        engine, evaluator = _lengths(control)
        verdict = "caught" if control_caught(control) else "NOT caught"
        rows.append(("control, layers one off", f"{engine} in the engine, {evaluator} here: {verdict}"))
    return rows


def to_markdown(result: dict[str, Any]) -> str:
    """Return the text of serve_check.md."""
    parts = ["# Served by vLLM", markdown_table(["", ""], [list(row) for row in summary_rows(result)])]
    titles = {"comparison": "## Along the engine's own output", "control": "## Control: layers one off"}
    for key, title in titles.items():
        compared = result[key]
        if compared is not None:
            steps = f"Steps that start at the same token on both sides: {describe_steps(compared)}."
            parts += [title, positions_table(compared), steps]
    return "\n\n".join(parts) + "\n"


def positions_table(compared: dict[str, Any]) -> str:
    """Return accepted drafts / steps by position on both sides, with their intervals, as Markdown."""
    header = ["position", "engine", "95% interval", "evaluator", "95% interval", "agrees"]
    rows = [
        [
            str(p["position"]),
            f"{p['engine_accepted']} / {compared['engine_steps']} = {p['engine_rate']:.4f}",
            show(p["engine_interval"], 4),
            f"{p['evaluator_accepted']} / {compared['evaluator_steps']} = {p['evaluator_rate']:.4f}",
            show(p["evaluator_interval"], 4),
            show(p["agrees"]),
        ]
        for p in compared["positions"]
    ]
    return markdown_table(header, rows)


def _lengths(compared: dict[str, Any]) -> tuple[str, str]:
    return show(compared["engine_acceptance_length"]), show(compared["evaluator_acceptance_length"])
