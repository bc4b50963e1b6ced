"""Skeletons: the rendering of one shape of conversation (sequence of roles) without its contents.

A row whose own rendering equals the skeleton of its shape filled with its contents has the skeleton's turns.
Long shapes repeat themselves: their skeleton is extrapolated from that of their first and last messages, so
that its cost does not grow with the square of the number of turns. The comparison with the row's own
rendering checks every character of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_core.data.reasoning_blocks import skip_empty_block
from dflash_core.errors import UserError

Span = tuple[int, int]
Messages = list[dict[str, Any]]
Shape = tuple[str, ...]
# A position in a rendered text: number of contents before it, characters since the end of the last of these.
Border = tuple[int, int]
# Text, the turns (None: not supervised), notes.
Found = tuple[str, list[Span | None], tuple[str, ...]]

# Shapes of more messages are extrapolated from this many first and, about, last messages.
LONG = 48
_EDGE = 16
# Surrounds placeholders, to detect what a template strips.
_SPACE = "\t \t"


@dataclass(frozen=True)
class Skeleton:
    """A rendered text is pieces[0] content[0] pieces[1] content[1] ... with the borders of its turns."""

    pieces: list[str]
    # Whether the template strips each content: on the left, on the right.
    strips: list[tuple[bool, bool]]
    # Start and end of each turn.
    borders: list[tuple[Border, Border]]
    notes: tuple[str, ...]
    # Ends of generation prompts that the turns lack. A content that starts with one needs its own rendering.
    prompt_tails: tuple[str, ...] = ()

    def turns(self, text: str, messages: Messages) -> list[Span | None] | None:
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
        turns: list[Span | None] = []
        for (before_start, i), (before_end, j) in self.borders:
            start = ends[before_start] + i
            if self.prompt_tails and text.startswith(self.prompt_tails, start):
                return None
            turns.append((skip_empty_block(text, start), ends[before_end] + j))
        return turns


def make_skeleton(
    shape: Shape, find_turns: Callable[[Messages], Found], prompt_tails: tuple[str, ...]
) -> Skeleton | None:
    """Build the skeleton of a shape.

    Returns None if the placeholders are not rendered once each, in order, a turn is not found, or the
    template raises.
    """
    names = [f"qx{number}xq" for number in range(len(shape))]
    messages = [{"role": role, "content": _SPACE + name + _SPACE} for role, name in zip(shape, names)]
    try:
        text, turns, notes = find_turns(messages)
    except UserError:
        raise
    except Exception:
        # Templates raise any exception. Each row of this shape will report it.
        return None
    starts, ends, strips = [], [0], []
    for name in names:
        start, end = text.find(name), text.find(name) + len(name)
        if start < ends[-1] or text.count(name) != 1:
            return None
        strips.append((not text[:start].endswith(_SPACE), not text[end:].startswith(_SPACE)))
        starts.append(start if strips[-1][0] else start - len(_SPACE))
        ends.append(end if strips[-1][1] else end + len(_SPACE))

    def border(position: int) -> Border:
        before = max(number for number, end in enumerate(ends) if end <= position)
        return before, position - ends[before]

    spans = [turn for turn in turns if turn is not None]
    if len(spans) < len(turns):
        return None  # perhaps because of the white space around placeholders
    if any(s < position < e for span in spans for position in span for s, e in zip(starts, ends[1:])):
        return None  # a border lies inside a content
    borders = [(border(start), border(end)) for start, end in spans]
    pieces = [text[a:b] for a, b in zip(ends, [*starts, len(text)])]
    return Skeleton(pieces, strips, borders, notes, prompt_tails if notes else ())


def shorten(shape: Shape) -> tuple[Shape, int] | None:
    """Return the first and last messages of a long shape, and the number of the first of the last messages.

    The last messages follow one of the role that ends the first ones. None if there is no such place.
    """
    for first in range(len(shape) - _EDGE, len(shape)):
        if shape[first - 1] == shape[_EDGE - 1]:
            return shape[:_EDGE] + shape[first:], first
    return None


def extend(short: Skeleton, shape: Shape, first: int) -> Skeleton | None:
    """Return the skeleton of a long shape, given that of `shorten(shape)`; None if a pattern is missing.

    The middle repeats what the second half of the first messages shows: the text between two messages by
    their roles, the borders of a turn by its role and those of its neighbours.
    """
    gaps: dict[tuple[str, str], str] = {}
    strips: dict[str, tuple[bool, bool]] = {}
    borders: dict[Shape, tuple[Border, Border]] = {}
    numbers = [i for i, role in enumerate(shape) if role == "assistant"]
    if len(short.borders) != sum(i < _EDGE or i >= first for i in numbers):
        return None
    by_message = dict(zip((i for i in numbers if i < _EDGE or i >= first), short.borders))
    for i in range(_EDGE // 2, _EDGE - 1):
        gaps[shape[i], shape[i + 1]] = short.pieces[i + 1]
        strips[shape[i]] = short.strips[i]
        if i in by_message:
            borders[shape[i - 1 : i + 2]] = _moved(by_message[i], -i)
    middle = range(_EDGE, first)
    try:
        middle_gaps = [gaps[shape[i], shape[i + 1]] for i in range(_EDGE, first - 1)]
        joint = gaps[shape[_EDGE - 1], shape[_EDGE]]
        middle_strips = [strips[shape[i]] for i in middle]
        for i in middle:
            if shape[i] == "assistant":
                by_message[i] = _moved(borders[shape[i - 1 : i + 2]], i)
    except KeyError:
        return None
    removed = first - _EDGE
    for i in numbers:
        if i >= first:
            by_message[i] = _moved(by_message[i], removed)
    # short.pieces[_EDGE] lies between the two parts: behind a message of the role that ends the first part.
    pieces = [*short.pieces[:_EDGE], joint, *middle_gaps, *short.pieces[_EDGE:]]
    return Skeleton(
        pieces,
        [*short.strips[:_EDGE], *middle_strips, *short.strips[_EDGE:]],
        [by_message[i] for i in numbers],
        short.notes,
        short.prompt_tails,
    )


def _moved(borders: tuple[Border, Border], by: int) -> tuple[Border, Border]:
    """Return the borders of a turn as those of one that is `by` messages later."""
    (before_start, i), (before_end, j) = borders
    return (before_start + by, i), (before_end + by, j)
