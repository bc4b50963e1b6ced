"""A chat template: the text of a conversation and the characters of it that the assistant wrote.

How turns are found. A template with `{% generation %}` marks its assistant turns. For any other template, the
conversation is rendered up to each assistant turn, once with the generation prompt (P) and once with the turn
(F). Both must be prefixes of the whole; the turn is then whole[len(P):len(F)]. A template that renders
earlier turns differently fails that check: depending on `data.rewritten_history`, only the last turn is
supervised, or the row is rejected.

Text that belongs to the generation prompt is not supervised. This includes the empty reasoning block that
some templates print when thinking is off: P is also rendered with thinking off, and the longest matching
P is used.

This costs two renderings per turn. Almost all rows of a file share a few shapes (sequences of roles), so
each shape is rendered once with placeholders for its contents; a row whose own rendering equals that
skeleton filled with its contents has the skeleton's turns. Every other row takes the slow path. The row
itself is always rendered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import chat_template_utils

from dflash_core.errors import UserError

Span = tuple[int, int]
Messages = list[dict[str, Any]]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_SHAPES = 1000
# Surrounds placeholders, to detect what a template strips.
_SPACE = "\t \t"


class TemplateError(Exception):
    """A conversation whose turns cannot be found: a short stable reason and details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Skeleton:
    """The rendering of one shape of conversation without its contents.

    A rendered text is pieces[0] content[0] pieces[1] content[1] ... A border of a turn is given as (number of
    contents before it, number of characters since the end of the last of these).
    """

    pieces: list[str]
    # Whether the template strips each content: on the left, on the right.
    strips: list[tuple[bool, bool]]
    # Start and end of each turn.
    borders: list[tuple[tuple[int, int], tuple[int, int]]]
    notes: tuple[str, ...]

    def turns(self, text: str, messages: Messages) -> list[Span] | None:
        """Return the turns of `text`; None if it is not this skeleton filled with the messages' contents."""
        filled, ends, position = [self.pieces[0]], [0], len(self.pieces[0])
        for message, (left, right), piece in zip(messages, self.strips, self.pieces[1:]):
            content = message["content"]
            content = content.lstrip() if left else content
            content = content.rstrip() if right else content
            filled += (content, piece)
            ends.append(position + len(content))
            position = ends[-1] + len(piece)
        if "".join(filled) != text:
            return None
        return [(ends[a] + i, ends[b] + j) for (a, i), (b, j) in self.borders]


