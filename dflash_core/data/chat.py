"""One conversation to token ids and a loss mask, by the model's own chat template.

Guarantees:
- Rows without control strings give exactly the ids of `tokenizer.apply_chat_template`.
- The assistant turns are supervised, each up to and including the first end-of-turn token that the
  template writes after the content, and nothing else. Turns are never found by searching for their
  text (see `template.py`).
- A turn that was cut (`open_end` in the data) is supervised up to its last word: its writer did not end it.
- No control token comes from data: where a string of the row contains the text of a control token, that text
  is encoded as plain text; the text of the mask token rejects the row.

Turns are ranges of characters of the rendered text; a token is supervised when all of its characters lie
inside one. `assistant\\n` + `\\n\\nHi` may merge two of the newlines, one of each side, into one token: it
stays unsupervised, since no generation could start in its middle.

Control strings in data. A noncharacter of Unicode is inserted into each of them before rendering. All
control strings of the rendered text are then the template's own; the text between them is encoded with
control tokens switched off.

Shape letter: S tokens of one sample.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from dflash_core.config import DataConfig
from dflash_core.data.loss_mask import bytes_of_tokens, mask_by_bytes, mask_by_offsets
from dflash_core.data.template import ChatTemplate, Span, TemplateError
from dflash_core.errors import UserError

# Noncharacters of Unicode, which interchanged text never contains.
_BREAKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_BREAK_PATTERN = re.compile("[\ufdd0-\ufdef]")
# Keys of messages that need no search for control strings.
_PLAIN_KEYS = {"role", "content"}


@dataclass(frozen=True)
class Conversation:
    """A row as read by a format reader: messages and tools as a chat template expects them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    # Indices of messages that were cut: their end of turn is not supervised.
    open_ends: frozenset[int] = frozenset()
    # Indices of assistant messages that are not supervised: blank, or marked as not to be trained on.
    unsupervised: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rejection:
    """The rejection of a row: a short stable reason, counted in reports, and details."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `broken` is the character inserted into each control string from data."""

    text: str
    # Ranges of characters that the assistant wrote.
    turns: list[Span]
    broken: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Token ids, int32 [S], and loss mask, uint8 [S], of one conversation."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    notes: tuple[str, ...] = ()


