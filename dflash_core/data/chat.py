"""One conversation to token ids and a loss mask, by the model's own chat template.

Guarantees:
- Rows without control strings give exactly the ids of `tokenizer.apply_chat_template`.
- Supervised are the assistant turns, each up to and with the first end-of-turn token that the template writes
  after the content, and nothing else. Never found by searching for the text of a turn (see `template.py`).
- A turn that was cut (`open_end` in the data) is supervised up to its last word: its writer did not end it.
- No control token comes from data: where a string of the row contains the text of a control token, that text
  is encoded as plain text; the text of the mask token refuses the row.

Turns are characters of the rendered text; a token counts when all of its characters lie inside.
`assistant\\n` + `\\n\\nHi` may merge two of the newlines, one of each side, into one token: it stays
unsupervised, since no generation could start in its middle.

Control strings in data. A noncharacter of Unicode is put inside each before rendering. The control strings of
the rendered text are then the template's own; the text between them is encoded with control tokens switched
off.

Shape letter: S tokens of one sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from dflash_core.config import DataConfig
from dflash_core.data.template import ChatTemplate, RefusedError, Span
from dflash_core.errors import UserError

_BREAKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never in interchanged text
_BREAK_PATTERN = re.compile("[\ufdd0-\ufdef]")


@dataclass(frozen=True)
class Conversation:
    """What a format reader makes of a row: messages and tools as a chat template wants them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    open_ends: frozenset[int] = frozenset()  # messages that were cut: their end of turn is not supervised


@dataclass(frozen=True)
class Rejection:
    """Why a row is refused: a short stable reason, counted in reports, and the particulars."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `broken` is the character put inside each control string from data."""

    text: str
    turns: list[Span]  # characters that the assistant wrote
    broken: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Token ids int32 [S] and loss mask uint8 [S]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    notes: tuple[str, ...] = ()