@dataclass
class ChatTemplate:
    """A chat template that renders conversations and finds the assistant's turns.

    Args:
        text: the Jinja template.
        special_names: the tokenizer's bos_token etc., which templates print.
        controls: texts of the tokenizer's control tokens.
        rewritten_history: `data.rewritten_history`.

    Raises:
        UserError: the template does not compile.
    """

    text: str
    special_names: dict[str, str]
    controls: Sequence[str]
    rewritten_history: str
    _end_of_turn: str | None = field(init=False, default=None)
    _generation_prompts: list[str] = field(init=False, default_factory=list)
    _skeletons: dict[tuple[str, ...], Skeleton | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._marks_turns = bool(_GENERATION.search(self.text))
        flags = [name for name in ("enable_thinking", "thinking") if self.reads(name)]
        self._prompt_variants: list[dict[str, Any]] = [{}, *({name: False} for name in flags)]
        # The compiler of `apply_chat_template`, without the copies that it makes of each message.
        self._compiled = _compile(self.text)
        self._probe()

    def reads(self, name: str) -> bool:
        """Return True if the template mentions a field, e.g. `tool_calls`."""
        return re.search(rf"\b{name}\b", self.text) is not None

    def _probe(self) -> None:
        """Find the end-of-turn token and the generation prompts with a conversation of two turns."""
        question = [{"role": "user", "content": "Ready?"}]
        if not self._probe_with(question):
            self._probe_with([{"role": "system", "content": "Be brief."}, *question])

    def _probe_with(self, question: Messages) -> bool:
        """Probe with this question and an answer; return False if the template does not render them."""
        messages = [*question, {"role": "assistant", "content": "Yes, ready."}]
        try:
            whole = self._render(messages, None)
            asked = self._render(question, None)
            prompts = [self._render(question, None, prompt=True, **flags) for flags in self._prompt_variants]
        except Exception:
            # Templates raise any exception, here e.g. because they require other roles. Rows will report it.
            return False
        suffixes = {p[len(asked) :] for p in prompts if p.startswith(asked) and len(p) > len(asked)}
        self._generation_prompts = sorted(suffixes, key=len, reverse=True)
        position = whole.rfind("Yes, ready.")
        after = [(whole.find(c, position), -len(c), c) for c in self.controls if whole.find(c, position) >= 0]
        if position >= 0 and after:
            self._end_of_turn = min(after)[2]
        if self._marks_turns and not self._turns_marked(messages, None)[1]:
            # The block is in a comment, or is never reached.
            self._marks_turns = False
        return True

    def _render(
        self, messages: Messages, tools: list[dict[str, Any]] | None, *, prompt: bool = False, **flags: Any
    ) -> str:
        return self._compiled.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **{**self.special_names, **flags},
        )

    def render(
        self, messages: Messages, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[Span], tuple[str, ...]]:
        """Return the text, the turns as characters [start, end), and notes.

        Raises:
            TemplateError: the template rewrites earlier turns and `rewritten_history` is "refuse", or it
                rewrites the last turn.
            Exception: any error that the template raises.
        """
        skeleton = self._skeleton_of(messages) if tools is None else None
        if skeleton is not None:
            text = self._render(messages, None)
            turns = skeleton.turns(text, messages)
            if turns is not None:
                return text, turns, skeleton.notes
        return self._render_slowly(messages, tools)

    def render_prompt(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
        """Return the text of a conversation that the model is to continue."""
        return self._render(messages, tools, prompt=True)

    def open_end(self, text: str, turn: Span) -> Span:
        """Return a turn without its closing: final control tokens, and white space before and after them.

        `Hi<|im_end|>` -> `Hi`. White space at the end of the content itself is removed too: at
        worst one token.
        """
        start, end = turn
        while end > start:
            if text[end - 1].isspace():
                end -= 1
            elif closing := [c for c in self.controls if text.endswith(c, start, end)]:
                end -= max(map(len, closing))
            else:
                break
        return start, end

    def _render_slowly(
        self, messages: Messages, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[Span], tuple[str, ...]]:
        if self._marks_turns:
            return self._turns_marked(messages, tools)
        return self._turns_by_prefixes(messages, tools)

    def _skeleton_of(self, messages: Messages) -> Skeleton | None:
        if any(len(message) != 2 for message in messages):  # fields other than role and content
            return None
        shape = tuple(message["role"] for message in messages)
        if shape not in self._skeletons:
            if len(self._skeletons) >= _MAX_SHAPES:
                return None
            self._skeletons[shape] = self._make_skeleton(shape)
        return self._skeletons[shape]

    def _make_skeleton(self, shape: tuple[str, ...]) -> Skeleton | None:
        """Build the skeleton of a shape.

        Returns None if the placeholders are not rendered once each, in order, or if the template raises.
        """
        names = [f"qx{number}xq" for number in range(len(shape))]
        messages = [{"role": role, "content": _SPACE + name + _SPACE} for role, name in zip(shape, names)]
        try:
            text, turns, notes = self._render_slowly(messages, None)
        except Exception:
            # Each row of this shape will report it.
            return None
        starts, ends, strips = [], [0], []
        for name in names:
            start, end = text.find(name), text.find(name) + len(name)
            if start < ends[-1] or text.count(name) != 1:
                return None
            strips.append((not text[:start].endswith(_SPACE), not text[end:].startswith(_SPACE)))
            starts.append(start if strips[-1][0] else start - len(_SPACE))
            ends.append(end if strips[-1][1] else end + len(_SPACE))

        def border(position: int) -> tuple[int, int]:
            before = max(number for number, end in enumerate(ends) if end <= position)
            return before, position - ends[before]

        borders = [(border(start), border(end)) for start, end in turns]
        if any(s < position < e for span in turns for position in span for s, e in zip(starts, ends[1:])):
            return None  # a border lies inside a content
        pieces = [text[a:b] for a, b in zip(ends, [*starts, len(text)])]
        return Skeleton(pieces, strips, borders, notes)

    def _turns_marked(
        self, messages: Messages, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[Span], tuple[str, ...]]:
        """Find turns by the template's own `{% generation %}` blocks, less the generation prompt's text."""
        texts, indices = _render_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **self.special_names,
        )
        text, turns = texts[0], []
        for start, end in indices[0]:
            for prompt in self._generation_prompts:
                ends = range(min(end, start + len(prompt)), max(start, len(prompt)) - 1, -1)
                inside = next((p for p in ends if text.startswith(prompt, p - len(prompt))), None)
                if inside is not None:
                    start = inside
                    break
            turns.append((start, self._turn_end(text, start, end)))
        return text, turns, ()

    def _turns_by_prefixes(
        self, messages: Messages, tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[Span], tuple[str, ...]]:
        """Find turns by rendering up to, and with, each assistant turn; see the module's docstring."""
        text = self._render(messages, tools)
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [self._turn(text, messages, tools, number) for number in numbers]
        unchanged = [turn for turn in turns if turn is not None]
        if len(unchanged) == len(turns):
            return text, unchanged, ()
        if self.rewritten_history == "refuse":
            raise TemplateError("chat template rewrites earlier turns", "data.rewritten_history is refuse")
        if turns[-1] is None:
            raise TemplateError(
                "chat template rewrites the last turn", "its prompt is not a prefix of the whole"
            )
        return text, [turns[-1]], ("supervised by the last turn only (the template rewrites earlier turns)",)

    def _turn(
        self, text: str, messages: Messages, tools: list[dict[str, Any]] | None, number: int
    ) -> Span | None:
        """Return the characters of one assistant turn; None if it is rendered differently in the whole."""
        whole = text if number == len(messages) - 1 else self._render(messages[: number + 1], tools)
        if not text.startswith(whole):
            return None
        if number == 0:
            start = self._first_difference(whole, messages[0], tools)
        else:
            before = messages[:number]
            prompts = [self._render(before, tools, prompt=True, **flags) for flags in self._prompt_variants]
            start = max((len(prompt) for prompt in prompts if whole.startswith(prompt)), default=-1)
        if start < 0:
            return None
        return start, self._turn_end(text, start, len(whole))

    def _first_difference(
        self, whole: str, message: dict[str, Any], tools: list[dict[str, Any]] | None
    ) -> int:
        """Return the start of an opening assistant turn: the first character that another content changes."""
        content = message["content"].strip()
        other = self._render([{**message, "content": "b" if content.startswith("a") else "a"}], tools)
        return next((i for i, (x, y) in enumerate(zip(whole, other)) if x != y), min(len(whole), len(other)))

    def _turn_end(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn that is rendered as text[start:end].

        The turn ends after the first end-of-turn token among the control tokens at its end, white space
        skipped. If none of these is the end-of-turn token, it ends after one that follows text[start:end], or
        else after the last control token.

        `Hi<|im_end|>\\n<|endoftext|>` -> after `<|im_end|>`; `<|call|>f<|/call|><|im_end|>` -> the same;
        `<|call|>f<|/call|><|eom|>` -> after `<|eom|>`.
        """
        # End and text of each control token that closes the turn, the last one first.
        closing: list[tuple[int, str]] = []
        position, controls = end, tuple(self.controls)
        while True:
            while position > start and text[position - 1].isspace():
                position -= 1
            if not controls or not text.endswith(controls, start, position):
                break
            control = max((c for c in controls if text.endswith(c, start, position)), key=len)
            closing.append((position, control))
            position -= len(control)
        ends = [close_end for close_end, control in closing if control == self._end_of_turn]
        if ends:
            return ends[-1]
        following = end
        while following < len(text) and text[following].isspace():
            following += 1
        if self._end_of_turn and text.startswith(self._end_of_turn, following):
            return following + len(self._end_of_turn)
        return closing[0][0] if closing else end


# Annotated as str; it returns (texts, indices).
_render_template: Any = chat_template_utils.render_jinja_template


def _compile(text: str) -> Any:
    try:
        return chat_template_utils._compile_jinja_template(text)
    except Exception as error:
        if any(kind.__name__ == "TemplateSyntaxError" for kind in type(error).__mro__):
            raise UserError(f"data.chat_template: does not compile: {error}") from error
        raise