@dataclass
class ChatEncoder:
    """Encoder of conversations: renders, encodes and masks them.

    Args:
        tokenizer: a transformers tokenizer with a Rust backend.
        config: `chat_template` and `rewritten_history` are read.
        mask_token_id: the drafter's mask token, which must not occur in data; None: not checked.

    Raises:
        UserError: there is no chat template, it does not compile, or the tokenizer has no Rust backend.
    """

    tokenizer: Any
    config: DataConfig
    mask_token_id: int | None
    template: ChatTemplate = field(init=False)

    def __post_init__(self) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"target: tokenizer {type(self.tokenizer).__name__} has no Rust backend (tokenizer.json)"
            )
        text = load_template(self.tokenizer, self.config)
        self._specification = backend.to_str()
        self._encoder = self._make_encoder()
        self._plain_encoders: dict[str, Tokenizer] = {}
        self._num_bytes = bytes_of_tokens(self._encoder)
        self._control_ids = {
            token.content: token_id
            for token_id, token in self._encoder.get_added_tokens_decoder().items()
            if token.special or token_id == self.mask_token_id
        }
        self._mask_text = next((t for t, i in self._control_ids.items() if i == self.mask_token_id), None)
        controls = sorted(self._control_ids, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
        names = dict(self.tokenizer.special_tokens_map)
        self.template = ChatTemplate(text, names, controls, self.config.rewritten_history)

    @property
    def end_of_turn_id(self) -> int | None:
        """The control token that the template writes after an answer; None if it writes none."""
        return self._control_ids.get(self.template._end_of_turn or "")

    def _make_encoder(self) -> Tokenizer:
        """Return a tokenizer without post-processor: templates write BOS, and offsets keep leading spaces."""
        encoder = Tokenizer.from_str(self._specification)
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def render(self, conversation: Conversation) -> Rendered | Rejection:
        """Return the text and turns of one conversation. Never raises because of a row's content."""
        try:
            parts = self._break_controls(conversation.messages, conversation.tools)
            if isinstance(parts, Rejection):
                return parts
            messages, tools, broken = parts
            text, turns, notes = self.template.render(messages, tools)
            if conversation.open_ends:
                turns = self._with_open_ends(text, turns, conversation)
            if not text.isascii():
                text.encode()
        except TemplateError as error:
            return Rejection(error.reason, error.detail)
        except UnicodeEncodeError as error:
            return Rejection("lone surrogate", f"character {error.start} of the rendered text")
        except Exception as error:
            # Templates are third-party programs that may raise any exception.
            return Rejection("rejected by the chat template", f"{type(error).__name__}: {error}")
        return Rendered(text, turns, broken, notes)

    def _with_open_ends(self, text: str, turns: list[Span], conversation: Conversation) -> list[Span]:
        """Return the turns, with the ends of cut turns removed. The only place that handles cut turns.

        Raises:
            TemplateError: the template marks other turns than the assistant's, so that turns and messages
                cannot be matched.
        """
        numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(turns) not in (1, len(numbers)):
            raise TemplateError("cut turn not found", f"{len(turns)} turns of {len(numbers)} are rendered")
        return [
            self.template.open_end(text, turn) if number in conversation.open_ends else turn
            for number, turn in zip(numbers[-len(turns) :], turns)
        ]

    def _break_controls(self, messages: Any, tools: Any) -> tuple[Any, Any, str | None] | Rejection:
        """Return messages and tools with control strings broken, and the character used for it, if any."""
        controls = _find_strings([messages, tools], self._controls)
        if not controls:
            return messages, tools, None
        if self._mask_text in controls:
            return Rejection("mask token in data", f"the text {self._mask_text!r}")
        used = _find_strings([messages, tools], _BREAK_PATTERN)
        broken = next((character for character in _BREAKS if character not in used), None)
        if broken is None:
            return Rejection("control strings together with all noncharacters U+FDD0 to U+FDEF")
        messages, tools = _break_strings([messages, tools], self._controls, broken)
        if remaining := _find_strings([messages, tools], self._controls):
            return Rejection("control string that cannot be written as text", ", ".join(sorted(remaining)))
        return messages, tools, broken

    def prompt_ids(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int] | Rejection:
        """Return the ids of a conversation with the generation prompt. No control token comes from data."""
        try:
            parts = self._break_controls(messages, tools)
            if isinstance(parts, Rejection):
                return parts
            messages, tools, broken = parts
            rendered = Rendered(self.template.render_prompt(messages, tools), [], broken)
            sample = self.encode([rendered])[0]
        except Exception as error:
            # Templates are third-party programs that may raise any exception.
            return Rejection("prompt rejected by the chat template", f"{type(error).__name__}: {error}")
        return sample if isinstance(sample, Rejection) else sample.token_ids.tolist()

    def encode(self, rendered: Sequence[Rendered]) -> list[Sample | Rejection]:
        """Return token ids and masks of many conversations."""
        return self.samples(rendered, self.tokenise(rendered))

    def tokenise(self, rendered: Sequence[Rendered]) -> list[Any]:
        """Encode the texts without control strings from data, on all cores, without holding Python's lock."""
        texts = [r.text for r in rendered if r.broken is None]
        if self._num_bytes is not None:
            return self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return self._encoder.encode_batch(texts, add_special_tokens=False)

    def samples(self, rendered: Sequence[Rendered], encodings: Sequence[Any]) -> list[Sample | Rejection]:
        """Return the samples of the texts, given the result of `tokenise` for them."""
        remaining = iter(encodings)
        return [
            self._sample(next(remaining), r) if r.broken is None else self._broken_sample(r, r.broken)
            for r in rendered
        ]

    def _sample(self, encoding: Any, rendered: Rendered) -> Sample | Rejection:
        token_ids = np.array(encoding.ids, dtype=np.int32)
        loss_mask = None
        if self._num_bytes is not None:
            loss_mask = mask_by_bytes(token_ids, rendered.text, rendered.turns, self._num_bytes)
            if loss_mask is None:
                # The given encoding has no offsets.
                encoding = self._encoder.encode(rendered.text, add_special_tokens=False)
        if loss_mask is None:
            loss_mask = mask_by_offsets(encoding, rendered.turns)
        return self._checked(token_ids, loss_mask, rendered)

    def _broken_sample(self, rendered: Rendered, broken: str) -> Sample | Rejection:
        """Encode the text between the template's control tokens as plain text, without `broken`."""
        plain_encoder = self._plain_encoder(broken)
        token_ids: list[int] = []
        loss_mask: list[int] = []

        def inside(start: int, end: int) -> int:
            return int(any(s <= start and end <= e for s, e in rendered.turns))

        def plain(start: int, end: int) -> None:
            piece = rendered.text[start:end]
            positions = [start + i for i, character in enumerate(piece) if character != broken]
            # Text after a control token must not be encoded like the start of a text.
            first = int(start > 0)
            unbroken = broken * first + piece.replace(broken, "")
            encoding = plain_encoder.encode(unbroken, add_special_tokens=False)
            token_ids.extend(encoding.ids[first:])
            loss_mask.extend(
                inside(positions[a - first], positions[b - 1 - first] + 1) if b > a else 0
                for a, b in encoding.offsets[first:]
            )

        position = 0
        for match in self._controls.finditer(rendered.text):
            plain(position, match.start())
            token_ids.append(self._control_ids[match.group()])
            loss_mask.append(inside(*match.span()))
            position = match.end()
        plain(position, len(rendered.text))
        ids, mask = np.array(token_ids, dtype=np.int32), np.array(loss_mask, dtype=np.uint8)
        return self._checked(ids, mask, rendered)

    def _plain_encoder(self, broken: str) -> Tokenizer:
        """Return an encoder whose only control token is `broken`; all control strings are plain text."""
        if broken not in self._plain_encoders:
            encoder = self._make_encoder()
            encoder.encode_special_tokens = True
            encoder.add_tokens([AddedToken(broken, normalized=False)])
            self._plain_encoders[broken] = encoder
        return self._plain_encoders[broken]

    def _checked(
        self, token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], rendered: Rendered
    ) -> Sample | Rejection:
        if self.mask_token_id is not None and (token_ids == self.mask_token_id).any():
            return Rejection("mask token in data", f"token {self.mask_token_id}")
        return Sample(token_ids, loss_mask, rendered.notes)


