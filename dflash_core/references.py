"""Settings that refer to a secret, `env:NAME`, so that the secret itself is recorded nowhere."""

from __future__ import annotations

import os

from dflash_core.errors import UserError
from dflash_core.redaction import add_secret

PREFIX = "env:"


def secret_value(setting: str, field: str) -> str:
    """Return the value of the environment variable that `env:NAME` refers to, or any other setting as it is.

    The value is stripped (a key read from a file often ends with a line break), and hidden in messages.

    Raises:
        UserError: the variable is not set, or its value has a line break or another control character.
    """
    if not setting.startswith(PREFIX):
        return setting
    name = setting.removeprefix(PREFIX)
    value = os.environ.get(name, "").strip()
    if not value:
        raise UserError(f"{field}: the environment variable {name!r} is not set; set it where the run starts")
    add_secret(value)
    if not value.isprintable():
        raise UserError(f"{field}: the value of the environment variable {name!r} has control characters")
    return value
