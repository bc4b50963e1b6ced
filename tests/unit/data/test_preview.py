"""Samples as text: split where the supervision changes, characters kept whole."""

from __future__ import annotations

from dflash_core.data.preview import pieces


def test_pieces_change_where_the_mark_does() -> None:
    assert pieces([97, 98, 99], [0, 1, 1], lambda ids: bytes(ids).decode()) == [("a", 0), ("bc", 1)]


def test_pieces_keep_characters_whole_and_terminals_safe() -> None:
    token_ids = list("\u00e9\x1b[2Jx\n".encode())
    marks = [0, 1, 1, 1, 1, 1, 1, 1]
    assert pieces(token_ids, marks, lambda ids: bytes(ids).decode("utf-8", "replace")) == [
        ("\u00e9", 0),
        ("\u241b[2Jx\n", 1),
    ]
