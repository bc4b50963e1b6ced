"""Fuzzing of containers: damaged files of every kind, by seed.

    python -m tests.support.fuzz_containers --minutes 60 --seed 0

Each seed writes rows into a container, damages it, and reads it. Checked:

- Every row that was left intact comes back, in order, and damaged ones between them are at least one row (a
  sample, a reject or a blank line), or the file fails with one message. Valid arrays are read as `json` does.
- After ingest, rows = samples + rejects; a file that fails leaves nothing behind.
- Memory stays below `MEMORY_ROWS` rows and `MEMORY_CHUNKS` chunks of the limits in `raw_rows.py`.

Prints one line of counts per minute; stops at the first seed that fails, and names it.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from dflash_core.config import DataConfig
from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.containers import read_rows
from dflash_core.data.ingest import ingest_file
from dflash_core.errors import UserError
from tests.support.chat_families import small_tokenizer

MEMORY_ROWS, MEMORY_CHUNKS = 8, 16
TEXTS = [
    "yes",
    "a, b",
    "]}",
    "[{",
    '"',
    "\\",
    '5" wide',
    "\n",
    "\u2028",
    "{}",
    "\ud7ff",
    "x" * 300,
    " ",
    "null",
]
NASTY = [
    *(
        b"null",
        b"[]",
        b"{}",
        b'""',
        b"NaN",
        b"\\ud800",
        b"\xff",
        b"\n",
        b"\r\n",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
    ),
    *(
        b"]",
        b",",
        b":",
        b"},",
        b"],",
        b"]}",
        b'"}',
        b', "a": 1',
        b"[" * 500,
        b" " * 50,
        b"\xef\xbb\xbf",
        b"x",
    ),
]
JOINS = {"jsonl": b"\n", "line": b",", "spaced": b", ", "own": b",\n", "glued": b",\n", "indent": b",\n"}
INDENTS = {"indent": 1, "object": 2}


@dataclass
class File:
    """A file and what it holds: each row's value, None where the row was damaged; None: not known."""

    path: Path
    kind: str
    expected: list[Any] | None
    num_blank: int = 0


@contextmanager
def limits(row: int, chunk: int) -> Iterator[None]:
    """Set the limits of reading, and restore them afterwards."""
    before = raw_rows.MAX_ROW_BYTES, raw_rows.CHUNK_BYTES
    raw_rows.MAX_ROW_BYTES, raw_rows.CHUNK_BYTES = row, chunk
    try:
        yield
    finally:
        raw_rows.MAX_ROW_BYTES, raw_rows.CHUNK_BYTES = before


def row_of(number: int, generator: random.Random) -> dict[str, Any]:
    """Return a conversation with an id, and texts that look like JSON."""
    turns = []
    for role in ("user", "assistant") * generator.randint(1, 2):
        text = "".join(generator.choice(TEXTS) for _ in range(generator.randint(1, 4)))
        turns.append({"role": role, "content": text})
    row: dict[str, Any] = {"id": number, "messages": turns}
    if generator.random() < 0.2:
        row["meta"] = {"tags": [generator.choice(TEXTS)], "deep": [[{"x": None}]]}
    return row


def damaged(text: bytes, generator: random.Random) -> bytes:
    """Return a row after one to three edits: bytes cut, dropped, overwritten, repeated or inserted."""
    for _ in range(generator.randint(1, 3)):
        position, length = generator.randrange(len(text) + 1), generator.randint(0, 12)
        head, tail = text[:position], text[position:]
        edits = [
            *(head, tail, head + tail[1:], head + tail[length:]),
            *(head + generator.randbytes(1) + tail[1:], head + tail[:length] * 2 + tail[length:]),
            *(head + generator.choice(NASTY) + tail, head + generator.choice(NASTY) + tail[length:]),
        ]
        text = generator.choice(edits)
    # Blanks behind the last comma of an array are no row.
    return text if text.strip() else b"x"


