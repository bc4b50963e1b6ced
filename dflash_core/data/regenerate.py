"""Conversations whose assistant turns the target writes anew: raw file in, `messages` JSONL out.

- Rows in = rows out, in order, each on the line that it has in a JSONL input. A row that cannot be used becomes
  `{"rejection": {"reason", "detail"}}`, which ingest counts and keeps as it would have.
- Prompts stay: system, user and tool turns, tools, and columns of plain values, so row ids too. A conversation
  that ends with a question gets its answer.
- Each assistant turn is asked for in order, after the target's own answers to the turns before. Two kinds of
  turns stay as they are: one before any question, and one whose tool calls the next turn answers.
- A turn that the token limit cut says `finish_reason: length` and, unless `regenerate.cut_turns` is closed,
  `open_end: true`: ingest then doesn't supervise the end of turn which the template writes after it.
- Every answer is on disk before it is used: a run that was killed asks only for the rest, and a prompt that
  comes twice is asked for once.

Rows are read at most 1,024 ahead of the first one that still waits, whatever the size of the file.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dflash_core.config import DATA_COLUMNS, DataConfig
from dflash_core.data.answers import LENGTH, Answer, AnswerCache, Generator, Message, Request
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection
from dflash_core.data.containers import RawRow
from dflash_core.data.formats import REASONING_FIELDS, RowReader
from dflash_core.data.ingest import open_rows
from dflash_core.errors import UserError

ROWS_AHEAD = 1024
LINE_SECONDS = 10.0  # between lines of progress where there is no terminal
_FORMAT_COLUMNS = {*DATA_COLUMNS, "regenerated_by", "rejection"}


def regenerate_file(
    path: Path | str,
    out_path: Path,
    config: DataConfig,
    encoder: ChatEncoder,
    generator: Generator,
    cache: AnswerCache,
    *,
    cut_turns: str = "open",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the file with the target's answers.

    Args:
        path: a file, or "stdlib".
        config: the rules by which ingest reads the same file.
        encoder: of the target's tokenizer; prompts longer than `data.max_length` are refused unasked.
        cut_turns: see `RegenerateConfig`.

    Returns:
        Counts of rows and answers, notes, and `digest`, the sha256 of what was written.

    Raises:
        UserError: the file is pre-tokenised or no data set at all, or the generator cannot be used.
    """
    format_name, rows = open_rows(path, config, answered=False)
    if format_name == "tokenised":
        raise UserError(
            f"data.files: {str(path)!r} holds input_ids and loss_mask, and regenerate.enabled is true; allowed: "
            "conversations, whose assistant turns can be written anew, or regenerate.enabled false"
        )
    progress = progress or Progress(str(path), quiet=True)
    with open(out_path, "wb") as file, progress:
        work = _Regeneration(config, encoder, generator, cache, file, progress, cut_turns)
        reader = RowReader(format_name, config, reads=encoder.template.reads, notes=work.notes)
        work.run(rows, reader)
    counts = {name: work.counts[name] for name in COUNTS}
    return {**counts, "notes": dict(work.notes), "digest": work.hasher.hexdigest()}


COUNTS = (
    "num_rows", "num_blank", "num_refused", "num_answers", "num_cached", "num_cut", "num_kept_turns", "num_tokens",
)  # fmt: skip


@dataclass
class _Row:
    """A conversation on its way: what the target is shown, and what will be written."""

    number: int
    conversation: Conversation
    columns: dict[str, Any]
    cut_turns: str
    shown: list[Message] = field(default_factory=list)
    written: list[Message] = field(default_factory=list)
    num_answers: int = 0
    num_kept: int = 0

    def next_prompt(self) -> list[Message] | None:
        """The conversation up to the next turn that the target writes; None when there is none left.

        system, user, assistant, user -> [system, user], then with the answer [system, user, answer, user].
        """
        given = self.conversation.messages
        while len(self.shown) < len(given):
            number = len(self.shown)
            if given[number]["role"] == "assistant" and not self._stays(number):
                return self.shown
            self.num_kept += given[number]["role"] == "assistant"
            turn = dict(given[number])
            self.shown.append(turn)
            self.written.append({**turn, "open_end": True} if number in self.conversation.open_ends else turn)
        return self.shown if self.shown and self.shown[-1]["role"] in ("user", "tool") else None

    def _stays(self, number: int) -> bool:
        given = self.conversation.messages
        asked = any(message["role"] in ("user", "tool") for message in given[:number])
        return not asked or any(message["role"] == "tool" for message in given[number + 1 : number + 2])

    def take(self, answer: Answer) -> None:
        """The next turn is this answer."""
        mark: dict[str, Any] = {"finish_reason": answer.finish_reason}
        if answer.finish_reason == LENGTH and self.cut_turns == "open":
            mark["open_end"] = True
        self.shown.append({k: v for k, v in answer.message.items() if k not in REASONING_FIELDS})
        self.written.append({**answer.message, **mark})
        self.num_answers += 1

    def output(self, identity: dict[str, Any]) -> dict[str, Any]:
        """The row as it is written."""
        tools = {"tools": self.conversation.tools} if self.conversation.tools else {}
        by = {"regenerated_by": identity} if self.num_answers else {}
        return {**self.columns, "messages": self.written, **tools, **by}


