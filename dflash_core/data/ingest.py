"""One file of conversations to one shard: read, normalise, render, mask, encode, store.

Lines in = samples + rejected rows + blank lines, always; every rejected row is kept with its place
and a reason. Memory is bounded by the batch. Encoding runs on all cores in a separate thread, in parallel
with reading and rendering, so throughput is close to that of the tokenizer alone (`benchmarks/ingest.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.anchors import eligible_positions
from dflash_core.config import DataConfig, to_dict
from dflash_core.data import stdlib_corpus
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Rendered, Sample, chat_encoder
from dflash_core.data.formats import RowReader, Tokens
from dflash_core.data.named_templates import read_template
from dflash_core.data.raw_rows import RawRow
from dflash_core.data.shard_writer import ShardWriter
from dflash_core.data.source_rows import open_rows
from dflash_core.errors import UserError
from dflash_core.files import file_sha256

_BATCH_ROWS = 512
_BATCH_CHARACTERS = 1 << 20
_BATCHES_IN_FLIGHT = 3
_LIMITS = ("max_reject_share", "max_over_length_share")
_NOT_INGEST = ("files", "min_validation_samples", "chat_template", "download_limit_gb", *_LIMITS)
# Reasons of rows that are only too long start with this, in any part of the pipeline.
OVER_LENGTH = "over length"

# Line and element of a row (see `RawRow`), and what became of it.
Item = tuple[int | None, int | None, Rendered | Sample | Rejection]


def ingest_file(
    path: Path | str,
    config: DataConfig,
    tokenizer: Any,
    out_dir: Path,
    *,
    mask_token_id: int | None,
    digest: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Write the shard of one file under `out_dir`, complete or not at all.

    Args:
        path: a file, or "stdlib" for the standard-library corpus.
        config: the rules.
        tokenizer: the target's tokenizer, from transformers, with a Rust backend.
        out_dir: the shard's final directory.
        mask_token_id: the drafter's mask token; rows that contain it are rejected. None: not checked.
        digest: sha256 of the file's bytes, known from before; None: computed here. Other bytes fail the file.
        progress: called once per batch with the number of rows read so far.

    Returns:
        The shard's manifest.

    Raises:
        UserError: the file is not a data set of a known format or has changed, no row is usable, or the share
            of rejected rows is above `max_reject_share` or `max_over_length_share`; the message names the
            most frequent reasons with examples. No files are left behind.
    """
    encoder = chat_encoder(tokenizer, config, mask_token_id)
    is_stdlib = str(path) == stdlib_corpus.SOURCE
    source = stdlib_corpus.SOURCE if is_stdlib else source_name(Path(path))
    digest = stdlib_corpus.corpus_digest() if is_stdlib else digest or content_digest(Path(path))
    meta = {
        "source": source,
        "template_digest": _digest(encoder.template_text),
        "rules": ingest_key_fields(config),
    }
    with ShardWriter(
        out_dir,
        source_digest=_digest(json.dumps([digest, meta, mask_token_id], sort_keys=True)),
        meta=meta,
        validation_share=config.validation_share,
    ) as writer:
        format_name, rows = open_rows(path, config, digest=digest)
        meta["format"] = format_name
        reader = RowReader(format_name, config, reads=encoder.reads, notes=writer.notes)
        items = _rendered(rows, reader, encoder, writer, tokenizer)
        for item in _encoded(items, encoder, lambda: progress and progress(writer.num_rows)):
            _store(item, writer, config, source)
        _check(writer, config, str(path))
        return writer.close()


def _rendered(
    rows: Iterable[RawRow], reader: RowReader, encoder: ChatEncoder, writer: ShardWriter, tokenizer: Any
) -> Iterator[Item]:
    """Yield each row as rendered text, as its given tokens, or as a rejection; count rows and blank lines."""
    vocabulary = len(tokenizer)
    for row in rows:
        value = row.value
        if value is None:
            writer.num_blank += 1
            continue
        writer.num_rows += 1
        if not isinstance(value, Rejection):
            value = reader.read(value)
        if isinstance(value, Conversation):
            value = _render(value, encoder)
            if isinstance(value, Rendered) and len(value.text) > _BATCH_CHARACTERS:
                value = _fits(value, encoder.config.max_length, tokenizer)
        elif isinstance(value, Tokens):
            value = _check_tokens(value, vocabulary, encoder.mask_token_id)
        yield row.line, row.element, value


