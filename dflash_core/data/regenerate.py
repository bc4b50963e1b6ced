"""Regeneration: the target rewrites the assistant turns of conversations. Raw file in, `messages` JSONL out.

- Rows in = rows out, in order, each on the line that it has in a JSONL input. A row that cannot be used
  becomes `{"rejection": {"reason", "detail"}}`, which ingest counts and keeps like its own rejections.
- Prompts are kept: system, user and tool turns, tools, and columns of plain values, including row ids. A
  conversation that ends with a question gets its answer.
- Assistant turns are generated in order, each after the target's own answers to the earlier turns. Two kinds
  of turns are kept unchanged: one before any question, and one whose tool calls the next turn answers.
- A turn that is marked as not to be trained on (`"loss": false`) is kept too, with its mark.
- A row whose text would encode to other ids than the target chose also holds `tokens`, with the ids and their
  loss mask (`chosen_ids.py`): ingest then uses these. An endpoint's answers are known as text alone; those
  whose text encodes to another number of ids than was generated are counted (`num_other_ids`).
- A turn that was cut at the token limit has `finish_reason: length` and, unless `regenerate.cut_turns` is
  closed, `open_end: true`: ingest then does not supervise the end of turn that the template writes after it.
- Every answer is on disk before it is used: a run that was killed generates only the remaining answers, and a
  prompt that occurs twice is generated once.

At most 1,024 rows are read ahead of the first unfinished one, whatever the size of the file.
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

from dflash_core.config import DATA_COLUMNS, DataConfig, regenerated_data
from dflash_core.data.answers import LENGTH, Answer, AnswerCache, Generator, Message, Request
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection
from dflash_core.data.chosen_ids import GeneratedTurn, chosen_ids
from dflash_core.data.containers import RawRow
from dflash_core.data.formats import RowReader
from dflash_core.data.source_rows import open_rows
from dflash_core.data.turns import REASONING_FIELDS
from dflash_core.errors import UserError

ROWS_AHEAD = 1024
# Seconds between progress lines where the output is not a terminal.
LINE_SECONDS = 10.0
COUNTS: tuple[str, ...] = ("num_rows", "num_blank", "num_refused")
COUNTS += ("num_answers", "num_cached", "num_cut", "num_kept_turns", "num_tokens")
COUNTS += ("num_rows_of_ids", "num_other_ids")
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
    digest: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the file with the target's answers.

    Args:
        path: a file, or "stdlib".
        out_path: the JSONL file to write.
        config: the rules by which ingest reads the same file.
        encoder: encoder with the target's tokenizer. Prompts longer than `data.max_length` are
            rejected without asking.
        generator: writes the answers.
        cache: answers of earlier runs, extended by those of this one.
        cut_turns: see `RegenerateConfig`.
        digest: sha256 of the file's bytes; other bytes fail the file. None: not checked.
        progress: shown while the file is written; None: nothing is printed.

    Returns:
        Counts of rows and answers, notes, and `digest`, the sha256 of the written file.

    Raises:
        UserError: the file is pre-tokenised or not a data set, has changed, or the generator cannot be used.
    """
    format_name, rows = open_rows(path, config, answered=False, digest=digest)
    if format_name == "tokenised":
        raise UserError(
            f"data.files: {str(path)!r} holds input_ids and loss_mask, and regenerate.enabled is true; "
            "allowed: conversations, whose assistant turns can be regenerated, or regenerate.enabled false"
        )
    progress = progress or Progress(str(path), quiet=True)
    with open(out_path, "wb") as file, progress:
        format_name = "messages" if format_name == "regenerated" else format_name
        work = _Regeneration(config, encoder, generator, cache, file, progress, cut_turns)
        reader = RowReader(format_name, config, reads=encoder.reads, notes=work.notes, answered=False)
        work.run(rows, reader)
    counts = {name: work.counts[name] for name in COUNTS}
    return {**counts, "notes": dict(work.notes), "digest": work.hasher.hexdigest()}


