"""Does it pay to train on responses that the target wrote? One run with and one without, side by side.

    python -m benchmarks.regenerated_data --data DATA.parquet --prompts EVAL.jsonl
    python -m benchmarks.regenerated_data --data DATA.jsonl --prompts A.jsonl --rows 1000 --steps 2000

Both runs take the same rows of DATA, the quickstart's drafter, as many steps of as many tokens, and are evaluated on
the same prompts, which neither saw, by real speculative decoding. Labels are the target's argmax in both, so what
differs is the text that drafts continue: what people wrote, or what the target writes after the same prompts (greedily,
stage `regenerate`). Runs stay in --root and go on where they were. Prints each run's report, then both acceptance
lengths with their 95% intervals (a bootstrap over prompts), and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.flow_runs import ROOT, flow_command, flow_environment

EPOCHS = 10  # at most
KINDS = {"responses of the data": False, "responses of the target": True}


def run(settings: dict[str, Any], params: list[str], regenerated: bool) -> dict[str, Any]:
    kind = {"deployment": "regenerated" if regenerated else "original", "regenerate.enabled": regenerated}
    command = flow_command("train_dflash", "quickstart", settings, kind)
    command += [part for setting in params for part in ("--param", setting)]
    subprocess.run(command, cwd=ROOT, env=flow_environment(), check=True)
    latest = Path(settings["storage_root"]) / str(kind["deployment"]) / "latest"
    return dict(json.loads((latest / "report.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of conversations")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="prompt sets to evaluate on")
    parser.add_argument("--rows", type=int, default=400, help="of each file")
    parser.add_argument("--steps", type=int, default=600, help="of 384 tokens, each run")
    parser.add_argument("--root", type=Path, default=Path("runs/regenerated-data"), help="storage root")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=JSON", help="of both runs")
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
        report = run(settings, args.param, regenerated)
        if report["train"]["steps"] != args.steps:
            sys.exit(
                f"{kind}: the data give {report['train']['steps']} steps, not {args.steps}; raise --rows"
            )
        figures[kind] = {
            "samples": report["dataset"]["num_samples"],
            "steps": report["train"]["steps"],
            "tokens": report["train"]["tokens"],
            **{name: report["evaluation"][name] for name in ("acceptance_length", "acceptance_interval")},
            "prompts": report["evaluation"]["prompts"],
            "sets": {
                name: found["acceptance_length"] for name, found in report["evaluation"]["sets"].items()
            },
            "lossless": report["evaluation"]["lossless"],
        }
    for kind, found in figures.items():
        low, high = found["acceptance_interval"]
        print(
            f"{kind:<26} acceptance length {found['acceptance_length']:.3f} (95% {low:.3f} to {high:.3f}) on "
            f"{found['prompts']} prompts after {found['steps']} steps, {found['tokens']:,} tokens of "
            f"{found['samples']} samples"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
