"""Files to shards: the rules and their counts; nothing is lost silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data import ingest as ingest_module
from dflash_core.data.chat import ChatEncoder, Sample
from dflash_core.data.ingest import fit_length, ingest_file, ingest_key_fields, source_name
from dflash_core.data.store import TokenStore
from dflash_core.errors import UserError
from tests.support.chat_families import MASK_TOKEN_ID, TEMPLATES, small_tokenizer
from tests.support.row_files import chat, ingest, lines, rejects_of, write_rows


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
        (3, "no supervised turn"),
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


def test_blank_answers_and_turns_marked_as_not_to_be_trained_on(tmp_path: Path) -> None:
    first, second = chat("q1", "yes one")["messages"], chat("q2", "yes two")["messages"]
    off = [second[0], {**second[1], "loss": False}]
    rows = [{"messages": turns} for turns in (first + second, first + off, off + first, off)]
    manifest, shard = ingest(tmp_path / "x.jsonl", lines([*rows, chat("q", ""), chat("q", " \n\t ")]))
    assert rejects_of(shard) == [(line, "no supervised turn") for line in (4, 5, 6)]
    assert manifest["notes"] == {"assistant turns marked as not to be trained on are not supervised": 2}
    store = TokenStore.open([shard])
    text = [small_tokenizer().decode(store.token_ids(i)[store.loss_mask(i) == 1]) for i in range(3)]
    assert text[0].count("yes") == 2
    assert (text[1].count("yes"), "one" in text[1]) == (1, True)
    assert (text[2].count("yes"), "one" in text[2]) == (1, True)
    assert store.token_ids(0).tolist() == store.token_ids(1).tolist()


@pytest.mark.parametrize("format_name", ["auto", "messages"])
@pytest.mark.parametrize("position", [0, 150])
def test_rows_with_images_are_rejected_one_by_one(tmp_path: Path, format_name: str, position: int) -> None:
    rows = [chat(f"q{n}", "yes indeed") for n in range(200)]
    rows[position]["images"] = ["a.png"]
    manifest, shard = ingest(tmp_path / "x.jsonl", lines(rows), format=format_name)
    assert manifest["num_samples"] == 199
    assert rejects_of(shard) == [(position + 1, "images or other media")]
    with pytest.raises(UserError, match="no usable row of 1; reasons:\n.*images or other media"):
        ingest(tmp_path / "y.jsonl", lines([rows[position]]), format=format_name)


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


def test_rows_over_the_length_have_a_limit_of_their_own(tmp_path: Path) -> None:
    content = lines([chat("q", "yes")] * 60 + [chat("w" * 3000, "yes")] * 40)
    manifest, _ = ingest(tmp_path / "x.jsonl", content, max_length=200, max_reject_share=0.0)
    assert (manifest["num_samples"], manifest["num_rejected"], manifest["num_over_length"]) == (60, 40, 40)
    long_one, _ = ingest(tmp_path / "y.jsonl", lines([chat("w" * 3000, "yes")]))
    assert manifest["num_over_length_tokens"] == 40 * long_one["num_tokens"]
    with pytest.raises(UserError) as failure:
        ingest(tmp_path / "x.jsonl", max_length=200, max_over_length_share=0.3)
    assert "data.max_over_length_share: 40 of 100 rows" in str(failure.value)
    assert "raise data.max_length or set data.over_length: truncate_last_turn" in str(failure.value)
    assert "40 x over length (line 61: " in str(failure.value)
    with pytest.raises(UserError, match=r"data.max_reject_share: 1 of 101 rows"):
        ingest(tmp_path / "x.jsonl", content + b"{\n", max_length=200, max_reject_share=0.0)


def test_tokens_lost_by_cutting_and_with_rows_that_were_never_encoded_are_counted(tmp_path: Path) -> None:
    content = lines([chat("q", "yes " * 400), chat("q", "yes")])
    whole, _ = ingest(tmp_path / "x.jsonl", content)
    settings_ = {"max_length": 200, "over_length": "truncate_last_turn"}
    cut, _ = ingest(tmp_path / "x.jsonl", **settings_)
    assert (cut["num_samples"], cut["num_over_length"]) == (2, 0)
    assert cut["num_over_length_tokens"] == whole["num_tokens"] - cut["num_tokens"] > 0
    rejection = {"rejection": {"reason": "over length", "detail": "prompt of 900 tokens"}}
    unread, _ = ingest(tmp_path / "y.jsonl", lines([chat("q", "yes"), rejection]), max_length=200)
    assert (unread["num_over_length"], unread["num_over_length_tokens"]) == (1, 201)


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


def test_a_row_without_a_turn_of_the_assistant_has_no_supervised_turn(tmp_path: Path) -> None:
    rows = [chat("q", "yes"), {"messages": [{"role": "user", "content": "q"}]}]
    manifest, shard = ingest(tmp_path / "x.jsonl", lines(rows))
    assert rejects_of(shard) == [(2, "no supervised turn")]
    assert "no turn of the assistant" in manifest["reject_examples"]["no supervised turn"][0]
