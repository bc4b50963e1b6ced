"""Control strings in data: texts of control tokens, broken by a noncharacter so that they stay plain text."""

from __future__ import annotations

import re
from typing import Any

# Noncharacters of Unicode, which interchanged text never contains.
BREAKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
BREAK_PATTERN = re.compile("[\ufdd0-\ufdef]")
# Keys of messages that need no search for control strings.
_PLAIN_KEYS = {"role", "content"}


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
