"""A chat template: the text of a conversation and the characters of it that the assistant wrote.

How turns are found. A template with `{% generation %}` marks its assistant turns. For any other template, the
conversation is rendered up to each assistant turn, once with the generation prompt (P) and once with the turn
(F). Where both are prefixes of the whole, the turn is whole[len(P):len(F)]. The other cases:

- P ends with text that the turn lacks (`<|im_start|>assistant\\n<think>\\n` before a turn without reasoning):
  the turn starts behind the part of the prompt that both share.
- The whole shows the turn differently than F (e.g. without its empty reasoning block): it counts where the
  text behind the prompt is what the target had to write, which is F's. A closing token that differs is not
  supervised.
- Any other turn, also one whose prompt the template refuses to render, is not supervised, or rejects the
  row, as `data.rewritten_history` says. A row in which no turn is found is rejected.

Text that belongs to the generation prompt is not supervised. Neither is the empty reasoning block that some
templates print; P is also rendered with thinking off, and the longest matching P is used.

This costs two renderings per turn. Almost all rows of a file share a few shapes (sequences of roles), so
turns come from the skeleton of a shape where the row's own rendering allows it (`skeleton.py`). Every other
row takes the slow path, up to `MAX_SLOW_MESSAGES`. The row itself is always rendered.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import chat_template_utils

from dflash_core.config import DataConfig
from dflash_core.data.limited_template import LimitedTemplate
from dflash_core.data.prompt_headers import PromptHeaders
from dflash_core.data.reasoning_blocks import skip_empty_block
from dflash_core.data.skeleton import (
    LONG,
    Found,
    Messages,
    Shape,
    Skeleton,
    Span,
    extend,
    make_skeleton,
    shorten,
)
from dflash_core.data.text_prefixes import num_equal, skip_blanks
from dflash_core.data.turn_end import TurnEnds
from dflash_core.errors import UserError

Tools = list[dict[str, Any]] | None
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Switches of templates: with thinking off, some prompts hold the empty reasoning block that turns show.
ANSWER = "Yes, ready."
TOOLS: Tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
THINKING_FLAGS = ("enable_thinking", "thinking")
_MAX_SHAPES = 1000
# The slow path takes time that grows with the square of the number of messages: 512 take about a second.
MAX_SLOW_MESSAGES = 512
_LATER = "turns that the template renders differently later on are not supervised"
_LEFT_OUT = "turns of which the template leaves out or changes text"
_SHARED = "supervised behind the header that the turn and its generation prompt share"


class TemplateError(Exception):
    """A conversation whose turns cannot be found: a short stable reason and details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass
