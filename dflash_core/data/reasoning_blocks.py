"""Empty reasoning blocks at the start of an answer, which no target has to write.

`<think>\\n\\n</think>\\n\\nHi` -> `Hi`. The opening may belong to the prompt: `\\n</think>Hi` -> `Hi`.
A block counts as one of reasoning by the name of its tags: it holds think, thought or reason.
"""

from __future__ import annotations

import re

_NAME = r"[\w:]*?(?:think|thought|reason)[\w:]*?"
# One alternative per way to write a pair of tags: <think> </think>, [THINK] [/THINK], and so on.
_PAIRS = (
    (rf"<\|?{_NAME}\|?>", rf"<\|?/{_NAME}\|?>"),
    (rf"\[{_NAME}\]", rf"\[/{_NAME}\]"),
    (rf"\u25c1{_NAME}\u25b7", rf"\u25c1/{_NAME}\u25b7"),
    (rf"<\|(?:start|begin)_(?:of_)?{_NAME}\|>", rf"<\|end_(?:of_)?{_NAME}\|>"),
    (rf"<\|{_NAME}_(?:start|begin)\|>", rf"<\|{_NAME}_end\|>"),
    (r"<\|channel>thought", r"<channel\|>"),
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<\|channel\|>analysis<\|message\|>", r"<\|end\|><\|start\|>assistant"),
    (r"<\|think\|>", r"<\|end\|><\|begin\|>assistant"),
)
_EMPTY = re.compile(
    r"\s*(?:" + "|".join(rf"(?:{opening}\s*)?{closing}\s*" for opening, closing in _PAIRS) + ")+",
    re.IGNORECASE,
)
_LAST = re.compile(
    "(?:" + "|".join(rf"{opening}\s*(?:{closing}\s*)?" for opening, closing in _PAIRS) + ")$", re.IGNORECASE
)


def skip_empty_block(text: str, start: int) -> int:
    """Return the position behind the empty reasoning blocks at `start`, or `start` if there is none."""
    match = _EMPTY.match(text, start)
    return match.end() if match else start


def last_block(prompt: str) -> int:
    """Return the start of the open or empty reasoning block that ends a prompt; its length if none does."""
    match = _LAST.search(prompt)
    return match.start() if match else len(prompt)