@functools.lru_cache(maxsize=2)
def load_tokenizer(directory: str, *, trust_remote_code: bool) -> Any:
    """Load a tokenizer with transformers; the last two stay in memory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_template(tokenizer: Any, config: DataConfig) -> str:
    """Return the text of the chat template: the file `data.chat_template`, else the tokenizer's own.

    Raises:
        UserError: the file cannot be read, or the tokenizer has no template.
    """
    if config.chat_template is None:
        if not tokenizer.chat_template:
            raise UserError("data.chat_template: the tokenizer has no chat template; allowed: a Jinja file")
        return tokenizer.get_chat_template()
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {config.chat_template!r} cannot be read: {error}") from error


def _find_strings(value: Any, pattern: re.Pattern[str]) -> set[str]:
    """Return all matches of a pattern in the strings of a nested value, keys included."""
    matches: set[str] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            if pattern.search(value):
                matches.update(pattern.findall(value))
        elif isinstance(value, dict):
            stack += value.values()
            stack += value.keys() - _PLAIN_KEYS
        elif isinstance(value, list | tuple):
            stack += value
    return matches


def _break_strings(value: Any, pattern: re.Pattern[str], broken: str) -> Any:
    """Return the value with `broken` inserted after the first character of each match."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + broken + match.group()[1:], value)
    if isinstance(value, dict):
        return {
            _break_strings(k, pattern, broken): _break_strings(v, pattern, broken) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_break_strings(item, pattern, broken) for item in value]
    return value