def _render(conversation: Conversation, encoder: ChatEncoder) -> Rendered | Rejection:
    if not any(message["role"] == "assistant" for message in conversation.messages):
        return Rejection("no supervised turn", "no turn of the assistant")
    return encoder.render(conversation)


def _fits(rendered: Rendered, max_length: int, tokenizer: Any) -> Rendered | Rejection:
    """Return a text of more characters than a batch, or its rejection if `max_length` tokens cannot hold it.

    Encoding takes over 100 bytes of memory per byte of text, also where the sample would then be cut.
    """
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    num_bytes = len(rendered.text.encode())
    if num_bytes <= max_length * longest:
        return rendered
    detail = f"{num_bytes} bytes; {max_length} tokens hold at most {max_length * longest}"
    return Rejection("over length", detail)


def _check_tokens(tokens: Tokens, vocabulary: int, mask_token_id: int | None) -> Sample | Rejection:
    """Return a tokenised row as a sample, or why it cannot be one."""
    try:
        ids, mask = np.asarray(tokens.token_ids), np.asarray(tokens.loss_mask)
    except (ValueError, OverflowError) as error:
        return Rejection("wrong shape", f"input_ids or loss_mask: {error}")
    if ids.ndim != 1 or ids.shape != mask.shape or len(ids) == 0:
        return Rejection("wrong shape", f"input_ids {ids.shape} and loss_mask {mask.shape}")
    if ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        detail = f"input_ids are {ids.dtype}, loss_mask is {mask.dtype}; allowed: integers"
        return Rejection("wrong shape", detail)
    if ids.min() < 0 or ids.max() >= vocabulary:
        detail = f"{ids.min()} to {ids.max()}; allowed: 0 to {vocabulary - 1}"
        return Rejection("token outside the vocabulary", detail)
    if not np.isin(mask, (0, 1)).all():
        return Rejection("wrong shape", "loss_mask holds other values than 0 and 1")
    if mask_token_id is not None and (ids == mask_token_id).any():
        return Rejection("mask token in data", f"token {mask_token_id}")
    return Sample(ids.astype(np.int32), mask.astype(np.uint8))


def _encoded(items: Iterator[Item], encoder: ChatEncoder, on_batch: Callable[[], object]) -> Iterator[Item]:
    """Yield the items in order, text encoded: a thread encodes a batch while the next ones are rendered."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        in_flight: deque[tuple[list[Item], list[Rendered], Future[list[Any]]]] = deque()
        batches = _batched(items)
        while True:
            batch = next(batches, None)
            if batch is not None:
                texts = [value for _, _, value in batch if isinstance(value, Rendered)]
                in_flight.append((batch, texts, pool.submit(encoder.tokenise, texts)))
                on_batch()
            while in_flight and (batch is None or len(in_flight) >= _BATCHES_IN_FLIGHT):
                encoded_batch, texts, future = in_flight.popleft()
                samples = iter(encoder.samples(texts, future.result()))
                for line, element, value in encoded_batch:
                    yield line, element, next(samples) if isinstance(value, Rendered) else value
            if batch is None:
                return


def _batched(items: Iterator[Item]) -> Iterator[list[Item]]:
    """Yield batches of at most 512 rows and about a million characters."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item[2].text) if isinstance(item[2], Rendered) else 0
        if len(batch) >= _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _store(item: Item, writer: ShardWriter, config: DataConfig, source: str) -> None:
    line, element, value = item
    # Of a row that was too long to be encoded only this much is known.
    num_tokens = config.max_length + 1
    if isinstance(value, Sample):
        num_tokens = len(value.token_ids)
        value = fit_length(value, config)
    if isinstance(value, Rejection):
        if value.reason.startswith(OVER_LENGTH):
            writer.num_over_length += 1
            writer.num_over_length_tokens += num_tokens
        writer.reject(line, value.reason, value.detail, element=element)
        return
    assert isinstance(value, Sample)
    mask = value.loss_mask
    writer.num_over_length_tokens += num_tokens - len(mask)
    if len(eligible_positions(mask)) == 0:
        detail = f"{int(mask.sum())} supervised tokens, no two in a row"
        writer.reject(line, "no eligible anchor", detail, element=element)
        return
    for note in value.notes:
        writer.notes[note] += 1
    added = writer.add(value.token_ids, mask, source=source, drop_duplicate=config.drop_duplicates)
    if not added:
        detail = "same tokens as an earlier row (data.drop_duplicates)"
        writer.reject(line, "duplicate", detail, element=element)


