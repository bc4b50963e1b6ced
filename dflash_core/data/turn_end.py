"""Ends of turns: the token that the template writes behind an answer, and where a turn ends by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.data.control_strings import any_of
from dflash_core.data.text_prefixes import num_equal, skip_blanks

Span = tuple[int, int]


@dataclass(frozen=True)
class TurnEnds:
    """The control tokens that may close a turn.

    Args:
        closers: texts of control tokens, the end-of-turn token included.
        end_of_turn: the token that the template writes behind an answer, if any.
        next_header_ends: the template writes none, and the header of the next turn ends an answer.
    """

    closers: tuple[str, ...] = ()
    end_of_turn: str | None = None
    next_header_ends: bool = False

    @classmethod
    def of_template(
        cls,
        whole: str,
        longer: str,
        answer: str,
        controls: Sequence[str],
        added: Sequence[str],
        eos: str | None,
    ) -> TurnEnds:
        """Find the end-of-turn token.

        Args:
            whole: a rendered conversation that ends with `answer`.
            longer: one in which a question follows `answer`.
            answer: a text that occurs nowhere else.
            controls: texts of the control tokens.
            added: texts of other added tokens, which end a turn where no control token does.
            eos: text of the tokenizer's EOS.
        """
        start, behind = whole.rfind(answer), longer.find(answer) + len(answer)
        end = _first_behind(whole, start, controls) or _first_behind(whole, start, added)
        following = [c for c in controls if longer.startswith(c, skip_blanks(longer, behind))]
        if end is not None:
            shared = _shared(whole[whole.index(end, start) :], longer[longer.find(end, behind) :], controls)
            end = eos if eos in shared else [end, *shared][-1]
        # GLM: `answer<|user|>`. Any header ends a turn, e.g. that of a tool's result too.
        next_header_ends = end is None and bool(following)
        if next_header_ends:
            end = max(following, key=len)
        closers = dict.fromkeys([*controls, *([end] if end else [])])
        return cls(tuple(closers), end, next_header_ends)

    def of_turn(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn that is rendered as text[start:end].

        The turn ends after the first end-of-turn token among the control tokens at its end, white space
        skipped. If none of these is the end-of-turn token, it ends after one that follows text[start:end], or
        else after the last control token.

        `Hi<|im_end|>\\n<|endoftext|>` -> after `<|im_end|>`; `<|call|>f<|/call|><|im_end|>` -> the same;
        `<|call|>f<|/call|><|eom|>` -> after `<|eom|>`.
        """
        closing = self._closing(text, start, end)
        ends = [close_end for close_end, control in closing if control == self.end_of_turn]
        if ends:
            return ends[-1]
        following = skip_blanks(text, end)
        if self.end_of_turn and text.startswith(self.end_of_turn, following):
            return following + len(self.end_of_turn)
        if self.next_header_ends and text.startswith(self.closers, end):
            return end + max(len(c) for c in self.closers if text.startswith(c, end))
        return closing[0][0] if closing else end

    def _closing(self, text: str, start: int, end: int) -> list[tuple[int, str]]:
        """Return end and text of each control token that closes text[start:end], the last one first."""
        closing: list[tuple[int, str]] = []
        position = end
        while True:
            while position > start and text[position - 1].isspace():
                position -= 1
            if not self.closers or not text.endswith(self.closers, start, position):
                return closing
            control = max((c for c in self.closers if text.endswith(c, start, position)), key=len)
            closing.append((position, control))
            position -= len(control)

    def open_end(self, text: str, turn: Span) -> Span:
        """Return a turn without its closing: final control tokens, and white space before and after them.

        `Hi<|im_end|>` -> `Hi`. White space at the end of the content itself is removed too: at
        worst one token.
        """
        start, end = turn
        while end > start:
            if text[end - 1].isspace():
                end -= 1
            elif closing := [c for c in self.closers if text.endswith(c, start, end)]:
                end -= max(map(len, closing))
            else:
                break
        return start, end


def _first_behind(text: str, start: int, tokens: Sequence[str]) -> str | None:
    """Return the first of the tokens that `text` holds behind `start`, the longest of equal places."""
    found = [(text.find(t, start), -len(t), t) for t in tokens if text.find(t, start) >= 0]
    return min(found)[2] if found and start >= 0 else None


def _shared(last: str, earlier: str, controls: Sequence[str]) -> list[str]:
    """Return the control tokens of the text with which both texts start, up to any white space.

    Command A ends turns with `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`. Phi-4-mini ends only the last turn with
    `<|end|><|endoftext|>`, so tokens have to follow an earlier answer too.
    """
    shared = last[: num_equal(last, earlier)]
    return any_of(controls).findall(next(iter(shared.split()), ""))
