"""The model card of an exported drafter: `README.md` next to its weights, as the Hugging Face Hub shows it.

It states what the drafter is for, what was measured, what it was made from, and how engines load it. It holds
no path of this machine and no secret, so that the directory can be published as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.drafter.directory import CONFIG_FILE
from dflash_core.files import complete_file
from dflash_core.redaction import redact
from tasks.reporting.tables import markdown_table, show
from tasks.storage.run_directory import read_json

CARD_FILE = "README.md"
# Names of targets that come with a package, and their names on the Hub.
HUB_NAMES = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
SETTINGS = ("drafter", "objective", "optimizer", "training")


def write_card(run: Path, evaluation: Mapping[str, Any]) -> None:
    """Write the card of a run's drafter, complete or not at all."""
    drafter = run / "drafter"
    text = model_card(
        read_json(run / "run.json"),
        read_json(run / "summary.json"),
        read_json(drafter / CONFIG_FILE),
        evaluation,
    )
    with complete_file(drafter / CARD_FILE) as temporary:
        temporary.write_text(text, encoding="utf-8")


def model_card(
    run: Mapping[str, Any],
    summary: Mapping[str, Any],
    drafter: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> str:
    """Return the text of the card.

    Args:
        run: the contents of run.json.
        summary: those of summary.json.
        drafter: those of the drafter's config.json.
        evaluation: figures of the evaluation; empty before it.
    """
    base = hub_name(run["config"]["target"]["name"])
    target, block_size = base or "its target (a local model)", drafter["block_size"]
    parts = [
        _front_matter(base),
        f"# DFlash drafter for {target}",
        f"A block-diffusion drafter ([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)) for speculative "
        f"decoding with {target}: {drafter['num_hidden_layers']} layers, blocks of {block_size} positions "
        "(one known token and the drafts after it). The target verifies each block, so its output stays its "
        "own. The drafter works with this target alone.",
        "## Evaluation",
        _evaluation(evaluation),
        "## Serving",
        _serving(base or "TARGET", block_size),
        "## Provenance",
        _provenance(run, summary),
    ]
    return redact("\n\n".join(parts) + "\n")


def hub_name(target: str) -> str | None:
    """Return the name of a target on the Hub, or None for a directory or a file of this machine."""
    name = HUB_NAMES.get(target.lower(), target)
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not Path(target).exists()
    return name if is_name else None


def _front_matter(base: str | None) -> str:
    lines = ["---", "library_name: transformers", "tags:"]
    lines += [f"- {tag}" for tag in ("dflash", "speculative-decoding", "draft-model")]
    lines += [f"base_model: {base}"] if base else []
    return "\n".join([*lines, "---"])


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    if evaluation.get("acceptance_length") is None:
        return "Not evaluated yet."
    groups = {**(evaluation.get("sets") or {}), "all": evaluation}
    rows = [
        [
            name,
            show(group.get("prompts")),
            show(group.get("acceptance_length")),
            show(group.get("acceptance_interval")),
            ", ".join(f"{rate:.3f}" for rate in group.get("acceptance_by_position") or []) or "-",
        ]
        for name, group in groups.items()
    ]
    header = [
        "prompt set",
        "prompts",
        "acceptance length",
        "95% interval",
        "accepted up to position 1, 2, ...",
    ]
    lossless = show(evaluation.get("lossless"))
    note = (
        "Acceptance length is the number of tokens per verification by the target, the bonus token included."
    )
    return f"{note}\n\n{markdown_table(header, rows)}\n\nGreedy output equals the target's own: {lossless}."


def _serving(target: str, block_size: int) -> str:
    method = f'{{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": {block_size - 1}}}'
    return (
        "DRAFTER is this repository or a local copy of it.\n\n```\n"
        f"vllm serve {target} --no-enable-prefix-caching --speculative-config '{method}'\n"
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\\n"
        f"    --speculative-draft-model-path DRAFTER --speculative-num-draft-tokens {block_size}\n```"
    )


def _provenance(run: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return what the drafter was made from: digests, settings that differ between recipes, versions."""
    fields, versions = run["fields"], run.get("made_with") or {}
    rows = [
        ["run key", str(run["run_key"])],
        ["data (digest)", str(fields.get("data"))],
        ["target (digest)", str(fields.get("target"))],
        ["steps, samples, tokens", ", ".join(show(summary.get(n)) for n in ("steps", "samples", "tokens"))],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
    ]
    rows += [
        [name, str(value)]
        for name, value in sorted(fields.items())
        # A digest of weights, whatever path it came from.
        if name.split(".")[0] in SETTINGS and value is not None
    ]
    return markdown_table(["", ""], rows)
