"""What two rendered texts share at their start."""

from __future__ import annotations

import re

_BLANKS = re.compile(r"\s*")


def num_equal(one: str, other: str) -> int:
    """Return the number of characters at their start that two texts share."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def num_equal_tags(one: str, other: str) -> int:
    """Return the number of characters at their start that two texts share, without a part of a tag.

    `<think>Hi` and `<thanks>` -> 0.
    """
    shared = one[: num_equal(one, other)]
    opened = max(
        shared.rfind(opening) if shared.rfind(opening) > shared.rfind(closing) else -1
        for opening, closing in ("<>", "[]", "\u25c1\u25b7")
    )
    return len(shared) if opened < 0 else opened


def skip_blanks(text: str, position: int) -> int:
    """Return the first position from `position` on that holds no white space."""
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position