@dataclass
class ChatEncoder:
    """Renders, masks and encodes conversations.

    Args:
        tokenizer: a transformers tokenizer with a Rust backend.
        config: `chat_template` and `rewritten_history` are read.
        mask_token_id: the drafter's mask token, which must not occur in data; None: not checked.

    Raises:
        UserError: no chat template, a template that does not compile, or a tokenizer without a Rust backend.
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

    def _make_encoder(self) -> Tokenizer:
        """The tokenizer without post-processor: templates write BOS, and offsets keep leading spaces."""
        encoder = Tokenizer.from_str(self._specification)
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def render(self, conversation: Conversation) -> Rendered | Rejection:
        """Text and turns of one conversation. Never raises for what a row holds."""
        try:
            messages, tools, broken = self._without_controls(conversation)
            text, turns, notes = self.template.render(messages, tools)
            if conversation.open_ends:
                turns = self._with_open_ends(text, turns, conversation)
            if not text.isascii():
                text.encode()
        except RefusedError as refused:
            return Rejection(refused.reason, refused.detail)
        except UnicodeEncodeError as error:
            return Rejection("lone surrogate", f"character {error.start} of the rendered text")
        except Exception as error:  # noqa: BLE001 - templates are programs of others and raise anything
            return Rejection("chat template refuses the row", f"{type(error).__name__}: {error}")
        return Rendered(text, turns, broken, notes)

    def _with_open_ends(self, text: str, turns: list[Span], conversation: Conversation) -> list[Span]:
        """The turns, without their ends where they were cut: the one place that says what a cut turn is worth.

        Raises:
            RefusedError: the template marks other turns than the assistant's, so that none can be told apart.
        """
        numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(turns) not in (1, len(numbers)):
            raise RefusedError("cut turn not found", f"{len(turns)} turns of {len(numbers)} are rendered")
        return [
            self.template.open_end(text, turn) if number in conversation.open_ends else turn
            for number, turn in zip(numbers[-len(turns) :], turns)
        ]

    def _without_controls(self, conversation: Conversation) -> tuple[Any, Any, str | None]:
        """Messages and tools with control strings broken, and the character that breaks them, if any."""
        messages, tools = conversation.messages, conversation.tools
        controls = _find_strings([messages, tools], self._controls)
        if not controls:
            return messages, tools, None
        if self._mask_text in controls:
            raise RefusedError("mask token in data", f"the text {self._mask_text!r}")
        found = _find_strings([messages, tools], _BREAK_PATTERN)
        broken = next((character for character in _BREAKS if character not in found), None)
        if broken is None:
            raise RefusedError("control strings beside all noncharacters U+FDD0 to U+FDEF")
        messages, tools = _break_strings([messages, tools], self._controls, broken)
        if left := _find_strings([messages, tools], self._controls):
            raise RefusedError("control string that cannot be written as text", ", ".join(sorted(left)))
        return messages, tools, broken

    def prompt_ids(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int] | Rejection:
        """Ids of a conversation with the generation prompt. No control token from data."""
        try:
            messages, tools, broken = self._without_controls(Conversation(messages, tools))
            rendered = Rendered(self.template.render_prompt(messages, tools), [], broken)
            sample = self.encode([rendered])[0]
        except RefusedError as refused:
            return Rejection(refused.reason, refused.detail)
        except Exception as error:  # noqa: BLE001 - templates are programs of others and raise anything
            return Rejection("chat template refuses the prompt", f"{type(error).__name__}: {error}")
        return sample if isinstance(sample, Rejection) else sample.token_ids.tolist()

    def encode(self, rendered: Sequence[Rendered]) -> list[Sample | Rejection]:
        """Token ids and masks of many conversations."""
        return self.samples(rendered, self.tokenise(rendered))

    def tokenise(self, rendered: Sequence[Rendered]) -> list[Any]:
        """Encodings of the texts without control strings from data, on all cores, without Python's lock."""
        texts = [r.text for r in rendered if r.broken is None]
        if self._num_bytes is not None:
            return self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return self._encoder.encode_batch(texts, add_special_tokens=False)

    def samples(self, rendered: Sequence[Rendered], encodings: Sequence[Any]) -> list[Sample | Rejection]:
        """Samples of the texts, with what `tokenise` returned for them."""
        given = iter(encodings)
        return [
            self._sample(next(given), r) if r.broken is None else self._broken_sample(r, r.broken)
            for r in rendered
        ]

    def _sample(self, encoding: Any, rendered: Rendered) -> Sample | Rejection:
        token_ids = np.array(encoding.ids, dtype=np.int32)
        loss_mask = None if self._num_bytes is None else mask_by_bytes(token_ids, rendered, self._num_bytes)
        if loss_mask is None:
            if self._num_bytes is not None:  # encoded without offsets
                encoding = self._encoder.encode(rendered.text, add_special_tokens=False)
            loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
            for start, end in rendered.turns:
                first, stop = token_range(encoding, start, end)
                loss_mask[first:stop] = 1
        return self._checked(token_ids, loss_mask, rendered)

    def _broken_sample(self, rendered: Rendered, broken: str) -> Sample | Rejection:
        """Encode what lies between the template's control tokens as plain text, unbroken again."""
        plain_encoder = self._plain_encoder(broken)
        token_ids: list[int] = []
        loss_mask: list[int] = []

        def inside(start: int, end: int) -> int:
            return int(any(s <= start and end <= e for s, e in rendered.turns))

        def plain(start: int, end: int) -> None:
            piece = rendered.text[start:end]
            places = [start + i for i, character in enumerate(piece) if character != broken]
            first = int(start > 0)  # what follows a control token is not encoded as the start of a text
            encoding = plain_encoder.encode(
                broken * first + piece.replace(broken, ""), add_special_tokens=False
            )
            token_ids.extend(encoding.ids[first:])
            loss_mask.extend(
                inside(places[a - first], places[b - 1 - first] + 1) if b > a else 0
                for a, b in encoding.offsets[first:]
            )

        position = 0
        for match in self._controls.finditer(rendered.text):
            plain(position, match.start())
            token_ids.append(self._control_ids[match.group()])
            loss_mask.append(inside(*match.span()))
            position = match.end()
        plain(position, len(rendered.text))
        return self._checked(
            np.array(token_ids, dtype=np.int32), np.array(loss_mask, dtype=np.uint8), rendered
        )

    def _plain_encoder(self, broken: str) -> Tokenizer:
        """Encodes control strings as plain text; `broken` alone is a control token, to put before a piece."""
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


