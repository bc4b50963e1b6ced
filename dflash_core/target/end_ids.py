"""The tokens that end an answer of the target: one rule for decoding, evaluation, regeneration and serving.

An answer ends at the first of

- the end tokens of the generation config, else of the config, which every serving engine reads;
- the tokenizer's EOS;
- the token that the chat template writes after an answer. Some models' configs do not name it: a decoder that
  reads them alone runs on after the answer and writes the user's next turn too.

Without a chat template (pre-tokenised data) the third is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatEncoder


def end_ids(configured: Iterable[int], tokenizer: Any, data: DataConfig) -> tuple[int, ...]:
    """Return the ids that end an answer, ascending.

    Args:
        configured: those of the model's configs (`Target.eos_ids`, or `configured_end_ids`).
        tokenizer: the target's own.
        data: names the chat template, where it is not the tokenizer's.

    Raises:
        UserError: the chat template cannot be read or does not compile.
    """
    named: set[int | None] = {*configured, tokenizer.eos_token_id}
    if data.chat_template is not None or tokenizer.chat_template:
        named.add(ChatEncoder(tokenizer, data, None).end_of_turn_id)
    return tuple(sorted(token for token in named if token is not None))


def ends_unknown_to_engines(
    directory: Path | str, tokenizer: Any, data: DataConfig
) -> tuple[tuple[int, ...], str]:
    """Return the end ids that a serving engine does not read from the target's files, and a line about them.

    Engines read those of the generation config and the tokenizer's EOS. Where these are all, both are empty.
    """
    configured = configured_end_ids(directory)
    known = {*configured, tokenizer.eos_token_id}
    added = tuple(token for token in end_ids(configured, tokenizer, data) if token not in known)
    return added, added_ends_remark(configured, added, tokenizer) if added else ""


def configured_end_ids(directory: Path | str) -> tuple[int, ...]:
    """Return the end ids of a target's generation config, else of its config, without loading the model."""
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for config in (values, values.get("text_config") or {}):
            if ids := as_ids(config.get("eos_token_id")):
                return ids
    return ()


def as_ids(eos_token_id: Any) -> tuple[int, ...]:
    """Return the ids of a config's `eos_token_id`: an id, a list of them or None."""
    if eos_token_id is None:
        return ()
    return tuple(eos_token_id) if isinstance(eos_token_id, list | tuple) else (int(eos_token_id),)


def added_ends_remark(configured: Sequence[int], added: Sequence[int], tokenizer: Any) -> str:
    """Return a line that names the end tokens of the configs, and those that only the tokenizer knows."""
    names = [
        ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in ids) or "none"
        for ids in (added, configured)
    ]
    return (
        f"target: answers also end at {names[0]}, by its tokenizer or chat template; its generation config "
        f"names {names[1]}"
    )


def model_end_ids(model: Any) -> tuple[int, ...]:
    """Return all end ids of the generation config, else of the config."""
    for config in (getattr(model, "generation_config", None), model.config):
        if ids := as_ids(getattr(config, "eos_token_id", None)):
            return ids
    return ()
