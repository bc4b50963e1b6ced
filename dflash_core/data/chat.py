"""One conversation to token ids and a loss mask, by the model's own chat template.

Guarantees:
- Rows without control strings give exactly the ids of `tokenizer.apply_chat_template`.
- Supervised are the assistant turns, each up to and with the first end-of-turn token that the template writes
  after the content, and nothing else. Never found by searching for the text of a turn.
- No control token comes from data: where a string of the row contains the text of a control token, that text
  is encoded as plain text; the text of the mask token refuses the row.

How spans are found. A template with `{% generation %}` says where its assistant turns are. For any other, the
conversation is rendered up to each assistant turn with the generation prompt (P) and with the turn (F). Both
must be prefixes of the whole; the turn is then whole[len(P):len(F)]. A template that renders earlier turns
differently fails that check: by `data.rewritten_history` only the last turn is supervised, or the row is
refused.

What a generation prompt writes is not supervised, and that includes the empty reasoning block that some
templates print when thinking is off: P is also rendered with thinking off, and the longest P that fits
counts.

Spans are characters of the rendered text; a token counts when all of its characters lie inside. `user\\n` +
`\\nHi` may merge the two newlines into one token: it stays unsupervised, since no generation could start in
its middle.
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
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from dflash_core.config import DataConfig, UserError

_render_template: Any = render_jinja_template  # annotated as returning str, returns (texts, indices)
_BREAKS = [
    chr(code) for code in range(0xFDD0, 0xFDF0)
]  # noncharacters of Unicode: never in interchanged text
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """What a format reader makes of a row: messages and tools as a chat template wants them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Rejection:
    """Why a row is refused: a short stable reason, counted in reports, and the particulars."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `broken` is a character put inside each control string that came from data."""

    text: str
    spans: list[tuple[int, int]]  # characters of the supervised turns
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
        config: `chat_template`, `rewritten_history` and `reasoning` are read.
        mask_token_id: the drafter's mask token, which must not occur in data; None: not checked.

    Raises:
        UserError: no chat template, a template that does not compile, or a tokenizer without a Rust backend.
    """

    tokenizer: Any
    config: DataConfig
    mask_token_id: int | None
    template: str = field(init=False)
    controls: tuple[str, ...] = field(init=False)  # texts of control tokens, the end of turn first

    def __post_init__(self) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"target: tokenizer {type(self.tokenizer).__name__} has no Rust backend (tokenizer.json)"
            )
        self.template = load_template(self.tokenizer, self.config)
        specification = json.loads(backend.to_str())
        # Without post-processor: templates write their own BOS, and offsets keep the space that belongs to a
        # token.
        specification.update(post_processor=None, truncation=None, padding=None)
        text = json.dumps(specification)
        self._encoder = Tokenizer.from_str(text)
        self._plain_encoder = Tokenizer.from_str(text)
        self._plain_encoder.encode_special_tokens = True  # control strings as plain text
        self._control_ids = {
            token.content: token_id
            for token_id, token in self._encoder.get_added_tokens_decoder().items()
            if token.special or token_id == self.mask_token_id
        }
        self._mask_text = next((t for t, i in self._control_ids.items() if i == self.mask_token_id), None)
        ordered = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.controls = tuple(ordered)
        self._special_names = dict(self.tokenizer.special_tokens_map)
        self._marks_turns = bool(_GENERATION.search(self.template))
        self._prompt_variants: list[dict[str, Any]] = [{}] + [
            {flag: False}
            for flag in ("enable_thinking", "thinking")
            if re.search(rf"\b{flag}\b", self.template)
        ]
        self._probe()

    def reads(self, name: str) -> bool:
        """Whether the chat template mentions a field, e.g. `tool_calls`."""
        return re.search(rf"\b{name}\b", self.template) is not None

    def _probe(self) -> None:
        """Learn the end-of-turn token and the generation prompts from a conversation of two turns."""
        messages = [{"role": "user", "content": "Ready?"}, {"role": "assistant", "content": "Yes, ready."}]
        self._end_of_turn: str | None = None
        self._generation_prompts: list[str] = []
        try:
            whole = self._render(messages, None)
            asked = self._render(messages[:1], None)
            for variant in self._prompt_variants:
                prompt = self._render(messages[:1], None, prompt=True, **variant)
                if prompt.startswith(asked) and len(prompt) > len(asked):
                    self._generation_prompts.append(prompt[len(asked) :])
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            if _is_syntax_error(error):
                raise UserError(f"data.chat_template: does not compile: {error}") from error
            return  # a template that wants other roles or tools; rows will tell
        self._generation_prompts.sort(key=len, reverse=True)
        position = whole.rfind(messages[1]["content"])
        found = self._control_pattern.search(whole, position) if position >= 0 else None
        if found:
            self._end_of_turn = found.group()
            self.controls = (found.group(), *(c for c in self.controls if c != found.group()))

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        prompt: bool = False,
        **flags: Any,
    ) -> str:
        texts, _ = _render_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=prompt,
            **{**self._special_names, **flags},
        )
        return texts[0]

    def render(self, conversation: Conversation) -> Rendered | Rejection:
        """Text and supervised spans of one conversation. Never raises for what a row holds."""
        try:
            messages, tools, broken = self._without_controls(conversation)
            if self._marks_turns:
                text, spans, notes = self._spans_marked(messages, tools)
            else:
                text, spans, notes = self._spans_by_prefixes(messages, tools)
            text.encode()
        except _RefusedError as refused:
            return refused.rejection
        except UnicodeEncodeError as error:
            return Rejection("lone surrogate", f"character {error.start} of the rendered text")
        except Exception as error:  # noqa: BLE001 - templates are programs of others and raise anything
            return Rejection("chat template refuses the row", f"{type(error).__name__}: {error}")
        return Rendered(text, spans, broken, notes)

    def _without_controls(self, conversation: Conversation) -> tuple[Any, Any, str | None]:
        """Messages and tools with control strings broken, and the character that breaks them, if any."""
        messages, tools = conversation.messages, conversation.tools
        controls = _find_strings([messages, tools], self._control_pattern)
        if not controls:
            return messages, tools, None
        if self._mask_text in controls:
            raise _RefusedError("mask token in data", f"the text {self._mask_text!r}")
        broken = _unused_break([messages, tools])
        if broken is None:
            raise _RefusedError("control strings beside all noncharacters U+FDD0 to U+FDEF", "")
        messages, tools = _break_controls([messages, tools], self._control_pattern, broken)
        if left := _find_strings([messages, tools], self._control_pattern):
            raise _RefusedError("control string that cannot be written as text", ", ".join(sorted(left)))
        return messages, tools, broken

    def _spans_marked(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]], tuple[str, ...]]:
        """Spans by the template's own `{% generation %}` blocks, less what a generation prompt writes."""
        texts, indices = _render_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self._special_names,
        )
        text, spans = texts[0], []
        for start, end in indices[0]:
            for prompt in self._generation_prompts:
                ends = range(min(end, start + len(prompt)), max(start, len(prompt)) - 1, -1)
                inside = next((p for p in ends if text.startswith(prompt, p - len(prompt))), None)
                if inside is not None:
                    start = inside
                    break
            spans.append((start, self._turn_end(text, start, end)))
        return text, spans, ()

    def _spans_by_prefixes(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]], tuple[str, ...]]:
        """Spans by rendering up to and with each assistant turn; see the head of the file."""
        text = self._render(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._turn_span(text, messages, tools, i) for i in turns]
        kept = [span for span in spans if span is not None]
        if len(kept) == len(spans):
            return text, kept, ()
        if self.config.rewritten_history == "refuse":
            raise _RefusedError("chat template rewrites earlier turns", "data.rewritten_history is refuse")
        if spans[-1] is None:
            raise _RefusedError(
                "chat template rewrites the last turn", "its prompt is no prefix of the whole"
            )
        return text, [spans[-1]], ("supervised by the last turn only (the template rewrites earlier turns)",)

    def _turn_span(
        self, text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, turn: int
    ) -> tuple[int, int] | None:
        """Characters of one assistant turn, None where the template renders it differently in the whole."""
        whole = text if turn == len(messages) - 1 else self._render(messages[: turn + 1], tools)
        if not text.startswith(whole):
            return None
        if turn == 0:
            start = self._first_difference(whole, messages[0], tools)
        else:
            prompts = [self._render(messages[:turn], tools, prompt=True, **v) for v in self._prompt_variants]
            start = max((len(prompt) for prompt in prompts if whole.startswith(prompt)), default=-1)
        if start < 0:
            return None
        return start, self._turn_end(text, start, len(whole))

    def _first_difference(
        self, whole: str, message: dict[str, Any], tools: list[dict[str, Any]] | None
    ) -> int:
        """Where an opening assistant turn starts: no turn precedes it, so another content shows the place."""
        content = message["content"].strip()
        other = self._render([{**message, "content": "b" if content.startswith("a") else "a"}], tools)
        return next((i for i, (x, y) in enumerate(zip(whole, other)) if x != y), min(len(whole), len(other)))

    def _turn_end(self, text: str, start: int, end: int) -> int:
        """End of a turn: after the first of the control tokens that close text[start:end], white space left
        out.

        `Hi<|im_end|>\\n` -> after `<|im_end|>`. Where the turn closes without one and the end-of-turn token
        follows, it is taken in.
        """
        first, position = None, end
        while True:
            while position > start and text[position - 1].isspace():
                position -= 1
            if not self.controls or not text.endswith(self.controls, start, position):
                break
            first = position
            position -= len(next(c for c in self.controls if text.endswith(c, start, position)))
        if first is not None:
            return first
        following = end
        while following < len(text) and text[following].isspace():
            following += 1
        if self._end_of_turn and text.startswith(self._end_of_turn, following):
            return following + len(self._end_of_turn)
        return end

    def encode(self, rendered: Sequence[Rendered]) -> list[Sample | Rejection]:
        """Token ids and masks of many conversations, encoded together on all cores."""
        whole = [r.text for r in rendered if r.broken is None]
        encodings = iter(self._encoder.encode_batch(whole, add_special_tokens=False))
        return [
            self._sample(next(encodings), r) if r.broken is None else self._encode_broken(r, r.broken)
            for r in rendered
        ]

    def _sample(self, encoding: Any, rendered: Rendered) -> Sample | Rejection:
        loss_mask = np.zeros(len(encoding), dtype=np.uint8)
        for start, end in rendered.spans:
            first, stop = token_range(encoding, start, end)
            loss_mask[first:stop] = 1
        return self._checked(np.array(encoding.ids, dtype=np.int32), loss_mask, rendered)

    def _encode_broken(self, rendered: Rendered, broken: str) -> Sample | Rejection:
        """Encode what lies between the template's control tokens as plain text, unbroken again."""
        token_ids: list[int] = []
        loss_mask: list[int] = []

        def inside(start: int, end: int) -> int:
            return int(any(s <= start and end <= e for s, e in rendered.spans))

        def plain(start: int, end: int) -> None:
            piece = rendered.text[start:end]
            places = [start + i for i, character in enumerate(piece) if character != broken]
            encoding = self._plain_encoder.encode(piece.replace(broken, ""), add_special_tokens=False)
            token_ids.extend(encoding.ids)
            loss_mask.extend(
                inside(places[a], places[b - 1] + 1) if b > a else 0 for a, b in encoding.offsets
            )

        position = 0
        for match in self._control_pattern.finditer(rendered.text):
            plain(position, match.start())
            token_ids.append(self._control_ids[match.group()])
            loss_mask.append(inside(*match.span()))
            position = match.end()
        plain(position, len(rendered.text))
        return self._checked(
            np.array(token_ids, dtype=np.int32), np.array(loss_mask, dtype=np.uint8), rendered
        )

    def _checked(
        self, token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], rendered: Rendered
    ) -> Sample | Rejection:
        if self.mask_token_id is not None and (token_ids == self.mask_token_id).any():
            return Rejection("mask token in data", f"token {self.mask_token_id}")
        return Sample(token_ids, loss_mask, rendered.notes)


