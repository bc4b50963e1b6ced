"""One file added to many: which files are tokenised again, and how long `rebucket` takes.

    python -m benchmarks.rebucket [--files 500] [--rows 100]

Runs `flows.rebucket` as a command, without a server, on a tiny random target: with the files, again with nothing
changed, and with one file more. Shards that were written are told by their files' times. Prints a table, then one
line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.support.tiny_target import make_tiny_target
from tests.integration.flow_runs import small_flow, write_rows


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
            seconds, _ = small_flow("rebucket", place)
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