def load_template(tokenizer: Any, config: DataConfig) -> str:
    """The chat template's text: the file `data.chat_template`, else the tokenizer's own.

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


def bytes_of_tokens(encoder: Tokenizer) -> NDArray[np.int32] | None:
    """UTF-8 bytes that each token stands for, by id; None where tokens are no runs of bytes of the text.

    Known for byte-level tokenizers without normaliser, whose tokens are written with one character a byte.
    Their offsets follow from the ids, and encoding without offsets takes about 15% less time.
    """
    specification = json.loads(encoder.to_str())
    splitter = specification["pre_tokenizer"] or {}
    parts = splitter.get("pretokenizers", [splitter])
    levels = [part for part in parts if part.get("type") == "ByteLevel"]
    plain = specification["normalizer"] is None and specification["model"].get("type") == "BPE"
    if not plain or len(levels) != 1 or levels[0].get("add_prefix_space"):
        return None
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    num_bytes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    for text, token_id in vocabulary.items():
        num_bytes[token_id] = len(text)
    for token_id, token in encoder.get_added_tokens_decoder().items():
        num_bytes[token_id] = len(token.content.encode())
    return num_bytes


def mask_by_bytes(
    token_ids: NDArray[np.int32], rendered: Rendered, num_bytes: NDArray[np.int32]
) -> NDArray[np.uint8] | None:
    """Loss mask by the tokens' byte lengths; None where they do not add up to the text.

    Tokens of 3, 1, 2 bytes end at 3, 4, 6; a turn of bytes 3 to 6 takes the second and the third.
    """
    text = rendered.text
    ends = np.cumsum(num_bytes[token_ids])
    is_ascii = text.isascii()
    if len(ends) and ends[-1] != (len(text) if is_ascii else len(text.encode())):
        return None
    starts = ends - num_bytes[token_ids]
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    for turn in rendered.turns:
        start, end = turn if is_ascii else (len(text[:border].encode()) for border in turn)
        loss_mask[np.searchsorted(starts, start) : np.searchsorted(ends, end, side="right")] = 1
    return loss_mask


def token_range(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Tokens that lie wholly inside the characters [start, end): (first, stop)."""
    first = None
    while start < end and (first := encoding.char_to_token(start)) is None:
        start += 1  # white space that belongs to no token
    if first is None:
        return 0, 0
    if encoding.token_to_chars(first)[0] < start:
        first += 1
    last = None
    position = end - 1
    while position >= start and (last := encoding.char_to_token(position)) is None:
        position -= 1
    assert last is not None
    stop = last + 1
    while stop < len(encoding) and (characters := encoding.token_to_chars(stop)) and characters[1] <= end:
        stop += 1  # further tokens of one character
    if encoding.token_to_chars(last)[1] > end:
        stop = last
    return first, max(first, stop)


def _find_strings(value: Any, pattern: re.Pattern[str]) -> set[str]:
    """All matches of a pattern in the strings of a nested value, keys included."""
    found: set[str] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            if pattern.search(value):
                found.update(pattern.findall(value))
        elif isinstance(value, dict):
            stack += value.values()
            stack += value.keys() - _PLAIN_KEYS
        elif isinstance(value, list | tuple):
            stack += value
    return found


_PLAIN_KEYS = {"role", "content"}


def _break_strings(value: Any, pattern: re.Pattern[str], broken: str) -> Any:
    """The value with `broken` after the first character of each match."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + broken + match.group()[1:], value)
    if isinstance(value, dict):
        return {
            _break_strings(k, pattern, broken): _break_strings(v, pattern, broken) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_break_strings(item, pattern, broken) for item in value]
    return value