class _Regeneration:
    """Rows that were read and not yet written, and which of them wait for which answer."""

    def __init__(
        self,
        config: DataConfig,
        encoder: ChatEncoder,
        generator: Generator,
        cache: AnswerCache,
        file: BinaryIO,
        progress: Progress,
        cut_turns: str,
    ) -> None:
        self.config, self.encoder, self.generator = config, encoder, generator
        self.cache, self.file, self.cut_turns = cache, file, cut_turns
        self.counts, self.notes = progress.counts, Counter[str]()
        self.hasher = hashlib.sha256()
        self._settings = {"by": generator.identity, "template": encoder.template.text}
        self._pending: deque[Request] = deque()
        self._waiting: dict[str, list[_Row]] = {}
        self._done: dict[int, Any] = {}
        self._num_read = self._num_written = 0

    def run(self, rows: Any, reader: RowReader) -> None:
        self._read_ahead(rows, reader)
        for request, answer in self.generator.answers(self._pending):
            if isinstance(answer, Answer):
                self.cache.put(request.key, answer)
                self.counts["num_tokens"] += answer.num_tokens
            for row in self._waiting.pop(request.key):
                if isinstance(answer, Rejection):
                    self._refuse(row.number, answer)
                else:
                    self._take(row, answer)
                    self._ask(row)
            self._read_ahead(rows, reader)
        assert not self._waiting and not self._done

    def _read_ahead(self, rows: Any, reader: RowReader) -> None:
        while self._num_read - self._num_written < ROWS_AHEAD:
            raw: RawRow | None = next(rows, None)
            if raw is None:
                return
            number, self._num_read = self._num_read, self._num_read + 1
            if raw.value is None:
                self.counts["num_blank"] += 1
                self._finish(number, None)
                continue
            self.counts["num_rows"] += 1
            read = raw.value if isinstance(raw.value, Rejection) else reader.read(raw.value)
            if isinstance(read, Rejection):
                self._refuse(number, read)
                continue
            assert isinstance(read, Conversation)
            self._ask(_Row(number, read, self._columns(raw.value), self.cut_turns))

    def _columns(self, value: dict[str, Any]) -> dict[str, Any]:
        """Ids and other plain values of a row, less what its format reads as the conversation."""
        read = _FORMAT_COLUMNS | set(self.config.columns.values())
        return {k: v for k, v in value.items() if k not in read and isinstance(v, str | int | float | bool)}

    def _ask(self, row: _Row) -> None:
        """Goes on with a row until it waits for an answer, is refused, or is complete."""
        while (messages := row.next_prompt()) is not None:
            request = self._request(messages, row.conversation.tools)
            if isinstance(request, Rejection):
                self._refuse(row.number, request)
                return
            if request.key in self._waiting:
                self._waiting[request.key].append(row)
                return
            answer = self.cache.get(request.key)
            if answer is None:
                self._waiting[request.key] = [row]
                self._pending.append(request)
                return
            self.counts["num_cached"] += 1
            self._take(row, answer)
        self.counts["num_kept_turns"] += row.num_kept
        self._finish(row.number, row.output(self.generator.identity))

    def _request(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Request | Rejection:
        token_ids = self.encoder.prompt_ids(messages, tools)
        if isinstance(token_ids, Rejection):
            return token_ids
        if len(token_ids) + 2 > self.config.max_length:  # no sample with two supervised tokens would fit
            detail = f"prompt of {len(token_ids)} tokens; data.max_length: {self.config.max_length}"
            return Rejection("over length", detail)
        text = json.dumps([self._settings, messages, tools], sort_keys=True, default=str)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return Request(key, list(messages), tools, token_ids)

    def _take(self, row: _Row, answer: Answer) -> None:
        row.take(answer)
        self.counts["num_answers"] += 1
        self.counts["num_cut"] += answer.finish_reason == LENGTH

    def _refuse(self, number: int, rejection: Rejection) -> None:
        self.counts["num_refused"] += 1
        self._finish(number, {"rejection": {"reason": rejection.reason, "detail": rejection.detail}})

    def _finish(self, number: int, output: dict[str, Any] | None) -> None:
        """Writes what is complete up to the first row that still waits; a blank line stays one."""
        self._done[number] = output
        while self._num_written in self._done:
            done = self._done.pop(self._num_written)
            line = b"\n" if done is None else json.dumps(done, default=str).encode() + b"\n"
            self.file.write(line)
            self.hasher.update(line)
            self._num_written += 1


class Progress:
    """Says how far a file is: a line every ten seconds, in a terminal one that renews itself; and at the end.

    A thread of its own speaks, so that a long batch is no silence.
    """

    def __init__(self, name: str, *, quiet: bool = False, seconds: float = LINE_SECONDS) -> None:
        self.name, self.quiet, self.counts = name, quiet, Counter[str]()
        self._in_place = sys.stdout.isatty()
        self._seconds = 1.0 if self._in_place else seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> Progress:
        self._started = time.perf_counter()
        if not self.quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self.quiet:
            self._thread.join()
            self._show(last=True)

    def _speak(self) -> None:
        while not self._ended.wait(self._seconds):
            self._show()

    def _show(self, last: bool = False) -> None:
        seconds = time.perf_counter() - self._started
        print(self.line(seconds), end="\r" if self._in_place and not last else "\n", flush=True)

    def line(self, seconds: float) -> str:
        """regenerate a.jsonl: 12 rows, 20 answers (3 kept from before, 1 cut), 960 tokens, 48.0 tokens/s"""
        c = self.counts
        return (
            f"regenerate {self.name}: {c['num_rows']} rows, {c['num_answers']} answers ({c['num_cached']} kept "
            f"from before, {c['num_cut']} cut), {c['num_tokens']} tokens, {c['num_tokens'] / seconds:.1f} tokens/s"
        )
