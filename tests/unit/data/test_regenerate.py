"""Regeneration: the order of turns, kept turns and columns, killed runs, and the mask of cut answers."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig, RegenerateConfig, regenerated_data
from dflash_core.data import regenerate as module
from dflash_core.data.answers import Answer, AnswerCache, Request
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Sample
from dflash_core.data.ingest import ingest_file
from dflash_core.data.regenerate import Progress, regenerate_file
from dflash_core.data.store import TokenStore
from dflash_core.errors import UserError
from tests.support.chat_families import CHATML, MASK_TOKEN_ID, TEMPLATES, small_tokenizer

Row = dict[str, Any]
BY = {"model": "fake"}


def turn(role: str, content: str) -> Row:
    return {"role": role, "content": content}


class Fake:
    """Answers "a to Q" for the question Q, the newest request first; may die, cut, or reject."""

    identity = BY

    def __init__(
        self, *, dies_after: int = 10**9, cuts: str = "-", rejects: str = "-", chosen: str | None = None
    ) -> None:
        self.asked: list[list[str]] = []
        self.chosen = chosen
        self.dies_after, self.cuts, self.rejects = dies_after, cuts, rejects

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        while pending:
            if len(self.asked) == self.dies_after:
                raise KeyboardInterrupt
            request = pending.pop()
            self.asked.append([message["content"] for message in request.messages])
            question = request.messages[-1]["content"]
            if self.rejects in question:
                yield request, Rejection("rejected", question)
                continue
            if self.chosen is not None:
                token_ids = small_tokenizer()(self.chosen, add_special_tokens=False)["input_ids"]
                text = small_tokenizer().decode(token_ids, skip_special_tokens=True)
                yield request, Answer(turn("assistant", text), "stop", len(token_ids), token_ids)
                continue
            reason = "length" if self.cuts in question else "stop"
            yield request, Answer(turn("assistant", f"a to {question}"), reason, 3)


def regenerate(
    path: Path, rows: list[Row] | bytes, fake: Fake, **settings: Any
) -> tuple[list[Row | None], Row]:
    """Return the output lines (None: blank) and the summary."""
    if isinstance(rows, list):
        rows = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(rows)
    cut_turns, tokenizer = settings.pop("cut_turns", "open"), settings.pop("tokenizer", small_tokenizer())
    config = DataConfig(**settings)
    out = path.with_name("out") / path.name
    out.parent.mkdir(exist_ok=True)
    cache = AnswerCache(path.with_name("answers.sqlite"))
    encoder = ChatEncoder(tokenizer, config, None)
    try:
        summary = regenerate_file(path, out, config, encoder, fake, cache, cut_turns=cut_turns)
    finally:
        cache.close()
    return [json.loads(line) if line.strip() else None for line in out.read_bytes().splitlines()], summary


def test_turns_follow_the_targets_own_answers_and_rows_keep_order_and_ids(tmp_path: Path) -> None:
    two = [turn("system", "s"), turn("user", "q1"), turn("assistant", "old"), turn("user", "q2")]
    rows = [
        {"id": "x", "messages": [*two, turn("assistant", "older")], "note": [1]},
        {"id": 7, "messages": [turn("user", "q3"), turn("assistant", "old")]},
        {"id": 8, "messages": [turn("user", "q4")]},
    ]
    fake = Fake()
    output, summary = regenerate(tmp_path / "x.jsonl", rows, fake)
    done = {"finish_reason": "stop"}
    assert output == [
        {
            "id": "x",
            "messages": [
                turn("system", "s"),
                turn("user", "q1"),
                turn("assistant", "a to q1") | done,
                turn("user", "q2"),
                turn("assistant", "a to q2") | done,
            ],
            "regenerated_by": BY,
        },
        {
            "id": 7,
            "messages": [turn("user", "q3"), turn("assistant", "a to q3") | done],
            "regenerated_by": BY,
        },
        {
            "id": 8,
            "messages": [turn("user", "q4"), turn("assistant", "a to q4") | done],
            "regenerated_by": BY,
        },
    ]
    assert fake.asked == [["q4"], ["q3"], ["s", "q1"], ["s", "q1", "a to q1", "q2"]]
    assert (summary["num_rows"], summary["num_answers"], summary["num_tokens"]) == (3, 4, 12)


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "input": "", "output": "old", "id": 1},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "old"}], "id": 1},
        {"question": "q", "answer": "old", "id": 1},
        {"instruction": "q", "id": 1},
        {"prompt": "q", "response": None, "id": 1},
        {"prompt": "q", "id": 1},
        {"prompt": [{"role": "user", "content": "q"}], "id": 1},
    ],
)
def test_every_format_comes_out_as_messages_without_the_old_answer(tmp_path: Path, row: Row) -> None:
    [output], _ = regenerate(tmp_path / "x.jsonl", [row], Fake())
    assert output is not None
    assert output["id"] == 1
    assert "old" not in json.dumps(output)
    assert [m["content"] for m in output["messages"]] == ["q", "a to q"]


def test_a_killed_run_resumes_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    rows = [
        {"messages": [turn("user", f"q{n}"), turn("assistant", "o"), turn("user", "more")]} for n in range(3)
    ]
    killed, rest, again = Fake(dies_after=4), Fake(), Fake()
    with pytest.raises(KeyboardInterrupt):
        regenerate(tmp_path / "x.jsonl", rows, killed)
    output, summary = regenerate(tmp_path / "x.jsonl", rows, rest)
    assert len(killed.asked) == 4
    assert len(rest.asked) == 2
    assert summary["num_cached"] == 4
    assert sorted(killed.asked + rest.asked) == sorted(
        [[f"q{n}"] for n in range(3)] + [[f"q{n}", f"a to q{n}", "more"] for n in range(3)]
    )
    same, summary = regenerate(tmp_path / "x.jsonl", rows, again)
    assert (again.asked, same, summary["num_cached"]) == ([], output, 6)


def test_a_prompt_is_asked_once_per_setting(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "response": "o"}] * 3
    fake = Fake()
    output, summary = regenerate(tmp_path / "x.jsonl", rows, fake)
    assert fake.asked == [["q"]]
    assert output == [output[0]] * 3
    assert summary["num_tokens"] == 3
    other = Fake()
    other.identity = {"model": "fake", "temperature": 1.0}
    regenerate(tmp_path / "x.jsonl", rows, other)
    assert other.asked == [["q"]]


def test_rows_in_are_rows_out_and_ingest_counts_what_is_rejected(tmp_path: Path) -> None:
    content = b'{"messages": [{"role": "user", "content": "q1"}]}\n\n{"messages": [\n'
    content += b'{"messages": [{"role": "ghost", "content": "q"}]}\n{"text": "x"}\n'
    content += b'{"messages": [{"role": "user", "content": "yes \\ud800"}]}\n'
    content += json.dumps({"messages": [turn("user", "yes " * 200)]}).encode() + b"\n"
    content += json.dumps({"messages": [turn("user", "never")]}).encode() + b"\n"
    output, summary = regenerate(tmp_path / "x.jsonl", content, Fake(rejects="never"), max_length=100)
    first_columns = [None if row is None else next(iter(row)) for row in output]
    assert first_columns == ["messages", None, *["rejection"] * 6]
    assert (summary["num_rows"], summary["num_blank"], summary["num_refused"]) == (7, 1, 6)
    config = DataConfig(max_reject_share=1.0, max_length=100, format="messages")
    shard = tmp_path / "shard"
    manifest = ingest_file(
        tmp_path / "out" / "x.jsonl", config, small_tokenizer(), shard, mask_token_id=MASK_TOKEN_ID
    )
    rejects = [(r["line"], r["reason"]) for r in pq.read_table(shard / "rejects.parquet").to_pylist()]
    assert (manifest["num_rows"], manifest["num_samples"]) == (7, 1)
    assert rejects == [
        (3, "invalid JSON"),
        (4, "unknown role 'ghost'"),
        (5, "no conversation"),
        (6, "prompt rejected by the chat template"),
        (7, "over length"),
        (8, "rejected"),
    ]


def test_memory_is_bounded_by_rows_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AHEAD", 2)
    fake = Fake()
    output, _ = regenerate(
        tmp_path / "x.jsonl", [{"id": n, "prompt": f"q{n}", "response": "o"} for n in range(7)], fake
    )
    assert [row["id"] for row in output if row] == list(range(7))
    assert fake.asked == [["q1"], ["q0"], ["q3"], ["q2"], ["q5"], ["q4"], ["q6"]]


def test_turns_that_later_turns_answer_are_kept(tmp_path: Path) -> None:
    """A greeting before any question and a call whose result follows are kept; the rest is generated."""
    rows = [
        {
            "conversations": [
                {"from": "gpt", "value": "welcome"},
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": "call"},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "old"},
            ]
        }
    ]
    [output], summary = regenerate(tmp_path / "x.jsonl", rows, Fake())
    assert output is not None
    assert [m["content"] for m in output["messages"]] == ["welcome", "q", "call", "7", "a to 7"]
    assert (summary["num_kept_turns"], summary["num_answers"]) == (2, 1)


def test_a_turn_marked_as_not_to_be_trained_on_is_kept_with_its_mark() -> None:
    """Blank turns are not supervised either, but are there to be answered."""
    messages = [turn("user", "q"), turn("assistant", "kept"), turn("user", "r"), turn("assistant", " ")]
    row = module._Row(0, Conversation(messages, unsupervised=frozenset((1, 3))), {}, "open")
    assert row.next_prompt() == messages[:3]
    row.take(Answer(turn("assistant", "new"), "stop", 1), [1])
    assert row.next_prompt() is None
    written = row.output(BY)["messages"]
    assert written[1] == {**messages[1], "loss": False}
    assert written[3] == {**turn("assistant", "new"), "finish_reason": "stop"}
    assert row.num_kept == 1


def test_pretokenised_input_is_rejected_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}), tmp_path / "tokens.parquet")
    content = (tmp_path / "tokens.parquet").read_bytes()
    with pytest.raises(UserError, match="tokens.parquet' holds input_ids and loss_mask.*regenerate.enabled"):
        regenerate(tmp_path / "tokens.parquet", content, Fake())


@pytest.mark.parametrize("cut_turns", ["open", "closed"])
def test_a_cut_answer_is_supervised_up_to_its_cut(tmp_path: Path, cut_turns: str) -> None:
    rows = [
        {"messages": [turn("user", "long"), turn("assistant", ""), turn("user", "q"), turn("assistant", "")]},
    ]
    [output], summary = regenerate(tmp_path / "x.jsonl", rows, Fake(cuts="long"), cut_turns=cut_turns)
    assert output is not None
    assert summary["num_cut"] == 1
    marks = [
        (m.get("finish_reason"), m.get("open_end")) for m in output["messages"] if m["role"] == "assistant"
    ]
    assert marks == [("length", True if cut_turns == "open" else None), ("stop", None)]
    shard = tmp_path / "shard"
    path = tmp_path / "out" / "x.jsonl"
    manifest = ingest_file(path, DataConfig(), small_tokenizer(), shard, mask_token_id=MASK_TOKEN_ID)
    store = TokenStore.open([shard])
    first = "a to long" + ("" if cut_turns == "open" else "<|im_end|>")
    assert supervised(store.token_ids(0), store.loss_mask(0)) == [first, "a to q<|im_end|>"]
    assert sum(manifest["notes"].values()) == (1 if cut_turns == "open" else 0)


@pytest.mark.parametrize("chosen", ["<turn>hello<|im_end|>", "hello<|endoftext|>", "hello<|im_end|>"])
def test_ingest_reads_the_ids_that_the_target_chose(tmp_path: Path, chosen: str) -> None:
    """Special tokens and another end token are no part of the text; the ids hold them."""
    [output], summary = regenerate(
        tmp_path / "x.jsonl", [{"prompt": "q", "response": "old"}], Fake(chosen=chosen)
    )
    assert output is not None
    assert output["messages"][1]["content"] == "hello"
    assert summary["num_rows_of_ids"] == int(chosen != "hello<|im_end|>")
    assert ("tokens" in output) == bool(summary["num_rows_of_ids"])
    shard, path = tmp_path / "shard", tmp_path / "out" / "x.jsonl"
    config = regenerated_data(DataConfig())
    manifest = ingest_file(path, config, small_tokenizer(), shard, mask_token_id=MASK_TOKEN_ID)
    store = TokenStore.open([shard])
    assert supervised(store.token_ids(0), store.loss_mask(0)) == [chosen]
    assert sum(manifest["notes"].values()) == summary["num_rows_of_ids"]
    # The ids are those of this target: another one reads the text.
    other = ingest_file(
        path, DataConfig(), small_tokenizer(), tmp_path / "other", mask_token_id=MASK_TOKEN_ID
    )
    assert (other["meta"]["format"], other["num_samples"]) == ("messages", 1)
    store = TokenStore.open([tmp_path / "other"])
    assert supervised(store.token_ids(0), store.loss_mask(0)) == ["hello<|im_end|>"]


def test_template_arguments_ask_anew_and_none_asks_as_before(tmp_path: Path) -> None:
    rows, asked = [{"prompt": "q", "response": "o"}], []
    for arguments in ({}, {}, {"enable_thinking": False}, {"enable_thinking": True}):
        fake = Fake()
        regenerate(tmp_path / "x.jsonl", rows, fake, template_arguments=arguments)
        asked.append(len(fake.asked))
    assert asked == [1, 0, 1, 1]


def test_a_row_of_a_system_turn_alone_is_kept_and_rejected_by_ingest(tmp_path: Path) -> None:
    rows = [{"messages": [turn("system", "s")]}, {"messages": [turn("user", "q")]}]
    output, summary = regenerate(tmp_path / "x.jsonl", rows, Fake())
    assert output[0] == {"messages": [turn("system", "s")]}
    assert (summary["num_rows"], summary["num_answers"], summary["num_refused"]) == (2, 1, 0)
    config = regenerated_data(DataConfig(max_reject_share=1.0))
    manifest = ingest_file(
        tmp_path / "out" / "x.jsonl", config, small_tokenizer(), tmp_path / "shard", mask_token_id=None
    )
    assert (manifest["num_samples"], manifest["num_rejected"]) == (1, 1)


def test_tools_reach_the_request_and_the_written_row(tmp_path: Path) -> None:
    class Recorder(Fake):
        def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
            self.tools = [request.tools for request in pending]
            yield from super().answers(pending)

    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    tools, fake = [{"type": "function", "function": {"name": "f"}}], Recorder()
    row = {"messages": [turn("user", "q")], "tools": json.dumps(tools)}
    [output], _ = regenerate(tmp_path / "x.jsonl", [row], fake, tokenizer=tokenizer)
    assert fake.tools == [tools]
    assert output is not None
    assert output["tools"] == tools


def supervised(token_ids: Any, loss_mask: Any) -> list[str]:
    """Return the texts of the runs of supervised tokens."""
    groups = np.split(np.arange(len(loss_mask)), np.flatnonzero(np.diff(loss_mask)) + 1)
    return [small_tokenizer().decode(token_ids[g]) for g in groups if loss_mask[g[0]]]


@pytest.mark.parametrize("family", TEMPLATES)
def test_cut_turns_in_every_template_family(family: str) -> None:
    encoder = ChatEncoder(small_tokenizer(family), DataConfig(), MASK_TOKEN_ID)
    messages = [
        turn("user", "q"),
        turn("assistant", "yes"),
        turn("user", "r"),
        turn("assistant", "hello world "),
    ]

    def texts(*cut: int) -> list[str]:
        rendered = encoder.render(Conversation(messages, None, frozenset(cut)))
        assert not isinstance(rendered, Rejection), rendered
        [sample] = encoder.encode([rendered])
        assert isinstance(sample, Sample)
        return supervised(sample.token_ids, sample.loss_mask)

    whole = texts()
    end = whole[-1][-len("<end_of_turn>") :] if family == "gemma" else whole[-1][whole[-1].index("<") :]
    kept = ["yes"]
    assert whole[:-1] == [text + end for text in kept]
    assert whole[-1].replace(" ", "") == f"helloworld{end}"
    assert [text.rstrip() for text in texts(1, 3)] == [*kept, "hello world"]
    assert texts(1)[-1] == whole[-1]


def test_open_end_of_a_user_turn_is_ignored(tmp_path: Path) -> None:
    row = {"messages": [{**turn("user", "q"), "open_end": True}, turn("assistant", "yes")]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    ingest_file(tmp_path / "x.jsonl", DataConfig(), small_tokenizer(), tmp_path / "s", mask_token_id=None)
    store = TokenStore.open([tmp_path / "s"])
    assert supervised(store.token_ids(0), store.loss_mask(0)) == ["yes<|im_end|>"]


def test_progress_is_printed_while_a_batch_is_running(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("x.jsonl", seconds=0.02)
    progress.counts.update(num_rows=12, num_answers=20, num_cached=3, num_cut=1, num_tokens=960)
    expected = "regenerate x.jsonl: 12 rows, 20 answers (3 cached, 1 cut), 960 tokens, 48.0 tokens/s"
    assert progress.line(20.0) == expected
    with progress:
        progress._ended.wait(0.2)
    assert capsys.readouterr().out.count("regenerate x.jsonl: 12 rows") >= 2


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "localhost:8000"},
        {"base_url": "http://user:secret@host/v1"},
        {"model": "x"},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
    ],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"regenerate.{next(iter(settings))}: .* is not allowed; allowed: "):
        RegenerateConfig(**settings)


def test_a_kept_turn_stays_unsupervised(tmp_path: Path) -> None:
    greeting = {**turn("assistant", "hello"), "loss": False}
    row = {"messages": [greeting, turn("user", "q"), {**turn("assistant", "old"), "loss": False}]}
    output, _ = regenerate(tmp_path / "x.jsonl", [row], Fake())
    assert output[0] is not None
    assert output[0]["messages"][0] == greeting
    # What is not to be trained on need not be answered anew.
    assert output[0]["messages"][2] == row["messages"][2]
