"""Effect of training on responses that the target wrote: a run on the originals, and one on regenerated ones.

    python -m benchmarks.regenerated_data --data DATA.parquet --prompts EVAL.jsonl
    python -m benchmarks.regenerated_data --data DATA.jsonl --prompts A.jsonl --rows 1000 --steps 2000

Both runs take the same rows of DATA, the quickstart's drafter and the same number of steps of the same number
of tokens. They are evaluated on the same prompts, which neither saw, by real speculative decoding. Labels are
the target's argmax in both, so the only difference is the text that drafts continue: the responses of the
data, or those that the target writes after the same prompts (greedily, stage `regenerate`). Runs stay in
--root and resume there. Prints the report of each run, then both acceptance lengths with their 95% intervals
(a bootstrap over prompts), and one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.support import command
from benchmarks.support.flow_runs import ROOT, flow_command, flow_environment

# An upper limit: --steps ends a run.
EPOCHS = 10
KINDS = {"responses of the data": False, "responses of the target": True}


def run(settings: dict[str, Any], params: list[str], *, regenerated: bool) -> dict[str, Any]:
    """Train and evaluate one of the two runs and return its report."""
    kind = {"deployment": "regenerated" if regenerated else "original", "regenerate.enabled": regenerated}
    arguments = flow_command("train_dflash", "quickstart", settings, kind)
    arguments += [part for setting in params for part in ("--param", setting)]
    subprocess.run(arguments, cwd=ROOT, env=flow_environment(), check=True)
    latest = Path(settings["storage_root"]) / str(kind["deployment"]) / "latest"
    return dict(json.loads((latest / "report.json").read_text()))


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    evaluation, train = report["evaluation"], report["train"]
    return {
        "samples": report["dataset"]["num_samples"],
        "steps": train["steps"],
        "tokens": train["tokens"],
        **{name: evaluation[name] for name in ("acceptance_length", "acceptance_interval", "prompts")},
        "sets": {name: figures["acceptance_length"] for name, figures in evaluation["sets"].items()},
        "lossless": evaluation["lossless"],
    }


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of conversations")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="prompt sets to evaluate on")
    parser.add_argument("--rows", type=int, default=400, help="rows of each file")
    parser.add_argument("--steps", type=int, default=600, help="steps of 384 tokens per run")
    parser.add_argument("--root", type=Path, default=Path("runs/regenerated-data"), help="storage root")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=JSON", help="for both runs")
    args = parser.parse_args()
    settings = {
        "storage_root": str(args.root.resolve()),
        "data": {"files": [str(path.resolve()) for path in args.data], "limit": args.rows},
        "regenerate": {"max_new_tokens": 256},
        "training": {"epochs": EPOCHS, "max_steps": args.steps},
        "evaluation": {"prompts": [str(path.resolve()) for path in args.prompts], "max_new_tokens": 64},
    }
    figures = {}
    for kind, regenerated in KINDS.items():
        figures[kind] = figures_of(run(settings, args.param, regenerated=regenerated))
        steps = figures[kind]["steps"]
        if steps != args.steps:
            sys.exit(f"{kind}: the data give {steps} steps, not {args.steps}; raise --rows")
    for kind, row in figures.items():
        low, high = row["acceptance_interval"]
        length = f"acceptance length {row['acceptance_length']:.3f} (95% {low:.3f} to {high:.3f})"
        training = f"{row['steps']} steps, {row['tokens']:,} tokens of {row['samples']} samples"
        print(f"{kind:<26} {length} on {row['prompts']} prompts after {training}")
    command.print_json(figures)


if __name__ == "__main__":
    main()