@dataclass
class _Row:
    """A conversation in progress: the messages that the target sees, and those that will be written."""

    number: int
    conversation: Conversation
    columns: dict[str, Any]
    cut_turns: str
    shown: list[Message] = field(default_factory=list)
    written: list[Message] = field(default_factory=list)
    num_answers: int = 0
    num_kept: int = 0
    generated: dict[int, GeneratedTurn] = field(default_factory=dict)

    def next_prompt(self) -> list[Message] | None:
        """Return the conversation up to the next turn to generate; None if no such turn is left.

        system, user, assistant, user -> [system, user], then with the answer [system, user, answer, user].
        """
        messages = self.conversation.messages
        while len(self.shown) < len(messages):
            number = len(self.shown)
            if messages[number]["role"] == "assistant" and not self._is_kept(number):
                return self.shown
            self.num_kept += messages[number]["role"] == "assistant"
            self.shown.append(dict(messages[number]))
            self.written.append({**messages[number], **self._marks(number)})
        return self.shown if self.shown and self.shown[-1]["role"] in ("user", "tool") else None

    def _marks(self, number: int) -> dict[str, Any]:
        """Return the marks of a turn that is kept."""
        marks: dict[str, Any] = {"open_end": True} if number in self.conversation.open_ends else {}
        return {**marks, "loss": False} if self._is_untrained(number) else marks

    def _is_untrained(self, number: int) -> bool:
        """Return True for a turn marked as not to be trained on. Blank turns are not supervised either."""
        message = self.conversation.messages[number]
        is_blank = not message["content"].strip() and not message.get("tool_calls")
        return number in self.conversation.unsupervised and not is_blank

    def _is_kept(self, number: int) -> bool:
        if self._is_untrained(number):
            return True
        messages = self.conversation.messages
        is_asked = any(message["role"] in ("user", "tool") for message in messages[:number])
        return not is_asked or any(message["role"] == "tool" for message in messages[number + 1 : number + 2])

    def take(self, answer: Answer, prompt_ids: list[int]) -> None:
        """Append this answer to the prompt with these ids as the next turn."""
        self.generated[len(self.written)] = GeneratedTurn(prompt_ids, answer)
        mark: dict[str, Any] = {"finish_reason": answer.finish_reason}
        if answer.finish_reason == LENGTH and self.cut_turns == "open":
            mark["open_end"] = True
        self.shown.append({k: v for k, v in answer.message.items() if k not in REASONING_FIELDS})
        self.written.append({**answer.message, **mark})
        self.num_answers += 1

    def output(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Return the row as it is written, without ids."""
        tools = {"tools": self.conversation.tools} if self.conversation.tools else {}
        origin = {"regenerated_by": identity} if self.num_answers else {}
        return {**self.columns, "messages": self.written, **tools, **origin}


class _Regeneration:
    """Rows that were read but not yet written, by the answer that each waits for."""

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
        self._settings = {"by": generator.identity, "template": encoder.template_text}
        # Reads a written row as ingest will; its remarks are ingest's.
        written = regenerated_data(config)
        self._rereader = RowReader(written.format, written, reads=encoder.reads, notes=Counter())
        self._pending: deque[Request] = deque()
        self._waiting: dict[str, list[_Row]] = {}
        self._finished: dict[int, Any] = {}
        self._num_read = self._num_written = 0

    def run(self, rows: Any, reader: RowReader) -> None:
        self._read_ahead(rows, reader)
        for request, answer in self.generator.answers(self._pending):
            if isinstance(answer, Answer):
                self.cache.put(request.key, answer)
                self.counts["num_tokens"] += answer.num_tokens
            for row in self._waiting.pop(request.key):
                if isinstance(answer, Rejection):
                    self._reject(row.number, answer)
                else:
                    self._take(row, answer, request)
                    self._ask(row)
            self._read_ahead(rows, reader)
        assert not self._waiting
        assert not self._finished

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
            conversation = raw.value if isinstance(raw.value, Rejection) else reader.read(raw.value)
            if isinstance(conversation, Rejection):
                self._reject(number, conversation)
                continue
            assert isinstance(conversation, Conversation)
            self._ask(_Row(number, conversation, self._columns(raw.value), self.cut_turns))

    def _columns(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return ids and other plain values of a row, without the columns that its format reads."""
        excluded = _FORMAT_COLUMNS | set(self.config.columns.values())
        plain = (str, int, float, bool)
        return {k: v for k, v in value.items() if k not in excluded and isinstance(v, plain)}

    def _ask(self, row: _Row) -> None:
        """Continue a row until it waits for an answer, is rejected, or is complete."""
        while (messages := row.next_prompt()) is not None:
            request = self._request(messages, row.conversation.tools)
            if isinstance(request, Rejection):
                self._reject(row.number, request)
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
            self._take(row, answer, request)
        self.counts["num_kept_turns"] += row.num_kept
        self._finish(row.number, self._output(row))

    def _output(self, row: _Row) -> dict[str, Any]:
        """Return the row as it is written, with the target's ids if its text encodes to others."""
        output = row.output(self.generator.identity)
        conversation = self._rereader.read(output) if row.generated else None
        if not isinstance(conversation, Conversation):
            return output
        chosen, num_other = chosen_ids(self.encoder, conversation, row.generated)
        self.counts["num_other_ids"] += num_other
        if chosen is None:
            return output
        self.counts["num_rows_of_ids"] += 1
        return {**output, "tokens": {"input_ids": chosen.token_ids, "loss_mask": chosen.loss_mask}}

    def _request(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Request | Rejection:
        token_ids = self.encoder.prompt_ids(messages, tools)
        if isinstance(token_ids, Rejection):
            return token_ids
        if len(token_ids) + 2 > self.config.max_length:
            # No sample with two supervised tokens would fit.
            detail = f"prompt of {len(token_ids)} tokens; data.max_length: {self.config.max_length}"
            return Rejection("over length", detail)
        text = json.dumps([self._settings, messages, tools], sort_keys=True, default=str)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return Request(key, list(messages), tools, token_ids)

    def _take(self, row: _Row, answer: Answer, request: Request) -> None:
        row.take(answer, request.token_ids)
        self.counts["num_answers"] += 1
        self.counts["num_cut"] += answer.finish_reason == LENGTH

    def _reject(self, number: int, rejection: Rejection) -> None:
        self.counts["num_refused"] += 1
        self._finish(number, {"rejection": {"reason": rejection.reason, "detail": rejection.detail}})

    def _finish(self, number: int, output: dict[str, Any] | None) -> None:
        """Write all rows before the first unfinished one; None is a blank line."""
        self._finished[number] = output
        while self._num_written in self._finished:
            row = self._finished.pop(self._num_written)
            line = b"\n" if row is None else json.dumps(row, default=str).encode() + b"\n"
            self.file.write(line)
            self.hasher.update(line)
            self._num_written += 1


class Progress:
    """Progress reports on a file: one line every ten seconds, and one at the end.

    In a terminal the line is updated in place, once per second. A separate thread prints, so a long batch
    does not look like a hang.
    """

    def __init__(self, name: str, *, quiet: bool = False, seconds: float = LINE_SECONDS) -> None:
        self.name, self.quiet, self.counts = name, quiet, Counter[str]()
        self._in_place = sys.stdout.isatty()
        self._seconds = 1.0 if self._in_place else seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, daemon=True)

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

    def _print_lines(self) -> None:
        while not self._ended.wait(self._seconds):
            self._show()

    def _show(self, *, last: bool = False) -> None:
        seconds = time.perf_counter() - self._started
        print(self.line(seconds), end="\r" if self._in_place and not last else "\n", flush=True)

    def line(self, seconds: float) -> str:
        """Return the text of a progress line after so many seconds.

        Example: regenerate a.jsonl: 12 rows, 20 answers (3 cached, 1 cut), 960 tokens, 48.0 tokens/s
        """
        counts = self.counts
        answers = f"{counts['num_answers']} answers ({counts['num_cached']} cached, {counts['num_cut']} cut)"
        speed = f"{counts['num_tokens']} tokens, {counts['num_tokens'] / seconds:.1f} tokens/s"
        return f"regenerate {self.name}: {counts['num_rows']} rows, {answers}, {speed}"