def fit_length(sample: Sample, config: DataConfig) -> Sample | Rejection:
    """Apply the rule for long samples: return it unchanged, cut inside its last supervised turn, or rejected.

    The mask is that of the whole conversation, so a cut keeps exactly the supervised tokens before it. A
    sample that would have to be cut before its last turn would be a fragment, and is rejected.
    """
    length, allowed = len(sample.token_ids), config.max_length
    if length <= allowed:
        return sample
    if config.over_length == "reject":
        return Rejection(OVER_LENGTH, f"{length} tokens; allowed: {allowed}")
    supervised = np.flatnonzero(sample.loss_mask)
    breaks = np.flatnonzero(np.diff(supervised) > 1)
    last_turn = length
    if len(supervised):
        last_turn = int(supervised[breaks[-1] + 1] if len(breaks) else supervised[0])
    if last_turn + 2 > allowed:
        detail = f"{length} tokens, last turn at {last_turn}; allowed: {allowed}"
        return Rejection(f"{OVER_LENGTH} before the last turn", detail)
    notes = (*sample.notes, "last turn cut at data.max_length")
    return Sample(sample.token_ids[:allowed], sample.loss_mask[:allowed], notes)


def _check(writer: ShardWriter, config: DataConfig, path: str) -> None:
    """Raise if the file has no samples, or too many rejected rows or rows over `data.max_length`.

    The two have limits of their own. Dropped duplicates count as neither.
    """
    rows, over_length = writer.num_rows, writer.num_over_length
    rejected = writer.num_rejected - writer.num_dropped - over_length
    if writer.num_samples == 0:
        reasons = writer.rejects_summary()
        raise UserError(f"data.files: {path!r} has no usable row of {rows}; reasons:\n{reasons}")
    if rejected > config.max_reject_share * rows:
        raise UserError(
            f"data.max_reject_share: {rejected} of {rows} rows of {path!r} rejected ({rejected / rows:.1%}), "
            f"allowed: {config.max_reject_share:.1%}; most frequent reasons:\n{writer.rejects_summary()}"
        )
    if over_length > config.max_over_length_share * rows:
        raise UserError(
            f"data.max_over_length_share: {over_length} of {rows} rows of {path!r} are longer than "
            f"data.max_length ({config.max_length} tokens; {over_length / rows:.1%}), allowed: "
            f"{config.max_over_length_share:.1%}; raise data.max_length or set data.over_length: "
            f"truncate_last_turn; most frequent reasons:\n{writer.rejects_summary()}"
        )


def ingest_key_fields(config: DataConfig) -> dict[str, Any]:
    """Return the settings that determine the output of ingest, as JSON types, the chat template by content.

    The output also depends on the file's bytes, its name (the source), the tokenizer with its template and
    the mask token.
    """
    fields = {name: value for name, value in to_dict(config).items() if name not in _NOT_INGEST}
    if config.chat_template is not None:
        fields["chat_template"] = _digest(read_template(config.chat_template))
    return fields


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_name(path: Path) -> str:
    """Return the name of a file's samples in the length profile: the file's name without suffixes."""
    name = path.name.split(".")[0] or path.name
    # Names of files need not be UTF-8.
    return name.encode("utf-8", "replace").decode()


def content_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise UserError(f"data.files: {str(path)!r} cannot be read: {error}") from error
