"""Control strings in data: texts of control tokens, broken by a noncharacter so that they stay plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

# Noncharacters of Unicode, which interchanged text never contains.
BREAKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
BREAK_PATTERN = re.compile("[\ufdd0-\ufdef]")
# White space that a token swallows, by its flags lstrip and rstrip: that of Unicode.
_BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# Keys of messages that need no search for control strings.
_PLAIN_KEYS = {"role", "content"}


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of these texts, the longest first."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def find_strings(value: Any, pattern: re.Pattern[str]) -> set[str]:
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


def break_strings(value: Any, pattern: re.Pattern[str], broken: str) -> Any:
    """Return the value with `broken` inserted after the first character of each match."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + broken + match.group()[1:], value)
    if isinstance(value, dict):
        return {
            break_strings(k, pattern, broken): break_strings(v, pattern, broken) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [break_strings(item, pattern, broken) for item in value]
    return value


class BrokenTextEncoder:
    """Encoder of texts whose control strings are broken: those that are whole are the template's own.

    Args:
        encoder: a tokenizer of its own, which is changed here.
        broken: the character that was inserted into control strings of data.
        control_ids: control tokens, by their texts.
    """

    def __init__(self, encoder: Tokenizer, broken: str, control_ids: Mapping[str, int]) -> None:
        self._broken, self._control_ids = broken, control_ids
        self._controls = any_of(control_ids)
        self._added = encoder.get_added_tokens_decoder()
        # Its only control token is `broken`; all control strings are plain text. An end of turn counts as one
        # although the tokenizer may not call it special.
        encoder.add_special_tokens(
            [self._added[i] for i in control_ids.values() if not self._added[i].special]
        )
        encoder.encode_special_tokens = True
        encoder.add_tokens([AddedToken(broken, normalized=False)])
        self._encoder = encoder

    def encode(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids and the characters [start, end) of each token, in the text with `broken`."""
        token_ids: list[int] = []
        spans: list[tuple[int, int]] = []
        position = 0
        for match in self._controls.finditer(text):
            token_id = self._control_ids[match.group()]
            token = self._added[token_id]
            plain = text[position : match.start()]
            self._plain(plain.rstrip(_BLANKS) if token.lstrip else plain, position, token_ids, spans)
            token_ids.append(token_id)
            spans.append(match.span())
            position = match.end()
            while token.rstrip and position < len(text) and text[position] in _BLANKS:
                position += 1
        self._plain(text[position:], position, token_ids, spans)
        bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return np.array(token_ids, dtype=np.int32), bounds[:, 0], bounds[:, 1]

    def _plain(self, piece: str, start: int, token_ids: list[int], spans: list[tuple[int, int]]) -> None:
        """Append the tokens of a piece of plain text that starts at the character `start`."""
        positions = [start + i for i, character in enumerate(piece) if character != self._broken]
        positions.append(start + len(piece))
        # Text after a control token must not be encoded like the start of a text.
        first = int(start > 0)
        unbroken = self._broken * first + piece.replace(self._broken, "")
        encoding = self._encoder.encode(unbroken, add_special_tokens=False)
        token_ids += encoding.ids[first:]
        for a, b in encoding.offsets[first:]:
            a, b = max(a - first, 0), max(b - first, 0)
            spans.append((positions[a], positions[b - 1] + 1 if b > a else positions[a]))
