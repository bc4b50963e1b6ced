"""Mutated rows and arbitrary bytes: samples, rejects, blank lines, or one error; nothing else."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import DataConfig
from dflash_core.data.ingest import ingest_file
from dflash_core.data.raw_rows import parse_line
from dflash_core.data.store import TokenStore
from dflash_core.errors import UserError
from tests.support.chat_families import MASK_TOKEN_ID, TEMPLATES, small_tokenizer
from tests.support.row_files import chat, ingest, lines, rejects_of

NASTY = [
    b"null", b"[]", b"{}", b'""', b"1e999", b"NaN", b"\\ud800", b"\xff", b"\0", b"<|im_end|>", b"<|mask|>",
    b"\n", b"\r", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\xe2\x80\xa8", b'"role": 3', b"[" * 2000,
    b"\xef\xbb\xbf",
]  # fmt: skip


def mutate(row: bytes, generator: random.Random) -> bytes:
    """Return the row after one to three random edits: cut, repeated, inserted or overwritten bytes."""
    for _ in range(generator.randint(1, 3)):
        position, length = generator.randrange(len(row) + 1), generator.randint(0, 12)
        kind = generator.randrange(5)
        if kind == 0:
            row = row[:position]
        elif kind == 1:
            row = row[:position] + bytes([generator.randrange(256)]) + row[position + 1 :]
        elif kind == 2:
            row = row[:position] + generator.choice(NASTY) + row[position:]
        elif kind == 3:
            row = row[:position] + generator.choice(NASTY) + row[position + length :]
        else:
            row = row[:position] + row[position : position + length] * 2 + row[position:]
    return row


NASTY_VALUES: list[Any] = [
    None, True, 0, 2**70, "", "a", "assistant", "\ud800", "\ufdd0", "\0", "<|im_end|>", "<|mask|>", "null",
    "[{}]", [], {}, [1], [[]], [{}], {"role": 3}, {"name": "f"}, ["user", "assistant"],
]  # fmt: skip


def mutate_value(value: Any, generator: random.Random) -> Any:
    """Return the value with one random part replaced: still JSON, but of another shape."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(list(value))
        return {**value, key: mutate_value(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.9:
        position = generator.randrange(len(value))
        mutated = mutate_value(value[position], generator)
        return [*value[:position], mutated, *value[position + 1 :]]
    return generator.choice(NASTY_VALUES)


WITH_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.reasoning_content or '') + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def some_tokenizer(seed: int) -> Any:
    """Return the tokenizer of a family, or one whose template renders tool calls and reasoning."""
    families = [*TEMPLATES, "calls"]
    family = families[seed % len(families)]
    if family in TEMPLATES:
        return small_tokenizer(family)
    tokenizer = copy.copy(small_tokenizer())
    tokenizer.chat_template = WITH_CALLS
    return tokenizer


SEEDS = [
    chat("What is this?", "hello world"),
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a b c"}], "system": "s"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "yes"},
        ]
    },
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}]}]},
    {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "function_call": "{}"}],
        "tools": "[]",
    },
    {"rejection": {"reason": "r", "detail": "d"}},
    {"instruction": "i", "input": "x", "output": "o"},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "yes", "reasoning": "hm"},
        ]
    },
]


def check_mutated_file(directory: Path, seed: int, num_rows: int) -> int:
    """Check that each mutated row becomes a sample, a reject or a blank line; return the number of lines."""
    generator = random.Random(seed)
    content = lines([SEEDS[0]])
    for number in range(num_rows):
        row = generator.choice(SEEDS)
        if number % 2:
            content += lines([mutate_value(row, generator)])
        else:
            content += mutate(json.dumps(row).encode(), generator) + b"\n"
    (directory / "x.jsonl").write_bytes(content)
    shard = directory / "shard"
    config = DataConfig(max_reject_share=1.0, reasoning=generator.choice(("keep", "drop")))
    manifest = ingest_file(
        directory / "x.jsonl", config, some_tokenizer(seed), shard, mask_token_id=MASK_TOKEN_ID
    )
    physical = content.split(b"\n")[:-1]
    blanks = sum(not line.removeprefix(b"\xef\xbb\xbf").strip() for line in physical)
    assert manifest["num_rows"] == manifest["num_samples"] + manifest["num_rejected"]
    # A mutation may join objects on one line: each is a row.
    assert manifest["num_rows"] + manifest["num_blank"] == sum(len(parse_line(line)) for line in physical)
    assert manifest["num_blank"] == blanks
    rejected_lines = [line for line, _ in rejects_of(shard)]
    assert rejected_lines == sorted(rejected_lines)
    store = TokenStore.open([shard])
    assert len(store) == manifest["num_samples"]
    assert all((store.token_ids(i) != MASK_TOKEN_ID).all() for i in range(len(store)))
    return len(physical)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_mutated_rows_are_samples_rejects_or_blanks(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    check_mutated_file(tmp_path_factory.mktemp("fuzz"), seed, 40)


@pytest.mark.long
def test_a_hundred_thousand_mutated_rows(tmp_path: Path) -> None:
    assert sum(check_mutated_file(tmp_path, seed, 500) for seed in range(200)) >= 100_000


@given(content=st.binary(max_size=200), name=st.sampled_from(["x.jsonl", "x.json", "x.parquet", "x"]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_bytes_are_a_data_set_or_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    prefix = (b"", b"[", b"{", b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")[len(content) % 6]
    with pytest.raises(UserError, match="data.files"):
        ingest(tmp_path_factory.mktemp("bytes") / name, prefix + content)
