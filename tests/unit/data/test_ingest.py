"""Files to shards: the rules and their counts; nothing is lost silently."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import DataConfig
from dflash_core.data import format_detection, formats
from dflash_core.data import ingest as ingest_module
from dflash_core.data.chat import ChatEncoder, Sample
from dflash_core.data.ingest import fit_length, ingest_file, ingest_key_fields, source_name
from dflash_core.data.store import TokenStore
from dflash_core.errors import UserError
from tests.support.chat_families import MASK_TOKEN_ID, TEMPLATES, small_tokenizer
from tests.support.row_files import chat, lines, write_rows


def ingest(path: Path, content: bytes | None = None, **settings_: Any) -> tuple[dict[str, Any], Path]:
    if content is not None:
        path.write_bytes(content)
    out = path.parent / f"{path.name}.shard"
    config = DataConfig(**{"max_reject_share": 1.0, **settings_})
    return ingest_file(path, config, small_tokenizer(), out, mask_token_id=MASK_TOKEN_ID), out


def rejects_of(shard: Path, place: str = "line") -> list[tuple[int, str]]:
    return [(r[place], r["reason"]) for r in pq.read_table(shard / "rejects.parquet").to_pylist()]


def test_counts_and_lines_of_a_dirty_file(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbf"
        + lines([chat("q1", "yes a1")])
        + b"\r\n"
        + lines([chat("q2", None)])
        + b'{"messages": [\n'
    )
    content += lines([{"text": "x"}, chat("<|mask|>", "yes"), chat("q3", "yes a3")]) + b"\n"
    manifest, shard = ingest(tmp_path / "x.jsonl", content)
    assert (manifest["num_rows"], manifest["num_blank"], manifest["num_samples"]) == (6, 2, 2)
    assert rejects_of(shard) == [
        (3, "no eligible anchor"),
        (4, "invalid JSON"),
        (5, "no conversation"),
        (6, "mask token in data"),
    ]
    assert manifest["num_rejected"] == 4
    assert manifest["meta"]["format"] == "messages"
    store = TokenStore.open([shard])
    assert store.sources == ["x"]
    decoded = [small_tokenizer().decode(store.token_ids(i)) for i in range(2)]
    assert all("\ufeff" not in text and "\r" not in text for text in decoded)


def test_column_types_may_change_late_in_a_file(tmp_path: Path) -> None:
    rows = [
        {**chat(f"q{n}", "yes indeed"), "extra": None if n < 1100 else {"deep": [n]}} for n in range(1200)
    ]
    manifest, _ = ingest(tmp_path / "x.jsonl", lines(rows))
    assert (manifest["num_samples"], manifest["num_rejected"]) == (1200, 0)


def test_ids_are_not_keys_and_repeats_are_counted_or_dropped(tmp_path: Path) -> None:
    rows = [{**chat("q", "yes"), "id": 1}, {**chat("p", "yes"), "id": 1}, {**chat("q", "yes"), "id": 2}]
    kept, _ = ingest(tmp_path / "x.jsonl", lines(rows))
    assert (kept["num_samples"], kept["num_duplicates"]) == (3, 1)
    dropped, shard = ingest(tmp_path / "x.jsonl", drop_duplicates=True, max_reject_share=0.0)
    assert (dropped["num_samples"], dropped["num_duplicates"]) == (2, 1)
    assert rejects_of(shard) == [(3, "duplicate")]


def test_over_long_samples_are_rejected_by_default(tmp_path: Path) -> None:
    rows = [chat("q", "yes"), chat("w" * 3000, "yes")]
    manifest, shard = ingest(tmp_path / "x.jsonl", lines(rows), max_length=200)
    assert manifest["num_samples"] == 1
    assert rejects_of(shard) == [(2, "over length")]


def test_truncation_cuts_the_last_turn_only() -> None:
    config = DataConfig(max_length=6, over_length="truncate_last_turn")

    def cut(mask: list[int]) -> Any:
        return fit_length(
            Sample(np.arange(len(mask), dtype=np.int32), np.array(mask, dtype=np.uint8)), config
        )

    assert cut([0, 0, 1, 1, 0, 1]).token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert cut([0, 0, 1, 0, 1, 1, 1, 1]).token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert cut([0, 0, 1, 0, 1, 1, 1, 1]).loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert cut([0, 0, 1, 0, 1, 1, 1, 1]).notes == ("last turn cut at data.max_length",)
    assert cut([0, 1, 1, 0, 0, 1, 1, 1]).reason == "over length before the last turn"
    assert cut([0, 0, 0, 0, 0, 0, 0, 1, 1]).reason == "over length before the last turn"
    assert cut([0] * 9).reason == "over length before the last turn"


def test_too_many_rejected_rows_fail_with_the_reasons(tmp_path: Path) -> None:
    content = (
        lines([chat("q", "yes")] * 90 + [{"messages": [{"role": "laguna_s", "content": "a"}]}] * 8)
        + b"{\n{\n"
    )
    with pytest.raises(UserError) as failure:
        ingest(tmp_path / "x.jsonl", content, max_reject_share=0.05)
    message = str(failure.value)
    assert "10 of 100 rows" in message
    assert "x.jsonl" in message
    assert "data.max_reject_share" in message
    assert "8 x unknown role 'laguna_s' (line 91: turn 0" in message
    assert "2 x invalid JSON (line 99:" in message
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    manifest, _ = ingest(tmp_path / "x.jsonl", max_reject_share=0.1)
    assert manifest["num_rejected"] == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows"),
        (b"\n\n", "no rows"),
        (
            b"once upon a time\nthere was\n",
            "no rows that are objects.*; line 1: invalid JSON .*; allowed: one JSON",
        ),
        (b'{\n "a": 1,\n "b": nope\n}', "line 1: invalid JSON .*allowed: one JSON object per line"),
        (json.dumps({"data": [chat("q", "yes")]}, indent=1).encode(), "columns seen: data"),
        (lines([chat("q", "yes")["messages"]] * 2), "line 1: not a JSON object"),
        (
            lines([{"messages": [{"role": "user", "content": "q"}]}] * 50),
            "holds prompts only; columns seen: messages",
        ),
        (lines([chat("q", None)]), "no usable row of 1"),
        (lines([{"text": "x"}]), "columns seen: text"),
    ],
)
def test_a_file_without_a_usable_row_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ingest(tmp_path / "x.jsonl", content)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_pretokenised_parquet(tmp_path: Path) -> None:
    ids = [[20, 21, 22], [20, 21], [20, MASK_TOKEN_ID, 21], [20, 5000, 21], [20, 21, 22], [20, 21, 22], None]
    masks = [[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 2], [0, 1, 0], [1]]
    table = pa.table(
        {
            "input_ids": pa.array(ids, pa.large_list(pa.int64())),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    manifest, shard = ingest(tmp_path / "x.parquet")
    assert manifest["meta"]["format"] == "tokenised"
    assert TokenStore.open([shard]).token_ids(0).tolist() == [20, 21, 22]
    assert rejects_of(shard, "element") == [
        (2, "wrong shape"),
        (3, "mask token in data"),
        (4, "token outside the vocabulary"),
        (5, "wrong shape"),
        (6, "no eligible anchor"),
        (7, "no input_ids and loss_mask"),
    ]


def test_text_from_data_is_sanitised_in_reports(tmp_path: Path) -> None:
    rejected = {"rejection": {"reason": "\ud800" + "x" * 9999, "detail": "\udfff"}}
    rows = [chat("q", "yes"), rejected, {"\udc00": 1}]
    manifest, shard = ingest(tmp_path / "x.jsonl", lines(rows))
    assert rejects_of(shard) == [(2, "?" + "x" * 499), (3, "no conversation")]
    assert json.dumps(manifest, ensure_ascii=False).encode()
    with pytest.raises(UserError, match=r"columns seen: \\udc00"):
        ingest(tmp_path / "x.jsonl", lines([{"\udc00": 1}]))
    assert source_name(Path("a\udcff.jsonl")) == "a?"


def test_blank_lines_do_not_hide_the_format(tmp_path: Path) -> None:
    manifest, _ = ingest(tmp_path / "x.jsonl", b"\n" * 300 + lines([chat("q", "yes")]))
    assert (manifest["num_blank"], manifest["num_samples"]) == (300, 1)


def test_limit_counts_rows_not_lines(tmp_path: Path) -> None:
    content = b"\n" + lines([chat("q1", "yes")]) + b"\n{\n" + lines([chat("q2", "yes"), chat("q3", "yes")])
    manifest, _ = ingest(tmp_path / "x.jsonl", content, limit=3)
    assert (manifest["num_rows"], manifest["num_samples"], manifest["num_rejected"]) == (3, 2, 1)


def test_batch_borders_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [chat("q" * (n % 7), f"yes {n}" if n % 5 else "<|im_end|> no") for n in range(100)]
    whole, _ = ingest(tmp_path / "x.jsonl", lines(rows))
    progress: list[int] = []
    monkeypatch.setattr(ingest_module, "_BATCH_ROWS", 7)
    path = tmp_path / "x.jsonl"
    in_batches = ingest_file(
        path,
        DataConfig(max_reject_share=1.0),
        small_tokenizer(),
        tmp_path / "y",
        mask_token_id=MASK_TOKEN_ID,
        progress=progress.append,
    )
    assert in_batches == whole
    assert progress[-1] == 100


def test_the_same_rows_in_any_container_give_the_same_samples(tmp_path: Path) -> None:
    rows = [chat(f"q{n}", f"yes {n}") for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    pq.write_table(pa.table({"messages": [json.dumps(r["messages"]) for r in rows]}), tmp_path / "d.parquet")
    shards = [
        ingest(tmp_path / "a.jsonl", lines(rows))[1],
        ingest(tmp_path / "b.json", json.dumps(rows).encode())[1],
        ingest(tmp_path / "c.parquet")[1],
        ingest(tmp_path / "d.parquet")[1],
    ]
    stores = [TokenStore.open([shard]) for shard in shards]
    for store in stores:
        assert [store.sample_id(i) for i in range(20)] == [stores[0].sample_id(i) for i in range(20)]


def test_what_cannot_fit_is_not_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 MB of text took 8 GB, only to be rejected as over length."""
    encoded: list[int] = []
    tokenise = ChatEncoder.tokenise

    def counted(encoder: ChatEncoder, rendered: Any) -> Any:
        encoded.extend(len(text.text) for text in rendered)
        return tokenise(encoder, rendered)

    monkeypatch.setattr(ChatEncoder, "tokenise", counted)
    rows = [
        chat("q", "yes"),
        chat("q", "w" * 3_000_000),
        chat("<|im_end|>", "w " * 3_000_000),
        chat("p", "yes"),
    ]
    for name in ("x.jsonl", "x.json", "x.parquet"):
        path, _ = write_rows(tmp_path / name, rows)
        for over_length in ("reject", "truncate_last_turn"):
            manifest, shard = ingest(path, over_length=over_length)
            assert manifest["rejects"] == {"over length": 2}
            example = manifest["reject_examples"]["over length"][0]
            assert "3000119 bytes; 3072 tokens hold at most 43008" in example
            assert len(TokenStore.open([shard])) == 2
    assert max(encoded) < 1000


