"""Previews of samples: whole characters, supervised text in green, one underlined token per anchor."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from dflash_core.config import RunConfig
from tasks.preview import choose, file_rows, render_sample


class Bytes:
    """A tokenizer whose tokens are single bytes of UTF-8."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_sample_in_colours() -> None:
    text = "a\x1b é!"
    # a ESC space C3 A9 !
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    store = SimpleNamespace(
        token_ids=lambda row: ids,
        loss_mask=lambda row: np.array([0, 0, 0, 1, 1, 1], np.uint8),
        sample_id=lambda row: b"x" * 16,
        sources=["chats"],
        source_id=[0],
        is_validation=[False],
    )
    shown = render_sample(store, 0, Bytes(), RunConfig())
    head, body = shown.plain.split("\n", 1)
    assert head == "sample 0, source chats: 6 tokens, 3 supervised, 2 eligible anchors, 2 drawn, training"
    # An escape in the data cannot control the terminal.
    assert body == "a\u241b é!"
    styled = {shown.plain[s.start : s.end]: str(s.style) for s in shown.spans}
    assert styled["a\u241b "] == "dim"
    assert styled["é"] == "green underline"
    assert styled["!"] == "green"


def test_without_colours_brackets_show_the_mask() -> None:
    store = SimpleNamespace(
        token_ids=lambda row: np.frombuffer(b"q:ab!cd", dtype=np.uint8).astype(np.int32),
        loss_mask=lambda row: np.array([0, 0, 1, 1, 0, 1, 1], np.uint8),
        sample_id=lambda row: b"x" * 16,
        sources=["chats"],
        source_id=[0],
        is_validation=[True],
    )
    body = render_sample(store, 0, Bytes(), RunConfig(), marks=True).plain.split("\n", 1)[1]
    assert body == "q:\u27e6ab\u27e7!\u27e6cd\u27e7"


def test_summary_of_each_file() -> None:
    pointer = {"source": "a.jsonl", "format": "messages", "num_samples": 3, "num_rows": 5}
    counts = {"rejects": {"over length": 2}, "notes": {"reasoning dropped": 1}}
    assert file_rows([pointer | counts]) == [
        ("a.jsonl", "messages: 3 samples of 5 rows\n2 rejected: over length\n1 kept: reasoning dropped")
    ]


def test_shown_samples_are_spread_over_the_lengths() -> None:
    assert choose(np.array([5, 1, 9, 3, 7]), 3) == [1, 0, 2]
    assert choose(np.array([5, 1]), 3) == [1, 0]
