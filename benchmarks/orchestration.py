"""Orchestration cost: a second run of train-dflash/quickstart, in which every stage is up to date.

    python -m benchmarks.orchestration [--files 1 500]

Runs the flow as a command, without a server, on a tiny random target and small JSONL files, twice for each
number of files: the first run does the work, the second finds everything up to date. Then the same through a
server, a pool and a worker, where the work of a run is counted from its start to its end; the time before
that is the worker's poll and the start of a Python process. Also times an import of the flow alone, the part
that no design changes. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.support import command
from benchmarks.support.flow_runs import ROOT, SMALL_SETTINGS, run_small_flow, write_rows
from benchmarks.support.prefect_services import PrefectServices
from benchmarks.support.tiny_target import make_tiny_target

SHORT = {"training": {"max_steps": 3}}
SKIPPED = "is finished and up to date, skipped"


def measure(num_files: int) -> dict[str, Any]:
    """Return the seconds of a first and a second run on so many files."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tiny_target(directory / "target")
        rng = random.Random(0)
        num_rows = max(2, 60 // num_files)
        for number in range(num_files):
            path = directory / "data" / f"{number:04d}.jsonl"
            write_rows(path, num_rows, seed=rng.randrange(1 << 30))
        first, _ = run_small_flow("train_dflash", directory, SHORT)
        second, errors = run_small_flow("train_dflash", directory, SHORT)
    if SKIPPED not in errors:
        sys.exit(f"the second run was not skipped:\n{errors}")
    return {"files": num_files, "first_seconds": first, "second_seconds": second}


def measure_worker() -> dict[str, Any]:
    """Return the seconds of a second run through a worker: of its work, and from the request to the end."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with PrefectServices(directory, make_tiny_target(directory / "target")) as services:
            training = {**SMALL_SETTINGS["training"], "max_steps": 3}
            services.wait_for(services.run(training=training), "COMPLETED")
            flow_run = services.run(training=training)
            services.wait_for(flow_run, "COMPLETED")
            record = services.inspect(flow_run)
            if SKIPPED not in services.worker_log():
                sys.exit("the second run was not skipped")
    begin, end = (datetime.fromisoformat(record[name]) for name in ("created", "end_time"))
    return {"work_seconds": record["total_run_time"], "whole_seconds": (end - begin).total_seconds()}


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--files", type=int, nargs="*", default=[1, 500], help="numbers of files to measure")
    args = parser.parse_args()
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import flows.train_dflash"], cwd=ROOT, check=True)
    imports = time.perf_counter() - started
    rows = [measure(count) for count in args.files]
    print(f"import of the flow, Prefect included: {imports:.1f} s")
    for row in rows:
        seconds = f"first run {row['first_seconds']:.1f} s, second run {row['second_seconds']:.1f} s"
        print(f"{row['files']:>5} files: {seconds}")
    worker = measure_worker()
    work, whole = f"{worker['work_seconds']:.1f} s of work", f"{worker['whole_seconds']:.1f} s"
    print(f"through a worker: second run {work}, {whole} from the request to the end")
    command.print_json({"import_seconds": imports, "runs": rows, "worker": worker})


if __name__ == "__main__":
    main()
