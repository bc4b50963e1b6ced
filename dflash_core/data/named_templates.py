"""Texts of chat templates: a Jinja file, or those of the tokenizer, which may have several by name.

Of the names, transformers knows `default` and `tool_use`: the second one renders conversations with tools.
Others (`rag`) are rendered only where they are asked for, which no data does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.errors import UserError

DEFAULT, TOOL_USE = "default", "tool_use"


def load_templates(tokenizer: Any, config: DataConfig) -> dict[str, str]:
    """Return the templates by name: the file `data.chat_template` as `default`, else the tokenizer's own.

    Raises:
        UserError: the file cannot be read, or the tokenizer has no default template.
    """
    if config.chat_template is not None:
        return {DEFAULT: read_template(config.chat_template)}
    own = tokenizer.chat_template
    if not own:
        raise UserError("data.chat_template: the tokenizer has no chat template; allowed: a Jinja file")
    if isinstance(own, str):
        return {DEFAULT: own}
    if DEFAULT not in own:
        names = ", ".join(sorted(own))
        raise UserError(
            f"data.chat_template: the tokenizer has no template named {DEFAULT!r}, only {names}; allowed: a "
            "Jinja file"
        )
    return {name: own[name] for name in (DEFAULT, TOOL_USE) if name in own}


def read_template(path: str) -> str:
    """Return the text of a Jinja file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {path!r} cannot be read: {error}") from error