def write_file(directory: Path, seed: int) -> File:
    """Write the file of a seed."""
    generator = random.Random(seed)
    rows: list[Any] = [row_of(number, generator) for number in range(generator.randint(1, 30))]
    kind = generator.choice([*JOINS, *JOINS, "object", "parquet"])
    if kind == "parquet":
        return _parquet(directory, rows, generator)
    if kind == "object":
        rows = rows[:1]
    texts = [json.dumps(row, indent=INDENTS.get(kind), ensure_ascii=False).encode() for row in rows]
    damage = generator.choice(["none", "rows", "rows", "one row", "bytes", "cut", "more"])
    if damage in ("rows", "one row") and kind != "object":
        share = generator.random() if damage == "rows" else 0.0
        chosen = [generator.random() < share for _ in texts]
        chosen[generator.randrange(len(chosen))] = True
        texts = [damaged(text, generator) if hit else text for text, hit in zip(texts, chosen)]
        rows = [None if hit else row for row, hit in zip(rows, chosen)]
    content = _joined(kind, texts)
    if damage in ("bytes", "cut", "more"):
        content, rows = _damaged_file(content, damage, generator), []
    head = generator.choice([b"", b"", b"\n", b" \r\n\n", b"\xef\xbb\xbf"])
    content = head + content
    compress = generator.choice([bytes, bytes, gzip.compress, zstandard.compress])
    name = "x.jsonl" if kind == "jsonl" else generator.choice(["x.json", "x", "x.json.gz"])
    (directory / name).write_bytes(compress(content))
    return File(directory / name, kind, rows or None, head.count(b"\n"))


def _joined(kind: str, texts: list[bytes]) -> bytes:
    if kind == "object":
        return texts[0]
    text = JOINS[kind].join(texts)
    if kind == "jsonl":
        return text + b"\n"
    return b"[\n" + text + b"\n]\n" if kind in ("own", "indent") else b"[" + text + b"]"


def _damaged_file(content: bytes, damage: str, generator: random.Random) -> bytes:
    if damage == "cut":
        return content[: generator.randrange(len(content))]
    if damage == "more":
        return content + generator.choice([content, b"x", b"]", b"{}", b"[]", generator.randbytes(5)])
    out = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        out[generator.randrange(len(out))] = generator.choice([generator.randrange(256), *b'"\\{}[],:\n'])
    return bytes(out)


