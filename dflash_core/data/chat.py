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
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dflash_core.config import DataConfig
from dflash_core.data.control_strings import (
    BREAK_PATTERN,
    BREAKS,
    BrokenTextEncoder,
    any_of,
    break_strings,
    find_strings,
)
from dflash_core.data.loss_mask import (
    bytes_of_tokens,
    lies_inside,
    mask_by_bytes,
    mask_by_offsets,
    strippers,
    supervised_turns,
)
from dflash_core.data.named_templates import DEFAULT, TOOL_USE, load_templates
from dflash_core.data.template import ChatTemplate, Span, TemplateError
from dflash_core.errors import UserError, one_line


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
        config: `chat_template`, `template_arguments`, `template_date` and `rewritten_history` are read.
        mask_token_id: the drafter's mask token, which must not occur in data; None: not checked.

    Raises:
        UserError: there is no chat template, it does not compile, or the tokenizer has no Rust backend.
    """

    tokenizer: Any
    config: DataConfig
    mask_token_id: int | None
    # The default template; `template_for` returns that of a conversation.
    template: ChatTemplate = field(init=False)

    def __post_init__(self) -> None:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"target: tokenizer {type(self.tokenizer).__name__} has no Rust backend (tokenizer.json)"
            )
        texts = load_templates(self.tokenizer, self.config)
        self._specification = backend.to_str()
        self._encoder = self._make_encoder()
        self._broken_encoders: dict[str, BrokenTextEncoder] = {}
        self._num_bytes = bytes_of_tokens(self._encoder)
        self._strippers = strippers(self._encoder)
        self._added = self._encoder.get_added_tokens_decoder()
        self._control_ids = {
            token.content: token_id
            for token_id, token in self._added.items()
            if token.special or token_id == self.mask_token_id
        }
        self._templates = {name: self._make_template(name, text) for name, text in texts.items()}
        self.template = self._templates[DEFAULT]
        ends = {template.end_of_turn for template in self._templates.values()}
        self._control_ids |= {t.content: i for i, t in self._added.items() if t.content in ends}
        self._mask_text = next((t for t, i in self._control_ids.items() if i == self.mask_token_id), None)
        self._controls = any_of(self._control_ids)

    def _make_template(self, name: str, text: str) -> ChatTemplate:
        controls = sorted(self._control_ids, key=len, reverse=True)
        # Some tokenizers add words and runs of spaces, which end no turn.
        others = {t.content for t in self._added.values() if re.search(r"[^\w\s]", t.content)}
        names = dict(self.tokenizer.special_tokens_map)
        config = self.config
        return ChatTemplate(
            text,
            names,
            controls,
            config.rewritten_history,
            added=sorted(others - self._control_ids.keys()),
            arguments=config.template_arguments,
            date=config.template_date,
            name=config.chat_template or f"the tokenizer's template {name!r}",
        )

    def template_for(self, tools: object) -> ChatTemplate:
        """Return the template of a conversation with these tools: `tool_use`, where the tokenizer has one."""
        return self.template if tools is None else self._templates.get(TOOL_USE, self.template)

    def reads(self, name: str) -> bool:
        """Return True if one of the templates mentions a field, e.g. `tool_calls`."""
        return any(template.reads(name) for template in self._templates.values())

    @property
    def template_text(self) -> str:
        """Everything that decides the rendering of a conversation, for digests.

        The template's text alone where there is nothing else: named templates, arguments, another date.
        """
        config, texts = self.config, {name: t.text for name, t in self._templates.items()}
        is_plain = not config.template_arguments and config.template_date == DataConfig.template_date
        if is_plain and len(texts) == 1:
            return texts[DEFAULT]
        return json.dumps([texts, config.template_arguments, config.template_date], sort_keys=True)

    @property
    def end_of_turn_id(self) -> int | None:
        """The token that the template writes after an answer; None if it writes none."""
        return self._control_ids.get(self.template.end_of_turn or "")

    def _make_encoder(self) -> Tokenizer:
        """Return a tokenizer without post-processor: templates write BOS, and offsets keep leading spaces."""
        encoder = Tokenizer.from_str(self._specification)
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def render(self, conversation: Conversation) -> Rendered | Rejection:
        """Return the text and turns of one conversation. Never raises because of a row's content.

        Raises:
            UserError: the chat template exceeds a limit (`limited_template.py`).
        """
        try:
            parts = self._break_controls(conversation.messages, conversation.tools)
            if isinstance(parts, Rejection):
                return parts
            messages, tools, broken = parts
            template = self.template_for(tools)
            if len(self._templates) > 1 and not template.reads("tool_calls") and _has_calls(messages):
                return Rejection("tool call", "the chat template of this row renders no tool_calls")
            text, found, notes = template.render(messages, tools)
            if conversation.open_ends:
                found = self._with_open_ends(text, found, conversation)
            turns = supervised_turns(found, conversation.messages, conversation.unsupervised)
            if not text.isascii():
                text.encode()
        except TemplateError as error:
            return Rejection(error.reason, error.detail)
        except UnicodeEncodeError as error:
            return Rejection("lone surrogate", f"character {error.start} of the rendered text")
        except UserError:
            raise
        except Exception as error:
            # Templates are third-party programs that may raise any exception.
            return Rejection("rejected by the chat template", f"{type(error).__name__}: {error}")
        return Rendered(text, turns, broken, notes)

    def _with_open_ends(
        self, text: str, turns: list[Span | None], conversation: Conversation
    ) -> list[Span | None]:
        """Return the turns, with the ends of cut turns removed. The only place that handles cut turns.

        Raises:
            TemplateError: the template marks other turns than the assistant's, so that turns and messages
                cannot be matched.
        """
        numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(turns) not in (1, len(numbers)):
            raise TemplateError("cut turn not found", f"{len(turns)} turns of {len(numbers)} are rendered")
        return [
            self.template.ends.open_end(text, turn) if turn and number in conversation.open_ends else turn
            for number, turn in zip(numbers[-len(turns) :], turns)
        ]

    def _break_controls(self, messages: Any, tools: Any) -> tuple[Any, Any, str | None] | Rejection:
        """Return messages and tools with control strings broken, and the character used for it, if any."""
        controls = find_strings([messages, tools], self._controls)
        if not controls:
            return messages, tools, None
        if self._mask_text in controls:
            return Rejection("mask token in data", f"the text {self._mask_text!r}")
        used = find_strings([messages, tools], BREAK_PATTERN)
        broken = next((character for character in BREAKS if character not in used), None)
        if broken is None:
            return Rejection("control strings together with all noncharacters U+FDD0 to U+FDEF")
        messages, tools = break_strings([messages, tools], self._controls, broken)
        if remaining := find_strings([messages, tools], self._controls):
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
            rendered = Rendered(self.template_for(tools).render_prompt(messages, tools), [], broken)
            sample = self.encode([rendered])[0]
        except UserError:
            raise
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
            loss_mask = mask_by_offsets(encoding, rendered.text, rendered.turns, self._strippers)
        return self._checked(token_ids, loss_mask, rendered)

    def _broken_sample(self, rendered: Rendered, broken: str) -> Sample | Rejection:
        """Encode the text between the template's control tokens as plain text, without `broken`."""
        if broken not in self._broken_encoders:
            self._broken_encoders[broken] = BrokenTextEncoder(self._make_encoder(), broken, self._control_ids)
        token_ids, starts, ends = self._broken_encoders[broken].encode(rendered.text)
        return self._checked(token_ids, lies_inside(starts, ends, rendered.turns), rendered)

    def _checked(
        self, token_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], rendered: Rendered
    ) -> Sample | Rejection:
        if self.mask_token_id is not None and (token_ids == self.mask_token_id).any():
            return Rejection("mask token in data", f"token {self.mask_token_id}")
        return Sample(token_ids, loss_mask, rendered.notes)