class ChatTemplate:
    """A chat template that renders conversations and finds the assistant's turns.

    Args:
        text: the Jinja template.
        special_names: the tokenizer's bos_token etc., which templates print.
        controls: texts of the tokenizer's control tokens.
        rewritten_history: `data.rewritten_history`.
        added: texts of other added tokens, one of which may end a turn.
        arguments: `data.template_arguments`.
        date: `data.template_date`.
        name: for messages.

    Raises:
        UserError: the template does not compile. So does every rendering that exceeds a limit
            (`limited_template.py`).
    """

    text: str
    special_names: dict[str, str]
    controls: Sequence[str]
    rewritten_history: str
    added: Sequence[str] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    date: str = DataConfig.template_date
    name: str = "the tokenizer's own template"
    ends: TurnEnds = field(init=False)
    _headers: PromptHeaders = field(init=False, default=PromptHeaders())
    # Contents are lists of parts, the only form that some templates of vision models print.
    _takes_parts: bool = field(init=False, default=False)
    _skeletons: dict[Shape, Skeleton | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._marks_turns = bool(_GENERATION.search(self.text))
        flags = [name for name in THINKING_FLAGS if self.reads(name) and name not in self.arguments]
        self._prompt_variants: list[dict[str, Any]] = [{}, *({name: False} for name in flags)]
        # The compiler of `apply_chat_template`, without the copies that it makes of each message.
        self._compiled = LimitedTemplate(self.text, self.name)
        now = datetime.date.fromisoformat(self.date)
        self._variables = {**self.special_names, **self.arguments, "strftime_now": now.strftime}
        self.ends = TurnEnds(tuple(self.controls))
        self._probe()

    @property
    def end_of_turn(self) -> str | None:
        """The text of the token that ends an answer, by what the template writes; None if it writes none."""
        return self.ends.end_of_turn

    def reads(self, name: str) -> bool:
        """Return True if the template mentions a field, e.g. `tool_calls`."""
        return re.search(rf"\b{name}\b", self.text) is not None

    def _probe(self) -> None:
        """Find the end-of-turn token and the headers with a conversation of two turns.

        Some templates require a system turn or tools, or print only contents that are lists of parts.
        """
        question = [{"role": "user", "content": "Ready?"}]
        system = [{"role": "system", "content": "Be brief."}, *question]
        for self._takes_parts in (False, True):
            if any(
                self._probe_with(*tried) for tried in ((question, None), (system, None), (question, TOOLS))
            ):
                return
        self._takes_parts = False

    def _probe_with(self, question: Messages, tools: Tools) -> bool:
        """Probe with this question and an answer; return False if the template does not render them."""
        messages = [*question, {"role": "assistant", "content": ANSWER}]
        try:
            whole = self._render(messages, tools)
            asked = self._render(question, tools)
        except UserError:
            raise
        except Exception:
            # Templates raise any exception, here e.g. because they require other roles. Rows will report it.
            return False
        if ANSWER not in whole:
            return False
        prompts = self._prompts(question, tools)
        longer = self._render_or_none([*messages, question[-1], messages[-1]], tools)
        suffixes = {p[len(asked) :] for p in prompts if p.startswith(asked) and len(p) > len(asked)}
        turns = [text[len(asked) :] for text in (whole, longer or "") if text.startswith(asked)]
        self._headers = PromptHeaders.of_template(suffixes, turns)
        eos = self.special_names.get("eos_token")
        self.ends = TurnEnds.of_template(whole, longer or whole, ANSWER, self.controls, self.added, eos)
        # The block may be in a comment, or is never reached.
        self._marks_turns = self._marks_turns and bool(self._turns_marked(messages, tools)[1])
        return True

    def _render_or_none(self, messages: Messages, tools: Tools, **flags: Any) -> str | None:
        try:
            return self._render(messages, tools, **flags)
        except UserError:
            raise
        except Exception:
            # Templates raise any exception. The rows that need this rendering report it.
            return None

    def _render(self, messages: Messages, tools: Tools, *, prompt: bool = False, **flags: Any) -> str:
        return self._compiled.render(
            messages=self._as_printed(messages),
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **{**self._variables, **flags},
        )

    def _as_printed(self, messages: Messages) -> Messages:
        """Return the messages with their contents in the form that the template prints."""
        if not self._takes_parts:
            return messages
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]

    def render(self, messages: Messages, tools: Tools) -> Found:
        """Return the text, the turns as characters [start, end), and notes.

        One entry per assistant turn, None for a turn that is not supervised; in a template with
        `{% generation %}`, one per marked turn.

        Raises:
            TemplateError: the template rewrites turns and `rewritten_history` is "refuse", it rewrites all
                of them, or there are too many messages for the slow path.
            Exception: any error that the template raises.
        """
        skeleton = self._skeleton_of(messages) if tools is None else None
        if skeleton is not None:
            text = self._render(messages, None)
            turns = skeleton.turns(text, messages)
            if turns is not None:
                return text, turns, skeleton.notes
        return self._render_slowly(messages, tools)

    def render_prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Return the text of a conversation that the model is to continue."""
        return self._render(messages, tools, prompt=True)

    def _render_slowly(self, messages: Messages, tools: Tools) -> Found:
        if len(messages) > MAX_SLOW_MESSAGES:
            detail = (
                f"{len(messages)} messages; allowed: {MAX_SLOW_MESSAGES} where each turn is rendered alone"
            )
            raise TemplateError("too many turns", detail)
        find = self._turns_marked if self._marks_turns else self._turns_by_prefixes
        text, turns, notes = find(messages, tools)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        if len(answers) == len(turns):
            # White space and reasoning aside, an answer has to be in its turn.
            written = [answer.rpartition("</think>")[2].strip() for answer in answers]
            if any(turn and part not in text[slice(*turn)] for part, turn in zip(written, turns)):
                notes = (*notes, _LEFT_OUT)
        return text, turns, notes

    def _skeleton_of(self, messages: Messages) -> Skeleton | None:
        if any(len(message) != 2 for message in messages):  # fields other than role and content
            return None
        shape = tuple(message["role"] for message in messages)
        if len(shape) <= LONG:
            return self._known_skeleton(shape)
        parts = shorten(shape)
        short = parts and self._known_skeleton(parts[0])
        return extend(short, shape, parts[1]) if parts and short else None

    def _known_skeleton(self, shape: Shape) -> Skeleton | None:
        if shape not in self._skeletons:
            if len(self._skeletons) >= _MAX_SHAPES:
                return None
            find = functools.partial(self._render_slowly, tools=None)
            self._skeletons[shape] = make_skeleton(shape, find, self._headers.tails)
        return self._skeletons[shape]

    def _turns_marked(self, messages: Messages, tools: Tools) -> Found:
        """Find turns by the template's own `{% generation %}` blocks, less the generation prompt's text."""
        text, indices = chat_template_utils._render_with_assistant_indices(
            self._compiled, self._as_printed(messages), tools, None, False, **self._variables
        )
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        asked = [(-1, False)] * len(indices)
        if len(numbers) == len(indices):
            asked = [self._headers.behind_prompt(text, self._prompts(messages[:i], tools)) for i in numbers]
        turns: list[Span | None] = []
        lacks_tail = False
        for (start, end), behind_prompt in zip(indices, asked):
            marked = (self._headers.behind_header(text, start), False)
            start, lacks = max(p for p in (marked, behind_prompt) if p[0] <= max(marked[0], end))
            turn = (skip_empty_block(text, start), self.ends.of_turn(text, start, end))
            is_blank = self.ends.open_end(text, turn)[1] <= turn[0]
            # Phi-3: the text's final `<|endoftext|>`, behind the end of the last turn, is none.
            if not (turns and turns[-1] and is_blank and not text[turns[-1][1] : start].strip()):
                turns.append(turn)
                lacks_tail |= lacks
        return text, turns, (_SHARED,) if lacks_tail else ()

    def _turns_by_prefixes(self, messages: Messages, tools: Tools) -> Found:
        """Find turns by rendering up to, and with, each assistant turn; see the module's docstring."""
        text = self._render(messages, tools)
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = [self._turn(text, messages, tools, number) for number in numbers]
        notes = []
        if None in found:
            if self.rewritten_history == "refuse":
                raise TemplateError("chat template rewrites turns", "data.rewritten_history is refuse")
            if not any(found):
                detail = "no turn follows, in the whole conversation, the prompt that asks for it"
                raise TemplateError("chat template rewrites all turns", detail)
            notes.append(_LATER)
        if any(turn is not None and turn[1] for turn in found):
            notes.append(_SHARED)
        turns, end = [turn and turn[0] for turn in found], 0
        for i, turn in enumerate(turns):
            if turn is not None:
                start = self._headers.behind_header(text, max(turn[0], end))
                end = max(start, turn[1])
                turns[i] = (skip_empty_block(text, start), end)
        return text, turns, tuple(notes)

    def _turn(self, text: str, messages: Messages, tools: Tools, number: int) -> tuple[Span, bool] | None:
        """Return the characters of one assistant turn, and whether it lacks a part of its prompt.

        None if the whole does not hold, behind its prompt, what the target had to write.
        """
        is_last = number == len(messages) - 1
        own = text if is_last else self._render_or_none(messages[: number + 1], tools)
        if own is None:
            return None
        if number == 0:
            start = self._first_difference(own, messages[0], tools)
            return (
                ((start, self.ends.of_turn(text, start, len(own))), False) if text.startswith(own) else None
            )
        prompts = self._prompts(messages[:number], tools)
        start, lacks_tail = self._headers.behind_prompt(text, prompts)
        if start < 0:
            return None
        start = skip_empty_block(text, start)
        if text.startswith(own):
            return (start, self.ends.of_turn(text, start, len(own))), lacks_tail
        end = self._end_as_written(text, start, own, prompts)
        return None if end is None else ((start, end), lacks_tail)

    def _prompts(self, before: Messages, tools: Tools) -> list[str]:
        """Return the prompts that ask for the turn behind these messages; none if the template raises."""
        if not before:
            return []
        rendered = [
            self._render_or_none(before, tools, prompt=True, **flags) for flags in self._prompt_variants
        ]
        return [prompt for prompt in rendered if prompt is not None]

    def _end_as_written(self, text: str, start: int, own: str, prompts: list[str]) -> int | None:
        """Return the end of the turn at `start` where the whole shows what the target wrote, else None.

        Args:
            own: the conversation that ends with the turn.
            prompts: those of the turn.
        """
        own_start, _ = self._headers.behind_prompt(own, prompts)
        if own_start < 0:
            return None
        own_start = skip_empty_block(own, own_start)
        written = own[own_start : self.ends.of_turn(own, own_start, len(own))]
        if text.startswith(written, start):
            return self.ends.of_turn(text, start, start + len(written))
        closing = max((c for c in self.ends.closers if written.endswith(c)), key=len, default="")
        body = written.removesuffix(closing)
        body_start = start
        if not text.startswith(body, start):
            # White space around a content may be stripped later on only.
            body, body_start = body.strip(), skip_blanks(text, start)
        end = body_start + len(body)
        if not body.strip() or not text.startswith(body, body_start):
            return None
        closing_start = skip_blanks(text, end)
        if text.startswith(closing, closing_start):
            return closing_start + len(closing) if closing else self.ends.of_turn(text, start, end)
        # gpt-oss: `Hi<|return|>` is shown as `Hi<|end|>` later on.
        return end if text.startswith(self.ends.closers, closing_start) else None

    def _first_difference(self, whole: str, message: dict[str, Any], tools: Tools) -> int:
        """Return the start of an opening assistant turn: the first character that another content changes."""
        content = message["content"].strip()
        other = self._render([{**message, "content": "b" if content.startswith("a") else "a"}], tools)
        return num_equal(whole, other)