class _RefusedError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        self.rejection = Rejection(reason, detail)


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
    while stop < len(encoding) and (chars := encoding.token_to_chars(stop)) and chars[1] <= end:
        stop += 1  # further tokens of one character
    if encoding.token_to_chars(last)[1] > end:
        stop = last
    return first, max(first, stop)


def _is_syntax_error(error: Exception) -> bool:
    return any(kind.__name__ == "TemplateSyntaxError" for kind in type(error).__mro__)


def _find_strings(value: Any, pattern: re.Pattern[str]) -> set[str]:
    """All matches of a pattern in the strings of a nested value, keys included."""
    if isinstance(value, str):
        return set(pattern.findall(value)) if pattern.search(value) else set()
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return set().union(*(_find_strings(item, pattern) for item in value))
    return set()


def _unused_break(value: Any) -> str | None:
    found = _find_strings(value, re.compile("[\ufdd0-\ufdef]"))
    return next((character for character in _BREAKS if character not in found), None)


def _break_controls(value: Any, pattern: re.Pattern[str], broken: str) -> Any:
    """The value with `broken` after the first character of each match."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + broken + match.group()[1:], value)
    if isinstance(value, dict):
        return {
            _break_controls(k, pattern, broken): _break_controls(v, pattern, broken) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_break_controls(item, pattern, broken) for item in value]
    return value
