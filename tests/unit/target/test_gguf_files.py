"""GGUF files of strangers: rejected by their header, before a library loops over it or builds a model."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from dflash_core.target.gguf_files import check_gguf
from dflash_core.target.materialise import materialise

HUGE = 1 << 60


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def number(name: str, value: int) -> bytes:
    return text(f"llama.{name}") + struct.pack("<IQ", 10, value)


def tensor(name: str, shape: tuple[int, ...], offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
TOKENS = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
SCORES = text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0)


def gguf(values: list[bytes], tensors: list[bytes], *, counts: tuple[int, int] | None = None) -> bytes:
    num_tensors, num_values = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values)
    return head + b"".join(values) + b"".join(tensors) + bytes(512)


SOUND = [ARCHITECTURE, TOKENS, SCORES, number("block_count", 1), number("embedding_length", 8)]


def test_a_sound_header_is_taken(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(SOUND, [tensor("embed", (8, 4))]))
    check_gguf(tmp_path / "m.gguf", field="target.name")


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "cannot mmap an empty file"),
        (b"PK\x03\x04" + bytes(99), "no GGUF file"),
        (b"GGUF\x03\x00\x00\x00", "requires a buffer"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
        (gguf(SOUND, [], counts=(0, HUGE)), "requires a buffer"),
        (gguf(SOUND, [tensor("embed", (8, 4))], counts=(HUGE, len(SOUND))), "requires a buffer|unknown"),
        (gguf([text("name", HUGE)], []), "a length of 1152921504606846976 .* leads beyond the end"),
        (gguf([text("a") + struct.pack("<IIQ", 9, 0, HUGE)], []), "leads beyond the end of the file"),
        (gguf([text("a") + struct.pack("<IIQ", 9, 8, HUGE)], []), "requires a buffer"),
        (gguf([text("a") + struct.pack("<IIQ", 9, 9, 2)], []), "an array of type 9"),
        (gguf([text("a") + struct.pack("<I", 77)], []), "unknown type 77"),
        (gguf(SOUND, [text("t") + struct.pack("<I", 99)]), "has 99 dimensions"),
        (gguf(SOUND, [tensor("t", (1 << 40, 1 << 40))]), "leads beyond the end"),
        (gguf(SOUND, [tensor("t", (8, 4), offset=HUGE)]), "leads beyond the end"),
        (
            gguf([*SOUND[:3], number("block_count", 10**9)], [tensor("t", (8, 4))]),
            "num_hidden_layers is 1000000000",
        ),
        (gguf([*SOUND, number("feed_forward_length", HUGE)], [tensor("t", (8, 4))]), "intermediate_size is"),
    ],
)
def test_a_header_that_lies_is_rejected_at_once(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=f"target.name: .*m.gguf.*({problem}).*; allowed|{problem}.*allowed by"
    ):
        materialise(str(path), tmp_path / "out" / "target")
    assert list((tmp_path / "out").iterdir()) == []
