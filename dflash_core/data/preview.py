"""Samples as readable text, split where the supervision changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: chr(0x2421)}


def pieces(
    token_ids: Sequence[int], marks: Sequence[Hashable], decode: Callable[[list[int]], str]
) -> list[tuple[str, Hashable]]:
    """Return a sample's text, split where the mark of its tokens changes, e.g. from supervised to not.

    A character that spans several tokens is not split: it belongs to the piece of its first token. Control
    characters of the data are replaced by visible symbols, so that no data can control a terminal.

    Args:
        token_ids: ids of one sample's tokens.
        marks: one mark per token: the loss mask, or any hashable value.
        decode: converts token ids to text.

    Example: tokens "a", "b", "c" with marks 0, 1, 1 -> [("a", 0), ("bc", 1)].
    """
    out: list[tuple[str, Hashable]] = []
    group: list[int] = []
    first_mark: Hashable = None
    for token_id, mark in zip(token_ids, marks, strict=True):
        if group and mark != first_mark:
            text = decode(group)
            if not text.endswith("\ufffd") or len(group) > 64:
                out.append((text.translate(_VISIBLE), first_mark))
                group = []
        if not group:
            first_mark = mark
        group.append(int(token_id))
    if group:
        out.append((decode(group).translate(_VISIBLE), first_mark))
    return out
