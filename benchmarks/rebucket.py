"""One file added to many: which files are tokenised again, and how long `rebucket` takes.

    python -m benchmarks.rebucket [--files 500] [--rows 100]

Runs `flows.rebucket` as a command, without a server, on a tiny random target: with the files, again with nothing
changed, and with one file more. Shards that were written are told by their files' times. Prints a table, then one
line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.integration.flow_inputs import BASE, write_rows
from tests.tiny_target import make_tiny_target

ROOT = Path(__file__).resolve().parents[1]


def rebucket(place: Path) -> float:
    settings: dict[str, Any] = {
        **BASE,
        "target": {"name": str(place / "target")},
        "data": {"files": ["data"], "min_validation_samples": 4, "limit": None},
    }
    given = [part for name, value in settings.items() for part in ("--param", f"{name}={json.dumps(value)}")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW"))}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "flows.rebucket", "quickstart", *given],
        cwd=place,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds


def shard_times(place: Path) -> dict[str, int]:
    tokens = (place / "runs" / "store" / "ingest").glob("*/shard/tokens.bin")
    return {str(path): path.stat().st_mtime_ns for path in tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--rows", type=int, default=100, help="of each file")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        make_tiny_target(place / "target")
        for number in range(args.files):
            write_rows(place / "data" / f"{number:04d}.jsonl", args.rows, seed=number)
        before: dict[str, int] = {}
        for what in (f"{args.files} files", "nothing changed", "one file more"):
            if what == "one file more":
                write_rows(place / "data" / "more.jsonl", args.rows, seed=args.files)
            seconds = rebucket(place)
            after = shard_times(place)
            written = sum(before.get(path) != moment for path, moment in after.items())
            rows.append({"what": what, "files_tokenised": written, "seconds": seconds})
            before = after
    for row in rows:
        print(f"{row['what']:<16} {row['files_tokenised']:>5} files tokenised, {row['seconds']:.1f} s")
    assert [row["files_tokenised"] for row in rows] == [args.files, 0, 1]
    print(json.dumps({"files": args.files, "rows_a_file": args.rows, "runs": rows}))


if __name__ == "__main__":
    main()