def _parquet(directory: Path, rows: list[Any], generator: random.Random) -> File:
    path = directory / "x.parquet"
    plain = [{"id": row["id"], "messages": row["messages"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(plain), path, row_group_size=7)
    if generator.random() < 0.5:
        return File(path, "parquet", plain)
    content = path.read_bytes()
    path.write_bytes(content[: generator.randrange(4, len(content))])
    return File(path, "parquet", None)


def check_rows(file: File) -> str:
    """Read a file and compare it with what it holds; return the outcome."""
    try:
        rows = list(read_rows(file.path))
    except UserError as error:
        assert str(error).startswith("data.files: "), error
        is_too_large = "is one JSON object of over" in str(error)
        assert file.expected is None or None in file.expected or is_too_large, f"intact, but failed: {error}"
        return "failed"
    assert all(isinstance(row.value, dict | Rejection | None) for row in rows)
    if file.expected is None:
        return "read"
    found = [row.value for row in rows][file.num_blank :]
    whole = _whole_array(file)
    if whole is not None:
        is_same = [
            _is_read([read], value, file.kind) or isinstance(value, list) for read, value in zip(found, whole)
        ]
        assert len(found) == len(whole) and all(is_same), "valid JSON was read as something else"
        return "valid"
    position, is_damaged = 0, False
    for value in file.expected:
        if value is None:
            is_damaged = True
            continue
        # Behind damaged rows any number of rows may come, at least one.
        last = len(found) if is_damaged else position + 1
        places = (
            i for i in range(position + is_damaged, last) if _is_read(found[i : i + 1], value, file.kind)
        )
        place = next(places, None)
        assert place is not None, f"row {value['id']} is lost: {found[position : position + 3]}"
        position, is_damaged = place + 1, False
    rest = len(found) - position
    assert rest >= 1 if is_damaged else rest == 0, f"{rest} rows behind the last one"
    return "read"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _whole_array(file: File) -> list[Any] | None:
    """Return the elements of an array that is valid JSON as a whole, else None."""
    if file.kind in ("jsonl", "object", "parquet"):
        return None
    content = file.path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    elif content[:4] == b"\x28\xb5\x2f\xfd":
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    try:
        value = json.loads(content.removeprefix(raw_rows.BOM), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError):
        return None
    return [element if isinstance(element, dict) else [] for element in value]


def _is_read(read: list[Any], value: Any, kind: str) -> bool:
    """Return True if a value was read as it is, or rejected because of its size."""
    size = len(
        json.dumps(value, indent=INDENTS.get(kind), ensure_ascii=False).encode("utf-8", "surrogatepass")
    )
    # Arrow's size of a row is not that of its text.
    is_large = size >= raw_rows.MAX_ROW_BYTES // (4 if kind == "parquet" else 1)
    # NaN is not equal to itself, but to its text.
    return repr(read) == repr([value]) or (is_large and read == [raw_rows.too_large()])


def check_ingest(file: File) -> None:
    """Check that rows = samples + rejects, or that nothing is left behind."""
    shard = file.path.parent / "shard"
    before = sorted(file.path.parent.iterdir())
    try:
        num_rows = sum(row.value is not None for row in read_rows(file.path))
        manifest = ingest_file(
            file.path, DataConfig(max_reject_share=1.0), small_tokenizer(), shard, mask_token_id=None
        )
    except UserError:
        assert sorted(file.path.parent.iterdir()) == before
        return
    assert manifest["num_rows"] == manifest["num_samples"] + manifest["num_rejected"] == num_rows


def check_memory(directory: Path, seed: int) -> None:
    """Check the memory that reading takes, with rows far above the limit."""
    generator = random.Random(seed)
    row, chunk = 1 << 18, 1 << 14
    texts = [b'{"a": %d}' % n for n in range(20)]
    for _ in range(3):
        unit = generator.choice(
            [b"x", b"[", b'{"a":', b'\\"', b'",', b'["a", {"b": 1}], ', b"\n", b" ", b"\xff"]
        )
        size = generator.randint(row // 2, 20 * row)
        large = b'{"a": [' + unit * (size // len(unit)) + generator.choice([b"]}", b""])
        texts.insert(generator.randrange(len(texts)), large)
    content = _joined(generator.choice([*JOINS]), texts)
    path = directory / "x.json"
    path.write_bytes(generator.choice([bytes, gzip.compress, zstandard.compress])(content))
    del content, texts
    with limits(row, chunk):
        tracemalloc.start()
        try:
            for _ in read_rows(path):
                pass
        except UserError:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # One kilobyte of zstd gives up to 32 MB.
    allowed = MEMORY_ROWS * row + MEMORY_CHUNKS * chunk + (1 << 20)
    allowed += 40 << 20 if path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd" else 0
    assert peak <= allowed, f"{peak} bytes of memory; allowed: {allowed}"


def check_seed(seed: int) -> str:
    """Check the file of one seed; return its kind and outcome."""
    generator = random.Random(f"limits {seed}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if seed % 500 == 49:
            check_memory(directory, seed)
            return "memory"
        file = write_file(directory, seed)
        row, chunk = (
            generator.choice([1 << 10, 1 << 12, 64 << 20]),
            generator.choice([16, 1 << 9, 1 << 20]),
        )
        with limits(row, chunk):
            outcome = check_rows(file)
            if seed % 10 == 0:
                check_ingest(file)
        return f"{file.kind} {outcome}"


def main() -> None:
    """Check seeds one after another until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    started = shown = time.monotonic()
    for seed in itertools.count(args.seed):
        now = time.monotonic()
        is_over = now - started > 60 * args.minutes
        if is_over or now - shown > 60:
            shown = now
            print(f"{seed - args.seed} files: {json.dumps(dict(sorted(counts.items())))}", flush=True)
        if is_over:
            return
        try:
            counts[check_seed(seed)] += 1
        except BaseException:
            print(f"seed {seed} fails", flush=True)
            raise


if __name__ == "__main__":
    main()
