"""Loss masks: from the characters that the assistant wrote to its tokens.

A token is supervised when all of its characters lie inside a turn. Two ways give the same mask: by the byte
lengths of tokens, for byte-level tokenizers, and by the offsets that the tokenizer returns, for all others.

Shape letter: S tokens of one sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dflash_core.data.template import Span, TemplateError


def supervised_turns(
    turns: Sequence[Span | None], messages: Sequence[Mapping[str, Any]], unsupervised: frozenset[int]
) -> list[Span]:
    """Return the rendered turns without those of the messages `unsupervised`.

    Assistant turns of the messages 1, 3 and 5, of which 3 is unsupervised: the first and last turn.

    Args:
        turns: of all assistant messages in order, or of the last one alone; None where none was found.
        messages: the conversation.
        unsupervised: indices of assistant messages.

    Raises:
        TemplateError: no turn is left, or turns and messages cannot be matched.
    """
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if unsupervised.issuperset(numbers):
        detail = "each assistant turn is blank, or marked as not to be trained on"
        raise TemplateError("no supervised turn", detail)
    if len(turns) not in (1, len(numbers)):
        detail = f"{len(turns)} turns of {len(numbers)} are rendered"
        raise TemplateError("unsupervised turn not found", detail)
    numbered = zip(numbers[-len(turns) :], turns)
    kept = [turn for number, turn in numbered if turn is not None and number not in unsupervised]
    if not kept:
        detail = "each turn that was found is blank, or marked as not to be trained on"
        raise TemplateError("no supervised turn", detail)
    return kept


def bytes_of_tokens(encoder: Tokenizer) -> NDArray[np.int32] | None:
    """Return the UTF-8 bytes per token, int32 by id; None if tokens are not runs of bytes of the text.

    Known for byte-level tokenizers without normaliser, whose tokens are written with one character per byte.
    Their offsets follow from the ids, and encoding without offsets takes about 15% less time.
    """
    specification = json.loads(encoder.to_str())
    splitter = specification["pre_tokenizer"] or {}
    parts = splitter.get("pretokenizers", [splitter])
    levels = [part for part in parts if part.get("type") == "ByteLevel"]
    plain = specification["normalizer"] is None and specification["model"].get("type") == "BPE"
    if not plain or len(levels) != 1 or levels[0].get("add_prefix_space"):
        return None
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    num_bytes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    for text, token_id in vocabulary.items():
        num_bytes[token_id] = len(text)
    for token_id, token in encoder.get_added_tokens_decoder().items():
        num_bytes[token_id] = len(token.content.encode())
    return num_bytes


def mask_by_bytes(
    token_ids: NDArray[np.int32], text: str, turns: Sequence[Span], num_bytes: NDArray[np.int32]
) -> NDArray[np.uint8] | None:
    """Return the loss mask, uint8 [S], by the byte lengths of tokens; None if they do not add up to the text.

    Tokens of 3, 1, 2 bytes end at 3, 4, 6: a turn of bytes 3 to 6 holds the second and the third.
    """
    ends = np.cumsum(num_bytes[token_ids])
    is_ascii = text.isascii()
    if len(ends) and ends[-1] != (len(text) if is_ascii else len(text.encode())):
        return None
    starts = ends - num_bytes[token_ids]
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    for turn in turns:
        start, end = turn if is_ascii else (len(text[:border].encode()) for border in turn)
        loss_mask[np.searchsorted(starts, start) : np.searchsorted(ends, end, side="right")] = 1
    return loss_mask


def mask_by_offsets(encoding: Any, turns: Sequence[Span]) -> NDArray[np.uint8]:
    """Return the loss mask, uint8 [S], of an encoding with offsets."""
    loss_mask = np.zeros(len(encoding), dtype=np.uint8)
    for start, end in turns:
        loss_mask[slice(*token_range(encoding, start, end))] = 1
    return loss_mask


def token_range(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Return (first, stop) of the tokens that lie completely inside the characters [start, end)."""
    first = None
    while start < end and (first := encoding.char_to_token(start)) is None:
        start += 1  # white space that is not part of any token
    if first is None:
        return 0, 0
    if encoding.token_to_chars(first)[0] < start:
        first += 1
    last = None
    position = end - 1
    while position >= start and (last := encoding.char_to_token(position)) is None:
        position -= 1
    assert last is not None
    stop = last + 1
    while stop < len(encoding) and (characters := encoding.token_to_chars(stop)) and characters[1] <= end:
        stop += 1  # further tokens of the same character
    if encoding.token_to_chars(last)[1] > end:
        stop = last
    return first, max(first, stop)
