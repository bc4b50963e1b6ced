"""One file added to many: the files that are tokenised again, and the seconds that `rebucket` takes.

    python -m benchmarks.rebucket [--files 500] [--rows 100]

Runs `flows.rebucket` as a command, without a server, on a tiny random target: with the files, again with
nothing changed, and with one more file. A shard counts as written when its modification time changed; the
command fails where other files than the new one are tokenised. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.support import command
from benchmarks.support.flow_runs import run_small_flow, write_rows
from benchmarks.support.tiny_target import make_tiny_target


def shard_times(directory: Path) -> dict[str, int]:
    """Return the modification time of every shard."""
    tokens = (directory / "runs" / "store" / "ingest").glob("*/shard/tokens.bin")
    return {str(path): path.stat().st_mtime_ns for path in tokens}


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--rows", type=int, default=100, help="rows of each file")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tiny_target(directory / "target")
        for number in range(args.files):
            write_rows(directory / "data" / f"{number:04d}.jsonl", args.rows, seed=number)
        before: dict[str, int] = {}
        for what in (f"{args.files} files", "nothing changed", "one more file"):
            if what == "one more file":
                write_rows(directory / "data" / "more.jsonl", args.rows, seed=args.files)
            seconds, _ = run_small_flow("rebucket", directory)
            after = shard_times(directory)
            num_written = sum(before.get(path) != time for path, time in after.items())
            rows.append({"what": what, "files_tokenised": num_written, "seconds": seconds})
            before = after
    for row in rows:
        print(f"{row['what']:<16} {row['files_tokenised']:>5} files tokenised, {row['seconds']:.1f} s")
    assert [row["files_tokenised"] for row in rows] == [args.files, 0, 1]
    command.print_json({"files": args.files, "rows_per_file": args.rows, "runs": rows})


if __name__ == "__main__":
    main()
