"""How a target computes: as fast as possible while every sample gets what it gets alone. Needs no torch.

Fastest first:

* our attention, packed, decoding over `DecodeCache`: targets whose layers mix tokens by attention alone;
* our attention, padded, decoding by whole forwards: targets with other mixing layers too (linear attention,
  Mamba, convolutions), which neither restart inside a pack nor keep their state in a cache of keys;
* the model's own eager attention, padded, decoding by whole forwards: targets whose attention has terms that
  ours does not compute (sinks, soft caps, masks of their own).

`check_target` finds the fastest one that is right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Outcome of a check, in the directory that holds the model's.
CHECK_FILE = "check.json"


@dataclass(frozen=True, kw_only=True)
class TargetMode:
    """One way in which a target computes."""

    # the model's own attention instead of ours
    eager: bool = False
    # samples may lie one after another in a row
    can_pack: bool = True
    # a cache of keys and values is all that decoding has to keep
    can_cache: bool = True

    def describe(self) -> str:
        """Return the mode in words."""
        attention = "the model's own attention" if self.eager else "exchanged attention"
        rows = "packed" if self.can_pack else "padded"
        decoding = "a cache of keys" if self.can_cache else "whole forwards (slow)"
        return f"{attention}, {rows}; decoding over {decoding}"


FAST = TargetMode()
PADDED = TargetMode(can_pack=False, can_cache=False)
EAGER = TargetMode(eager=True, can_pack=False, can_cache=False)


def expected_mode(config: Any) -> TargetMode:
    """Return the mode that the kinds of layers suggest, for a target that nothing has checked."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    return FAST if kinds <= {"full_attention", "sliding_attention"} else PADDED


def checked_mode(directory: str | Path) -> TargetMode | None:
    """Return the mode that a check found for the model in a directory, or None where none has run."""
    try:
        outcome = json.loads((Path(directory).parent / CHECK_FILE).read_text(encoding="utf-8"))
        return TargetMode(**outcome["mode"])
    except OSError:
        return None