def test_the_place_of_a_reject_is_that_of_its_container(tmp_path: Path) -> None:
    rows = [chat("q", "yes"), {"messages": [{"role": "user"}]}, chat("q", "yes")]
    places = {"x.jsonl": (2, None), "x.json": (1, 2), "x.parquet": (None, 2)}
    texts = {"x.jsonl": "line 2: turn 0", "x.json": "line 1, element 2: turn 0", "x.parquet": "row 2: "}
    for name, place in places.items():
        path, _ = write_rows(tmp_path / name, rows)
        manifest, shard = ingest(path)
        [row] = pq.read_table(shard / "rejects.parquet").to_pylist()
        assert (row["line"], row["element"]) == place
        assert next(iter(manifest["reject_examples"].values()))[0].startswith(texts[name])


def test_every_column_that_the_code_names_is_read() -> None:
    """Each text by which `row[...]` or `row.get(...)` is read in the formats and their detection."""
    names = set()
    for module in (formats, format_detection):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            key = None
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "row":
                key = node.slice
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "row.get":
                key = node.args[0]
            if isinstance(key, ast.Constant):
                names.add(key.value)
    assert {"tools", "rejection", "input_ids", "history"} <= names
    assert names <= ingest_module.READ_COLUMNS


def test_key_fields_hold_the_template_by_content(tmp_path: Path) -> None:
    template = tmp_path / "a.jinja"
    template.write_text(TEMPLATES["gemma"])
    (tmp_path / "b.jinja").write_text(TEMPLATES["gemma"])
    one = ingest_key_fields(DataConfig(chat_template=str(template)))
    assert one == ingest_key_fields(DataConfig(chat_template=str(tmp_path / "b.jinja"), files=("x",)))
    assert one != ingest_key_fields(DataConfig())
    template.write_text(TEMPLATES["llama"])
    assert one != ingest_key_fields(DataConfig(chat_template=str(template)))
    with pytest.raises(UserError, match="none.jinja"):
        ingest_key_fields(DataConfig(chat_template=str(tmp_path / "none.jinja")))


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
    assert manifest["num_rows"] + manifest["num_blank"] == len(physical)
    assert manifest["num_blank"] == blanks
    rejected_lines = [line for line, _ in rejects_of(shard)]
    assert rejected_lines == sorted(set(rejected_lines))
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
