"""Ingest compared with the bare tokenizer: the same rendered text, on the same cores, in the same process.

    python -m benchmarks.ingest                              # the standard-library corpus, 20,000 rows
    python -m benchmarks.ingest --data chats.jsonl           # your own file, all of it
    python -m benchmarks.ingest --memory-mb 100 1000         # also peak memory with files of these sizes

"bare" is `encode_batch` of the tokenizers library over texts rendered beforehand, 512 at a time, with ids
left in Rust. "ingest" reads the file, checks, renders and masks every row, encodes, and writes the shard.
Rounds alternate; the share is bare seconds / ingest seconds, median over the rounds. Loading the tokenizer
(once per file) is reported separately. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.support import command
from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatEncoder, Conversation, Rendered
from dflash_core.data.containers import read_rows
from dflash_core.data.format_detection import detect_format
from dflash_core.data.formats import RowReader
from dflash_core.data.ingest import ingest_file
from dflash_core.data.stdlib_corpus import corpus_rows
from dflash_core.target.materialise import materialise

CONFIG = DataConfig(max_length=1_000_000, max_reject_share=1.0)
BATCH = 512


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def write_corpus(path: Path, *, rows: int | None = None, megabytes: int | None = None) -> None:
    """Write the standard-library corpus repeatedly, each round numbered, up to some rows or megabytes."""
    lines = [json.dumps(row) for row in corpus_rows()]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for number in itertools.count():
            if number == rows or (megabytes is not None and written >= megabytes << 20):
                return
            line = lines[number % len(lines)].replace("Write the", f"{number // len(lines)}. Write the", 1)
            written += file.write(line + "\n")


def rendered_rows(path: Path, encoder: ChatEncoder) -> list[Rendered]:
    rows = [row.value for row in read_rows(path)]
    name = detect_format([row for row in rows[:100] if isinstance(row, dict)], CONFIG, source=str(path))
    reader = RowReader(name, CONFIG, reads=encoder.reads, notes=Counter())
    conversations = [reader.read(row) for row in rows if isinstance(row, dict)]
    rendered = [encoder.render(c) for c in conversations if isinstance(c, Conversation)]
    return [r for r in rendered if isinstance(r, Rendered)]


def compare(path: Path, tokenizer: Any, rounds: int) -> dict[str, Any]:
    started = time.perf_counter()
    encoder = ChatEncoder(tokenizer, CONFIG, None)
    setup = time.perf_counter() - started
    rendered = rendered_rows(path, encoder)
    texts = [r.text for r in rendered]
    bare, whole, tokens = [], [], 0
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds + 1):
            started = time.perf_counter()
            for first in range(0, len(texts), BATCH):
                batch = texts[first : first + BATCH]
                tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=False)
            bare.append(time.perf_counter() - started)
            started = time.perf_counter()
            manifest = ingest_file(path, CONFIG, tokenizer, Path(directory) / "s", mask_token_id=None)
            whole.append(time.perf_counter() - started - setup)
            tokens = manifest["num_tokens"]
    # The first round warms up.
    bare, whole = bare[1:], whole[1:]
    shares = [b / w for b, w in zip(bare, whole)]
    return {
        "rows": len(rendered),
        "tokens": tokens,
        "setup_seconds": setup,
        "bare_tokens_per_second": tokens / statistics.median(bare),
        "ingest_tokens_per_second": tokens / statistics.median(whole),
        "share": statistics.median(shares),
        "share_min": min(shares),
        "share_max": max(shares),
    }


def measure_memory(target: Path, megabytes: int) -> dict[str, Any]:
    """Return peak resident memory and seconds of a separate process that ingests one JSONL file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "corpus.jsonl"
        write_corpus(path, megabytes=megabytes)
        child = ["-m", "benchmarks.ingest", "--child", str(path), "--target", str(target)]
        done = subprocess.run([sys.executable, *child], check=True, stdout=subprocess.PIPE, text=True)
    return {"file_megabytes": megabytes, **json.loads(done.stdout.splitlines()[-1])}


def ingest_in_child(path: Path, target: Path) -> None:
    tokenizer = load_tokenizer(target)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    manifest = ingest_file(path, CONFIG, tokenizer, path.with_suffix(".shard"), mask_token_id=None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.perf_counter() - started
    figures = {"rows": manifest["num_rows"], "tokens": manifest["num_tokens"], "seconds": seconds}
    command.print_json({**figures, "peak_mb": peak / 1024, "peak_before_mb": before / 1024})


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--data", type=Path, help="a file of conversations instead of the corpus")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-mb", type=int, nargs="*", default=[], help="sizes of files to ingest")
    target = Path("runs/benchmark-target")
    parser.add_argument("--target", type=Path, default=target, help="directory of the tokenizer")
    parser.add_argument("--child", type=Path, help=SUPPRESS)
    args = parser.parse_args()
    if args.child:
        ingest_in_child(args.child, args.target)
        return
    if not args.target.exists():
        materialise("smollm2-135m-instruct", args.target)
    result: dict[str, Any] = {}
    if args.rows:
        with tempfile.TemporaryDirectory() as directory:
            path = args.data or Path(directory) / "corpus.jsonl"
            if args.data is None:
                write_corpus(path, rows=args.rows)
            result = compare(path, load_tokenizer(args.target), args.rounds)
        size = f"{result['rows']:,} rows, {result['tokens']:,} tokens"
        share = f"{result['share']:.2f} ({result['share_min']:.2f} to {result['share_max']:.2f})"
        print(f"{size}; set up in {result['setup_seconds']:.2f} s")
        print(f"bare tokenizer  {result['bare_tokens_per_second']:>12,.0f} tokens/s")
        print(f"ingest          {result['ingest_tokens_per_second']:>12,.0f} tokens/s: {share}")
    result["memory"] = [measure_memory(args.target, megabytes) for megabytes in args.memory_mb]
    for row in result["memory"]:
        print(
            f"{row['file_megabytes']:>6} MB of JSONL, {row['rows']:,} rows: peak {row['peak_mb']:,.0f} MB "
            f"({row['peak_before_mb']:,.0f} MB before the first row), {row['seconds']:.0f} s"
        )
    command.print_json(result)


if __name__ == "__main__":
    main()
