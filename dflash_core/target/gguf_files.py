"""Check of a GGUF file before the library reads it: its loops run as long as the header says.

Only the header is read. A length that leads beyond the end of the file, a tensor outside of it, and a model
that is larger than its tensors are rejected. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.target.model_files import check_sizes

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Formats of the scalar types, by number; 8 is a text, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
# The largest have about 40 MB, of texts of the tokenizer.
MAX_HEADER_BYTES = 1 << 28
MAX_DIMENSIONS = 8
# Key after the name of the architecture -> key of config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
}


def check_gguf(path: Path, *, field: str) -> None:
    """Check the header of a GGUF file.

    Args:
        path: of the file.
        field: the setting that named it, for the message.

    Raises:
        UserError: it is no GGUF file, or its header lies.
    """
    try:
        with (
            path.open("rb") as file,
            contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data,
        ):
            values, shapes = _Header(data).read()
    except (OSError, ValueError, struct.error) as error:
        raise UserError(f"{field}: {path} cannot be read: {error}; allowed: a whole GGUF file") from error
    name = values.get("general.architecture")
    sizes = {key: values[f"{name}.{ours}"] for ours, key in SIZES.items() if f"{name}.{ours}" in values}
    check_sizes(sizes, shapes, path, field=field)


class _Header:
    """A reader of the header that never goes beyond the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.num_bytes, self.place = data, len(data), 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """Return the values that are single numbers or texts, and the shape of each tensor."""
        if self.data[:4] != MAGIC:
            raise ValueError("no GGUF file")
        self.place = 4
        version = self.number("I")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version}; known: {VERSIONS}")
        num_tensors, num_values = self.number("Q"), self.number("Q")
        values = {}
        # A lying number ends at the end of the file.
        for _ in range(num_values):
            name = self.text()
            value = self.value(self.number("I"))
            if value is not None:
                values[name] = value
        shapes = {}
        for _ in range(num_tensors):
            name = self.text()
            num_dimensions = self.number("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r:.80} has {num_dimensions} dimensions")
            shapes[name] = tuple(self.number("Q") for _ in range(num_dimensions))
            self.number("I")
            # One byte holds 8 numbers at most, in any quantisation.
            if self.number("Q") > self.num_bytes or math.prod(shapes[name]) > 8 * self.num_bytes:
                raise ValueError(
                    f"tensor {name!r:.80} of shape {shapes[name]} leads beyond the end of the file"
                )
        return values, shapes

    def number(self, kind: str) -> Any:
        if self.place > MAX_HEADER_BYTES:
            raise ValueError(f"a header of more than {MAX_HEADER_BYTES} bytes")
        [number] = struct.unpack_from(f"<{kind}", self.data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return number

    def skip(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes - self.place:
            raise ValueError(f"a length of {num_bytes} at byte {self.place} leads beyond the end of the file")
        self.place += num_bytes

    def text(self) -> str:
        length = self.number("Q")
        self.skip(length)
        return str(self.data[self.place - length : self.place], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return a number or a text; None for an array, whose items are passed over."""
        if kind == TEXT:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"unknown type {kind} at byte {self.place}")
        of, count = self.number("I"), self.number("Q")
        if of in SCALARS:
            self.skip(count * struct.calcsize(f"<{SCALARS[of]}"))
        elif of == TEXT:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise ValueError(f"an array of type {of} at byte {self.place}")
        return None
