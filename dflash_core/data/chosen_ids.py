"""Regenerated rows as the ids that the target chose, where the text of a row encodes to others.

Text does not always lead back to its ids: a chat template may strip blanks, decoding drops special tokens
(those that open a tool call), sampling may choose another split of a word, and an answer may end with another
token than the template writes. A drafter learns to continue what its target writes, so such rows keep ids.

The ids of a row are those of its text, in which each generated turn is replaced by the rest of its own prompt
and by its own answer. Where the template renders earlier turns differently (`rewritten_history`), they are
the prompt and the answer of the last turn, the only one that is supervised.

    text     <user> q <assistant> Hello <end> <user> r <assistant> Yes <end>
    chosen   <user> q <assistant> _Hello <end> <user> r <assistant> Yes <end>
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dflash_core.data.answers import LENGTH, Answer
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Sample


@dataclass(frozen=True)
class GeneratedTurn:
    """An answer and the ids of the prompt that it continues."""

    prompt_ids: list[int]
    answer: Answer


@dataclass
class Tokenised:
    """Token ids and loss mask of a row."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)

    def add(self, token_ids: list[int], is_supervised: int) -> None:
        self.token_ids += token_ids
        self.loss_mask += [is_supervised] * len(token_ids)

    def starts(self, sample: Sample) -> bool:
        """Return True if the sample starts with these ids and mask, and supervises nothing after them."""
        length = len(self.token_ids)
        is_same = sample.token_ids[:length].tolist() == self.token_ids
        return is_same and sample.loss_mask.nonzero()[0].tolist() == np.flatnonzero(self.loss_mask).tolist()


def chosen_ids(
    encoder: ChatEncoder, conversation: Conversation, generated: Mapping[int, GeneratedTurn]
) -> tuple[Tokenised | None, int]:
    """Compare the ids of a row's text with those that the target chose.

    Args:
        encoder: the target's.
        conversation: the row as ingest reads it.
        generated: the generated turns by index of their message.

    Returns:
        The chosen ids, or None if the text encodes to them; and the number of answers that are known as text
        alone (of an endpoint) and whose text encodes to another number of ids than was generated. A row that
        cannot be encoded gives (None, 0): ingest will reject it.
    """
    rendered = encoder.render(conversation)
    if isinstance(rendered, Rejection):
        return None, 0
    sample = encoder.encode([rendered])[0]
    if isinstance(sample, Rejection):
        return None, 0
    row = _Row(encoder, conversation, generated, sample)
    chosen = row.spliced() or row.last_turn()
    if chosen is None or chosen.starts(sample):
        return None, row.num_other_ids
    return chosen, row.num_other_ids


class _Row:
    """One row: its text as a sample, and its generated turns."""

    def __init__(
        self,
        encoder: ChatEncoder,
        conversation: Conversation,
        generated: Mapping[int, GeneratedTurn],
        sample: Sample,
    ) -> None:
        self.end_of_turn, self.open_ends = encoder.end_of_turn_id, conversation.open_ends
        self.generated, self.sample, self.token_ids = generated, sample, sample.token_ids.tolist()
        roles = enumerate(message["role"] for message in conversation.messages)
        self.answers = [i for i, role in roles if role == "assistant" and i not in conversation.unsupervised]
        self.runs = supervised_runs(sample)
        self.num_other_ids = 0
        if len(self.runs) == len(self.answers):
            self.num_other_ids = sum(map(self._is_other_count, self.answers, self.runs))

    def spliced(self) -> Tokenised | None:
        """Return the sample with the generated turns' own ids; None if its turns cannot be matched."""
        if len(self.runs) != len(self.answers):
            return None
        out, position = Tokenised(), 0
        for number, (start, end) in zip(self.answers, self.runs):
            prompt, answer = self.token_ids[position:start], self.token_ids[start:end]
            chosen = self._own_ids(number)
            if chosen is not None:
                before = self.generated[number].prompt_ids
                if before[:position] != self.token_ids[:position]:
                    return None
                if before[position:] != prompt or not self._is_written(number, chosen, answer):
                    prompt, answer = before[position:], chosen
                    end = self._end_of_replaced(number, end)
            out.add(prompt, 0)
            out.add(answer, 1)
            position = end
        out.add(self.token_ids[position:], 0)
        return out

    def last_turn(self) -> Tokenised | None:
        """Return prompt and answer of the last turn; None if it was not generated, or its ids are unknown."""
        chosen = self._own_ids(self.answers[-1]) if self.answers else None
        if chosen is None:
            return None
        out = Tokenised()
        out.add(self.generated[self.answers[-1]].prompt_ids, 0)
        out.add(chosen, 1)
        return out

    def _own_ids(self, number: int) -> list[int] | None:
        """Return the ids of a turn's answer, with an end of turn where a cut one is to be closed."""
        if number not in self.generated:
            return None
        answer = self.generated[number].answer
        is_closed = answer.finish_reason == LENGTH and number not in self.open_ends
        if answer.token_ids is None or not is_closed or self.end_of_turn is None:
            return answer.token_ids
        return [*answer.token_ids, self.end_of_turn]

    def _is_written(self, number: int, chosen: list[int], answer: list[int]) -> bool:
        """Return True if the text encodes to the chosen ids; a cut turn is supervised up to its last word."""
        return (chosen[: len(answer)] if number in self.open_ends else chosen) == answer

    def _end_of_replaced(self, number: int, end: int) -> int:
        """Return the end of a turn that is replaced: a cut turn's last blanks lie behind its run."""
        if number in self.open_ends and self.end_of_turn in self.token_ids[end:]:
            return self.token_ids.index(self.end_of_turn, end)
        return end

    def _is_other_count(self, number: int, run: tuple[int, int]) -> bool:
        """Return True if a text encodes to another number of ids; endpoints may leave out the end token."""
        if number not in self.generated or self.generated[number].answer.token_ids is not None:
            return False
        answer, written = self.generated[number].answer, run[1] - run[0]
        is_text = answer.finish_reason == "stop" and answer.message.keys() <= {"role", "content"}
        return is_text and answer.num_tokens not in (0, written, written - 1)


def supervised_runs(sample: Sample) -> list[tuple[int, int]]:
    """Return start and end of each run of supervised tokens: 0 1 1 0 1 -> (1, 3), (4, 5)."""
    padded = np.concatenate(([0], sample.loss_mask, [0])).astype(np.int8)
    borders = np.flatnonzero(np.diff(padded)).tolist()
    return list(zip(borders[::2], borders[1::2]))
