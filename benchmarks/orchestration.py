"""What orchestration costs: a second run of train-dflash/quickstart with nothing to do, with one file and with many.

    python -m benchmarks.orchestration [--files 500]

Runs the flow as a command, without a server, on a tiny random target and small JSONL files, twice for each number of
files: the first run does the work, the second finds everything up to date. Then the same through a server, a pool and a
worker, where the work of a run is counted from its start to its end; what comes before is the worker's poll and the
start of a Python process. Also times an import of the flow alone, the part that no design changes. Prints a table, then
one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.support.tiny_target import make_tiny_target
from tests.integration.flow_runs import BASE, small_flow, write_rows
from tests.integration.operations import Operations

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"training": {"max_steps": 3}}


def measure(num_files: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        make_tiny_target(place / "target")
        rng = random.Random(0)
        for number in range(num_files):
            write_rows(
                place / "data" / f"{number:04d}.jsonl", max(2, 60 // num_files), seed=rng.randrange(1 << 30)
            )
        first, _ = small_flow("train_dflash", place, SHORT)
        second, errors = small_flow("train_dflash", place, SHORT)
        if "is finished and up to date, skipped" not in errors:
            sys.exit(f"the second run was not skipped:\n{errors}")
        return {"files": num_files, "first_seconds": first, "second_seconds": second}


def through_worker() -> dict[str, Any]:
    """Seconds of a second run with nothing to do: of work, and from the request to the end."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        with Operations(place, make_tiny_target(place / "target")) as operations:
            training = {**BASE["training"], "max_steps": 3}
            operations.wait_for(operations.run(training=training), 300, "COMPLETED")
            flow_run = operations.run(training=training)
            operations.wait_for(flow_run, 120, "COMPLETED")
            found = operations.inspect(flow_run)
        if "is finished and up to date, skipped" not in (place / "worker.log").read_text():
            sys.exit("the second run was not skipped")
    begin, end = (datetime.fromisoformat(found[name]) for name in ("created", "end_time"))
    return {"work_seconds": found["total_run_time"], "whole_seconds": (end - begin).total_seconds()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, nargs="*", default=[1, 500])
    args = parser.parse_args()
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import flows.train_dflash"], cwd=ROOT, check=True)
    imports = time.perf_counter() - started
    rows = [measure(count) for count in args.files]
    print(f"import of the flow, Prefect and all: {imports:.1f} s")
    for row in rows:
        print(
            f"{row['files']:>5} files: first run {row['first_seconds']:.1f} s, "
            f"second, nothing to do, {row['second_seconds']:.1f} s"
        )
    worker = through_worker()
    print(
        f"through a worker: second run {worker['work_seconds']:.1f} s of work, "
        f"{worker['whole_seconds']:.1f} s from the request to the end"
    )
    print(json.dumps({"import_seconds": imports, "runs": rows, "worker": worker}))


if __name__ == "__main__":
    main()
