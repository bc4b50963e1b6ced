"""The structure of JSON text: where a value ends, and whether that is certain although it is invalid.

An invalid value may still have a certain end: `{"a": nope}` has one, `{"a": "5" wide"}` has none, since its
last quote may open a string that runs into the next values. The end is certain when brackets match in kind,
every string stands on one line between brackets, commas and colons, and colons stand behind the names of
objects alone.
"""

from __future__ import annotations

import re

_STRING = rb'"(?:[^"\\]++|\\.)*+'
# A string, the beginning of one at the end of the data, a bracket or separator, or any other word.
_TOKEN = re.compile(rb'%b("|\\?\Z)|[{}\[\],:]|[^\s"{}\[\],:]++' % _STRING, re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("|\\?\Z)', re.DOTALL)
_OPENING, _CLOSING = b"{[", b"}]"
# What a value may follow: nothing, an opening bracket, a comma or a colon.
_BEFORE_VALUE = b"\0{[,:"
_NOTHING, _WORD, _STRING_END, _CLOSED = 0, ord("w"), ord('"'), ord("}")
_MAX_DEPTH = 1 << 20
_LINES = "a string over several lines, perhaps a quote that is missing or not escaped"


class Uncertain(Exception):
    """The end of a value is not certain; the text says why."""


class Structure:
    """The state of a scan through the bytes of one element of an array, which may come in pieces."""

    def __init__(self) -> None:
        self._stack = bytearray()
        self._previous = _NOTHING
        self._is_name = False
        self._is_in_string = False
        self._is_escaped = False

    @property
    def is_open(self) -> bool:
        """Return True if the bytes so far end inside a bracket."""
        return bool(self._stack)

    def scan(self, data: bytes, position: int) -> int | None:
        """Scan from a position on; return the position of the comma or bracket behind the element, or None.

        None: the element continues behind these bytes, with which the next call has to begin.

        Raises:
            Uncertain: where the element ends is not certain.
        """
        if self._is_in_string:
            position = self._finish_string(data, position)
        if self._is_in_string:
            return None
        for match in _TOKEN.finditer(data, position):
            kind = data[match.start()]
            if kind == ord('"') and data.find(b"\n", match.start(), match.end()) >= 0:
                raise Uncertain(_LINES)
            if kind in b",:" or kind in _CLOSING:
                if not self._stack and kind in b",]":
                    return match.start()
                self._close_or_separate(kind)
            else:
                self._begin_value(kind, match)
        return None

    def _finish_string(self, data: bytes, position: int) -> int:
        position += self._is_escaped and position < len(data)
        match = _REST_OF_STRING.match(data, position)
        assert match is not None
        if data.find(b"\n", position, match.end()) >= 0:
            raise Uncertain(_LINES)
        self._is_in_string = match.group(1) != b'"'
        self._is_escaped = match.group(1) == b"\\"
        return match.end()

    def _close_or_separate(self, kind: int) -> None:
        if not self._stack:
            raise Uncertain(f"{chr(kind)!r} without an opening bracket")
        is_name = self._is_name and self._previous in (_STRING_END, _WORD)
        if is_name != (kind == ord(":")):
            raise Uncertain("a name and a colon that do not belong together")
        if kind in b",:":
            self._previous = kind
            return
        opening = self._stack.pop()
        if opening != (ord("{") if kind == ord("}") else ord("[")):
            raise Uncertain(f"{chr(opening)!r} is closed by {chr(kind)!r}")
        self._previous = _CLOSED

    def _begin_value(self, kind: int, match: re.Match[bytes]) -> None:
        """Check what a string, a word or an opening bracket follows."""
        is_word = kind != ord('"') and kind not in _OPENING
        if self._previous not in _BEFORE_VALUE and not (is_word and self._previous == _WORD):
            raise Uncertain("text next to a string or bracket, perhaps a quote that is not escaped")
        # Inside of an object, what follows the opening bracket or a comma is a name.
        is_in_object = bool(self._stack) and self._stack[-1] == ord("{")
        if self._previous != _WORD:
            self._is_name = is_in_object and self._previous in b"{,"
        if kind in _OPENING:
            if self._is_name:
                raise Uncertain("a bracket in place of a name, perhaps after a missing bracket")
            if len(self._stack) == _MAX_DEPTH:
                raise Uncertain(f"more than {_MAX_DEPTH} open brackets")
            self._stack.append(kind)
            self._previous = kind
        elif is_word:
            self._previous = _WORD
        else:
            # The closing quote, or the backslash or nothing at the end of the data.
            self._is_in_string = match.group(1) != b'"'
            self._is_escaped = match.group(1) == b"\\"
            self._previous = _STRING_END


def is_one_value(text: bytes) -> bool:
    """Return True if a text is one element whose end is certain, valid or not."""
    try:
        return Structure().scan(text + b",", 0) == len(text)
    except Uncertain:
        return False
