"""Elements of a JSON array, one at a time.

An element that is invalid JSON is rejected alone when its end is certain (`json_structure.py`). Where it is
not, reading resumes at a later element only if the array holds one element per line: every element before
stood on a line of its own, and each line from the invalid one to the next valid one begins an object with a
first name that earlier rows have; these lines are rejected, one row each. Any other array that breaks off
fails the file, because its rows cannot be counted, and so does text behind its closing bracket.

Memory holds one element, at most `MAX_ROW_BYTES` and a chunk of it; what is longer is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Any

from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.json_structure import Structure, Uncertain, is_one_value
from dflash_core.data.raw_rows import NOT_AN_OBJECT, RawRow, parse, too_large
from dflash_core.errors import UserError

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
# A string, an object of nothing but strings and numbers, a bracket or comma, or the start of an
# unfinished string.
_TOKEN = re.compile(rb'%b|\{(?:[^"{}\[\]]++|%b)*+\}|[{}\[\],]|"' % (_STRING, _STRING), re.DOTALL)
_BLANKS = re.compile(rb"[ \t\r\n]*+")
_FIRST_NAME = re.compile(rb'\{\s*+("(?:[^"\\]++|\\.)*+")\s*+:', re.DOTALL)
_MAX_NAMES = 1000
_BREAKS_OFF = "it breaks off, without a closing bracket"


class JsonArray:
    """Reader of an array.

    Args:
        source: the start of error messages: the setting and the file.
        first: bytes already read, from the opening bracket on.
        line: the line of the opening bracket.
        stream: the bytes behind `first`.
    """

    def __init__(self, source: str, first: bytes, line: int, stream: Any) -> None:
        self._source, self._stream = source, stream
        # Of the next element: its position in the buffer, its line and its number.
        self._buffer, self._start, self._line, self._number = first, first.index(b"[") + 1, line, 1
        # The next element is the first one of its line, and so were all others, each on one line.
        self._is_first_of_line = self._are_all_on_own_lines = True
        self._is_too_large = self._has_resumed = False
        # First names of the objects so far, as JSON.
        self._names: set[bytes] = set()

    def rows(self) -> Iterator[RawRow]:
        """Yield the elements.

        Raises:
            UserError: the array breaks off, text follows it, or it cannot be read on.
        """
        ended = False
        while not ended:
            self._skip_blanks()
            try:
                row, ended = self._next()
            except Uncertain as reason:
                ended = yield from self._resume(str(reason))
                continue
            if row is not None:
                yield row
        self._check_rest()

    def _error(self, reason: str, line: int | None = None, number: int | None = None) -> UserError:
        line, number = line or self._line, number or self._number
        return UserError(
            f"{self._source}: the JSON array cannot be read from element {number} (line {line}) on: "
            f"{reason}; allowed: a complete array; where elements are invalid JSON, one element per line"
        )

    def _more(self) -> bool:
        """Drop what lies before the next element, and read on; return False at the end of the file."""
        held = len(self._buffer) - self._start
        # Twice as much each time, so that copying takes linear time, up to the limit.
        chunk = self._stream.read(max(raw_rows.CHUNK_BYTES, min(held, raw_rows.MAX_ROW_BYTES - held)))
        self._buffer, self._start = self._buffer[self._start :] + chunk, 0
        return bool(chunk)

    def _advance(self, end: int) -> None:
        """Go to a position in the buffer, and count the lines before it."""
        self._line += self._buffer.count(b"\n", self._start, end)
        self._start = end

    def _skip_blanks(self) -> None:
        num_blank, before = 0, self._line
        while True:
            match = _BLANKS.match(self._buffer, self._start)
            assert match is not None
            num_blank += match.end() - self._start
            self._advance(match.end())
            if self._start < len(self._buffer):
                break
            if num_blank > raw_rows.MAX_BLANK_BYTES:
                raise self._error(f"over {raw_rows.MAX_BLANK_BYTES >> 20} MiB of blanks")
            if not self._more():
                raise self._error(_BREAKS_OFF)
        self._is_first_of_line = self._line > before or self._number == 1 or self._has_resumed
        self._has_resumed = False

    def _next(self) -> tuple[RawRow | None, bool]:
        """Return the next element, None if nothing is left, and whether the array ends behind it."""
        line, end = self._line, self._find_end()
        element, ended = self._buffer[self._start : end], self._buffer[end] == ord("]")
        row: RawRow | None = None
        if element or self._is_too_large or not ended:
            row = RawRow(line, self._value(element), self._number)
            self._number += 1
            self._are_all_on_own_lines &= self._is_first_of_line and b"\n" not in element
        self._is_too_large = False
        self._advance(end + 1)
        return row, ended

    def _value(self, element: bytes) -> Any:
        if self._is_too_large:
            return too_large()
        value = too_large() if len(element) > raw_rows.MAX_ROW_BYTES else parse(element)
        if value is None:
            return Rejection("invalid JSON", "empty element")
        if isinstance(value, Rejection) and value.reason != NOT_AN_OBJECT:
            # In an array of one element per line it would hold several lines, so perhaps several elements.
            is_unusual = self._are_all_on_own_lines and self._number > 1 and b"\n" in element
            if is_unusual or not is_one_value(element):
                raise Uncertain(value.detail)
        if isinstance(value, dict) and len(self._names) < _MAX_NAMES:
            self._names.update(_first_name(element))
        return value

    def _find_end(self) -> int:
        """Return the position of the comma or bracket behind the next element.

        Brackets and strings alone decide. Elements of more than two chunks are checked on the way, so that an
        invalid one does not take the rest of the file with it.
        """
        scan, depth = self._start, 0
        while True:
            match = _TOKEN.search(self._buffer, scan)
            if match is None or match.group() == b'"':
                if len(self._buffer) - self._start >= 2 * raw_rows.CHUNK_BYTES:
                    return self._find_far_end()
                if not self._more():
                    # Raises if there is more to say.
                    Structure().scan(self._buffer, self._start)
                    raise Uncertain(_BREAKS_OFF)
                scan, depth = self._start, 0
                continue
            token, scan = match.group(), match.end()
            if token in (b"{", b"["):
                depth += 1
            elif token in (b"}", b"]") and depth:
                depth -= 1
            elif depth == 0 and token in (b",", b"]"):
                return match.start()

    def _find_far_end(self) -> int:
        """Return the same for a large element; above the limit its bytes are dropped."""
        structure, position = Structure(), self._start
        while (end := structure.scan(self._buffer, position)) is None:
            if len(self._buffer) - self._start > raw_rows.MAX_ROW_BYTES:
                self._is_too_large = True
                self._are_all_on_own_lines &= self._buffer.find(b"\n", self._start) < 0
                self._advance(len(self._buffer))
            scanned = len(self._buffer) - self._start
            if not self._more():
                raise Uncertain(_BREAKS_OFF)
            position = scanned
        return end

    def _resume(self, reason: str) -> Generator[RawRow, None, bool]:
        """Yield the lines from an invalid element on as rows, up to a valid one; see the module's docstring.

        Returns:
            True at the closing bracket, False at an element.
        """
        if self._is_too_large or not (self._are_all_on_own_lines and self._is_first_of_line):
            raise self._error(reason)
        first, is_first, must_end = (self._line, self._number), True, False
        while True:
            end = self._end_of_line()
            text = self._buffer[self._start : end].strip()
            if text == b"]":
                self._advance(self._start + self._buffer[self._start : end].index(b"]") + 1)
                return True
            if text:
                name = _first_name(text)
                if not name or must_end or (self._names and not name <= self._names):
                    raise self._error(reason, *first)
                self._names.update(name)
                value = _element_of_line(text)
                if isinstance(value, dict) and not is_first:
                    self._has_resumed = True
                    return False
                # The last element has no comma; the closing bracket has to follow.
                must_end = not isinstance(value, dict) and not text.endswith(b",")
                if must_end and self._buffer[end - 1] != ord("\n"):
                    raise self._error(_BREAKS_OFF)
                yield RawRow(self._line, value, self._number)
                self._number += 1
                is_first = False
            self._advance(end)
            if self._start == len(self._buffer) and not self._more():
                raise self._error(_BREAKS_OFF)

    def _end_of_line(self) -> int:
        """Return the position behind the line on which the next element stands."""
        searched = 0
        while (end := self._buffer.find(b"\n", self._start + searched)) < 0:
            searched = len(self._buffer) - self._start
            if searched > raw_rows.MAX_ROW_BYTES:
                raise self._error(f"a line of over {raw_rows.MAX_ROW_BYTES >> 20} MiB")
            if not self._more():
                return len(self._buffer)
        return end + 1

    def _check_rest(self) -> None:
        """Check that nothing but blanks follows the array."""
        while True:
            rest = self._buffer[self._start :]
            if text := rest.lstrip():
                self._advance(len(self._buffer) - len(text))
                raise UserError(
                    f"{self._source}: text behind the JSON array, line {self._line}: {text[:60]!r}; "
                    "allowed: one array per file, or JSON lines"
                )
            self._advance(len(self._buffer))
            if not self._more():
                return


def _first_name(text: bytes) -> set[bytes]:
    match = _FIRST_NAME.match(text)
    return {match.group(1)} if match else set()


def _element_of_line(text: bytes) -> Any:
    """Return the value of a line that holds one element, with the comma or the bracket that follows it."""
    value = parse(text.removesuffix(b","))
    if isinstance(value, Rejection) and text.endswith(b"]"):
        last = parse(text.removesuffix(b"]"))
        return last if isinstance(last, dict) else value
    return value