# The last encoder of each thread, for `chat_encoder`.
_last = threading.local()


def chat_encoder(tokenizer: Any, config: DataConfig, mask_token_id: int | None) -> ChatEncoder:
    """Return a `ChatEncoder`, the one of this thread's last call if it had the same arguments and templates.

    Making one takes 0.4 s for 49,000 tokens, which small files would pay once each.
    """
    arguments = (config, mask_token_id, load_templates(tokenizer, config))
    last = getattr(_last, "encoder", None)
    if last is None or last.tokenizer is not tokenizer or _last.arguments != arguments:
        _last.encoder = ChatEncoder(tokenizer, config, mask_token_id)
        _last.arguments = arguments
    return _last.encoder


@functools.lru_cache(maxsize=2)
def load_tokenizer(directory: str, *, trust_remote_code: bool) -> Any:
    """Load a tokenizer with transformers; the last two stay in memory.

    Raises:
        UserError: its files are damaged, or need code that may not run.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Each part of transformers and its Rust library raises its own kinds.
        raise UserError(
            f"target.name: the tokenizer in {directory} does not load: {one_line(error)}; allowed: files as "
            "save_pretrained writes them, and code of their own only with target.trust_remote_code"
        ) from error


def _has_calls(messages: list[dict[str, Any]]) -> bool:
    return any(message.get("tool_calls") for message in messages)
