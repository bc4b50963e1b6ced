"""Rows of a Parquet file: the columns that are needed, each value as JSON types.

Columns of other types (times, dates, intervals), also inside of structs, are not read: no format has them,
and not each of their values has one in Python. Memory holds one batch of rows and the pages behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.raw_rows import RawRow, too_large
from dflash_core.data.source_file import SourceFile

_BATCH_ROWS = 256
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)


def parquet_rows(source: SourceFile, columns: Collection[str] | None) -> Iterator[RawRow]:
    """Yield the rows of a file, each with the names of all columns; those that are not read are None.

    Args:
        source: the open file.
        columns: names of columns to read; None: all.

    Raises:
        UserError: the file is not Parquet, or is damaged.
    """
    try:
        # With a buffer size, pages are read as they are needed instead of whole column chunks.
        file = pq.ParquetFile(
            source.random_access(), buffer_size=raw_rows.CHUNK_BYTES, page_checksum_verification=True
        )
        schema, leaves = file.schema_arrow, _leaves(file, columns)
    except _DAMAGE as error:
        raise source.error(f"is not a readable Parquet file: {error}") from error
    repeated = [name for name, count in Counter(schema.names).items() if count > 1]
    if read_twice := [name for name in repeated if columns is None or name in columns]:
        raise source.error(f"has several columns named {read_twice[0]!r}; allowed: one column per name")
    number = 0
    with file:
        try:
            nested = [field.name for field in schema if _struct_depth(field.type) > 1]
            unread = dict.fromkeys(schema.names)
            for batch in file.iter_batches(batch_size=_batch_rows(file), columns=leaves):
                for value in _batch_values(batch) if leaves else ({} for _ in range(batch.num_rows)):
                    if isinstance(value, dict):
                        value = {**unread, **value}
                        for name in nested:
                            value[name] = _without_added_nulls(value[name])
                    number += 1
                    yield RawRow(None, value, number)
        except _DAMAGE as error:
            raise source.error(f"has a damaged Parquet page after row {number}: {error}") from error


def _batch_rows(file: pq.ParquetFile) -> int:
    """Return the rows of a batch: fewer where a row is large, so that a batch is about one row's limit."""
    sizes = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in sizes), default=0)
    return max(1, min(_BATCH_ROWS, raw_rows.MAX_ROW_BYTES // max(1, largest)))


def _leaves(file: pq.ParquetFile, columns: Collection[str] | None) -> list[str]:
    """Return the paths of the leaves to read, such as messages.list.element.content."""
    are_read = [
        is_read
        for field in file.schema_arrow
        for is_read in _read_leaves(field.type, columns is None or field.name in columns)
    ]
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    return [path for path, is_read in zip(paths, are_read, strict=True) if is_read]


def _read_leaves(kind: pa.DataType, is_needed: bool) -> list[bool]:
    """Return for each leaf of a type, in the order of the file, whether it is read."""
    if isinstance(kind, pa.BaseExtensionType):
        return _read_leaves(kind.storage_type, is_needed)
    if pa.types.is_dictionary(kind):
        return _read_leaves(kind.value_type, is_needed)
    if kind.num_fields:
        inner = [kind.field(i).type for i in range(kind.num_fields)]
        return [is_read for child in inner for is_read in _read_leaves(child, is_needed)]
    is_time = pa.types.is_temporal(kind) or pa.types.is_interval(kind)
    return [is_needed and not is_time]


def _struct_depth(kind: pa.DataType) -> int:
    """Return the nesting depth of structs: 1 for list<struct<role, content>>."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return max(map(_struct_depth, inner), default=0) + pa.types.is_struct(kind)


def _without_added_nulls(value: Any, depth: int = 0) -> Any:
    """Return the value without null fields of nested structs: Arrow gives every row the fields of all rows.

    Where another tool call has a day, the arguments {"city": "x"} of this one are read as {"city":
    "x", "day": null}.
    """
    if isinstance(value, list):
        return [_without_added_nulls(item, depth) for item in value]
    if isinstance(value, dict):
        items = ((k, _without_added_nulls(v, depth + 1)) for k, v in value.items())
        return {k: v for k, v in items if depth == 0 or v is not None}
    return value


def _batch_values(batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield the values of a batch; row by row where it is large or not readable as a whole."""
    if batch.nbytes <= raw_rows.MAX_ROW_BYTES:
        try:
            yield from batch.to_pylist()
            return
        except (ValueError, OverflowError):
            pass
    for row in range(batch.num_rows):
        one = batch.slice(row, 1)
        try:
            yield too_large() if one.nbytes > raw_rows.MAX_ROW_BYTES else one.to_pylist()[0]
        except UnicodeDecodeError as error:
            yield Rejection("invalid UTF-8", str(error))
        except (ValueError, OverflowError) as error:
            yield Rejection("value without a form in Python", str(error))
