"""One file of conversations to one shard: read, normalise, render, mask, encode, store.

Rows in = samples + rejects + blanks, always; every refused row is kept with its physical line and a reason.
Memory is bounded by the batch. Encoding runs on all cores in a thread beside reading and rendering, so
throughput is close to the bare tokenizer's (`benchmarks/ingest.py`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.config import DataConfig, to_dict
from dflash_core.data import stdlib_corpus
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Rendered, Sample, load_template
from dflash_core.data.containers import RawRow, read_rows
from dflash_core.data.formats import ACCEPTED, RowReader, Tokens, detect_format
from dflash_core.data.store import ShardWriter
from dflash_core.errors import UserError

STDLIB = "stdlib"
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 1 << 20
_BATCHES_IN_FLIGHT = 3
_DETECTION_ROWS = 100
_NOT_INGEST = ("files", "min_validation_samples", "max_reject_share", "chat_template")

Item = tuple[int, Rendered | Sample | Rejection]


def ingest_file(
    path: Path | str,
    config: DataConfig,
    tokenizer: Any,
    out_dir: Path,
    *,
    mask_token_id: int | None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write the shard of one file under `out_dir`, whole or not at all.

    Args:
        path: a file, or "stdlib" for the standard-library corpus.
        config: the rules.
        tokenizer: the target's, from transformers, with a Rust backend.
        out_dir: the shard's final directory.
        mask_token_id: the drafter's mask token; rows that hold it are refused. None: not checked.
        progress: called with the number of rows read so far, once a batch.

    Returns:
        The shard's manifest.

    Raises:
        UserError: the file is no data set of a known format, no row is usable, or the share of refused rows
            is above `max_reject_share`; the message names the most frequent reasons with examples. Nothing is
            left behind.
    """
    encoder = ChatEncoder(tokenizer, config, mask_token_id)
    is_stdlib = str(path) == STDLIB
    source = STDLIB if is_stdlib else source_name(Path(path))
    content = stdlib_corpus.corpus_digest() if is_stdlib else content_digest(Path(path))
    meta = {
        "source": source,
        "template_digest": _digest(encoder.template.text),
        "rules": ingest_key_fields(config),
    }
    with ShardWriter(
        out_dir,
        source_digest=_digest(json.dumps([content, meta, mask_token_id], sort_keys=True)),
        meta=meta,
        validation_share=config.validation_share,
    ) as writer:
        format_name, rows = open_rows(path, config)
        meta["format"] = format_name
        reader = RowReader(format_name, config, reads=encoder.template.reads, notes=writer.notes)
        items = _rendered(rows, reader, encoder, writer, len(tokenizer))
        for item in _encoded(items, encoder, lambda: progress and progress(writer.num_rows)):
            _store(item, writer, config, source)
        _check(writer, config, str(path))
        return writer.close()


def open_rows(path: Path | str, config: DataConfig, *, answered: bool = True) -> tuple[str, Iterator[RawRow]]:
    """Format and rows of a file or of "stdlib", at most `data.limit` of them; blank lines are no rows.

    Args:
        answered: a file of prompts without answers is refused.

    Raises:
        UserError: the file is no data set of a known format.
    """
    if str(path) == STDLIB:
        return "messages", _limited(_stdlib_rows(), config.limit)
    rows = read_rows(Path(path))
    first: list[RawRow] = []
    num_blank = 0
    for row in rows:
        first.append(row)
        num_blank += row.value is None
        if len(first) - num_blank == _DETECTION_ROWS:
            break
    objects = [row.value for row in first if isinstance(row.value, dict)]
    if not objects:
        raise UserError(f"data.files: {str(path)!r} has no rows that are objects with columns{_why(first)}")
    format_name = detect_format(objects, config, source=str(path), answered=answered)
    return format_name, _limited(itertools.chain(first, rows), config.limit)


def _why(rows: list[RawRow]) -> str:
    """What was wrong with the first row, and what a row is."""
    refused = next((row for row in rows if isinstance(row.value, Rejection)), None)
    seen = (
        "" if refused is None else f"; line {refused.line}: {refused.value.reason} ({refused.value.detail})"
    )
    return f"{seen}; allowed: one JSON object a line, a JSON array of objects, Parquet; columns: {ACCEPTED}"


def _stdlib_rows() -> Iterator[RawRow]:
    for number, row in enumerate(stdlib_corpus.corpus_rows(), start=1):
        yield RawRow(number, row)


def _limited(rows: Iterable[RawRow], limit: int | None) -> Iterator[RawRow]:
    """The first `limit` rows; blank lines are no rows."""
    count = 0
    for row in rows:
        if count == limit:
            return
        count += row.value is not None
        yield row


def _rendered(
    rows: Iterable[RawRow], reader: RowReader, encoder: ChatEncoder, writer: ShardWriter, vocabulary: int
) -> Iterator[Item]:
    """Each row as rendered text, as tokens that came with it, or as a rejection; counts rows and blanks."""
    for row in rows:
        value = row.value
        if value is None:
            writer.num_blank += 1
            continue
        writer.num_rows += 1
        if not isinstance(value, Rejection):
            value = reader.read(value)
        if isinstance(value, Conversation):
            value = encoder.render(value)
        elif isinstance(value, Tokens):
            value = _check_tokens(value, vocabulary, encoder.mask_token_id)
        yield row.line, value


def _check_tokens(tokens: Tokens, vocabulary: int, mask_token_id: int | None) -> Sample | Rejection:
    try:
        ids, mask = np.asarray(tokens.token_ids), np.asarray(tokens.loss_mask)
    except (ValueError, OverflowError) as error:
        return Rejection("wrong shape", f"input_ids or loss_mask: {error}")
    if ids.ndim != 1 or ids.shape != mask.shape or len(ids) == 0:
        return Rejection("wrong shape", f"input_ids {ids.shape} and loss_mask {mask.shape}")
    if ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        return Rejection(
            "wrong shape", f"input_ids are {ids.dtype}, loss_mask is {mask.dtype}; allowed: integers"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        return Rejection(
            "token outside the vocabulary", f"{ids.min()} to {ids.max()}; allowed: 0 to {vocabulary - 1}"
        )
    if not np.isin(mask, (0, 1)).all():
        return Rejection("wrong shape", "loss_mask holds other values than 0 and 1")
    if mask_token_id is not None and (ids == mask_token_id).any():
        return Rejection("mask token in data", f"token {mask_token_id}")
    return Sample(ids.astype(np.int32), mask.astype(np.uint8))


def _encoded(items: Iterator[Item], encoder: ChatEncoder, on_batch: Callable[[], object]) -> Iterator[Item]:
    """Items in order with rendered text encoded, a batch in a thread while the next ones are rendered."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        flying: deque[tuple[list[Item], list[Rendered], Future[list[Any]]]] = deque()
        batches = _batched(items)
        while True:
            batch = next(batches, None)
            if batch is not None:
                texts = [value for _, value in batch if isinstance(value, Rendered)]
                flying.append((batch, texts, pool.submit(encoder.tokenise, texts)))
                on_batch()
            while flying and (batch is None or len(flying) >= _BATCHES_IN_FLIGHT):
                done, texts, future = flying.popleft()
                samples = iter(encoder.samples(texts, future.result()))
                for line, value in done:
                    yield line, next(samples) if isinstance(value, Rendered) else value
            if batch is None:
                return


def _batched(items: Iterator[Item]) -> Iterator[list[Item]]:
    """Batches of at most 512 rows and about a million characters."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item[1].text) if isinstance(item[1], Rendered) else 0
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _store(item: Item, writer: ShardWriter, config: DataConfig, source: str) -> None:
    line, value = item
    if isinstance(value, Sample):
        value = fit_length(value, config)
    if isinstance(value, Rejection):
        writer.reject(line, value.reason, value.detail)
        return
    assert isinstance(value, Sample)
    mask = value.loss_mask
    num_eligible = int(np.count_nonzero(mask[:-1] & mask[1:]))  # the number of `eligible_positions`
    if num_eligible == 0:
        writer.reject(line, "no eligible anchor", f"{int(mask.sum())} supervised tokens, no two in a row")
        return
    for note in value.notes:
        writer.notes[note] += 1
    added = writer.add(
        value.token_ids,
        value.loss_mask,
        source=source,
        num_eligible=num_eligible,
        drop_duplicate=config.drop_duplicates,
    )
    if not added:
        writer.reject(line, "duplicate", "same tokens as an earlier row (data.drop_duplicates)")


def fit_length(sample: Sample, config: DataConfig) -> Sample | Rejection:
    """The one rule for long samples: as it is, cut inside its last supervised turn, or refused.

    The mask comes from the whole conversation, so a cut keeps exactly the supervised tokens before it. A cut
    before the last turn would leave a fragment, and is refused.
    """
    length, allowed = len(sample.token_ids), config.max_length
    if length <= allowed:
        return sample
    if config.over_length == "reject":
        return Rejection("over length", f"{length} tokens; allowed: {allowed}")
    supervised = np.flatnonzero(sample.loss_mask)
    breaks = np.flatnonzero(np.diff(supervised) > 1)
    last_turn = (
        int(supervised[breaks[-1] + 1] if len(breaks) else supervised[0]) if len(supervised) else length
    )
    if last_turn + 2 > allowed:
        return Rejection(
            "over length before the last turn",
            f"{length} tokens, last turn at {last_turn}; allowed: {allowed}",
        )
    notes = (*sample.notes, "last turn cut at data.max_length")
    return Sample(sample.token_ids[:allowed], sample.loss_mask[:allowed], notes)


def _check(writer: ShardWriter, config: DataConfig, path: str) -> None:
    """Fail on an unusable file: no sample, or too many refused rows. Dropped duplicates are not counted."""
    rows, refused = writer.num_rows, writer.num_rejected - writer.num_dropped
    if writer.num_samples == 0:
        raise UserError(
            f"data.files: {path!r} has no usable row of {rows}; reasons:\n{writer.rejects_summary()}"
        )
    if refused > config.max_reject_share * rows:
        raise UserError(
            f"data.max_reject_share: {refused} of {rows} rows of {path!r} refused ({refused / rows:.1%}), "
            f"allowed: {config.max_reject_share:.1%}; most frequent reasons:\n{writer.rejects_summary()}"
        )


def ingest_key_fields(config: DataConfig) -> dict[str, Any]:
    """The settings that decide what ingest writes, as JSON types, the chat template by content.

    Beside these the output depends on the file's bytes, its name (the source), the tokenizer with its
    template and the mask token.
    """
    fields = {name: value for name, value in to_dict(config).items() if name not in _NOT_INGEST}
    if config.chat_template is not None:
        fields["chat_template"] = _digest(load_template(None, config))
    return fields


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_name(path: Path) -> str:
    """How samples of a file are named in the profile: its name without suffixes."""
    name = path.name.split(".")[0] or path.name
    return name.encode("utf-8", "replace").decode()  # names of files need not be UTF-8


def content_digest(path: Path) -> str:
    """blake2b of a file's bytes."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"data.files: {str(path)!r} cannot be read: {error}") from error
