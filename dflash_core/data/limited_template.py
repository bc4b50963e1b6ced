"""A compiled chat template whose renderings are limited in time, memory and output.

It is compiled in the sandbox of transformers, so it renders as `apply_chat_template` does. What a template
can use to make a huge value in one step is limited in addition: repetition, powers, widths and the joined
output. All else is limited by `render_limits.py`. A limit that is exceeded ends the run: every row would.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers.utils import chat_template_utils

from dflash_core.data.render_limits import RenderingLimitError, RenderLimits
from dflash_core.errors import UserError, one_line

# Of one text that a template makes: the whole conversation, or a part of it.
MAX_CHARACTERS = 256 << 20
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_BITS, MAX_WIDTH = 4096, 1000
# Methods whose argument is the size of what they return.
SIZED_METHODS = frozenset(["ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes"])
# Filters of the same kind, which no chat template needs.
REMOVED_FILTERS = ("center", "wordwrap", "batch", "slice", "urlize", "xmlattr")
# A format with a width or precision of four digits or more, or one that is given by an argument.
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(\*|\d{4})|:[^{}]*\d{4}")


class LimitedTemplate:
    """A chat template, compiled.

    Args:
        text: the Jinja template.
        name: for messages.

    Raises:
        UserError: it does not compile, or exceeds a limit.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name, self._limits = name, RenderLimits(name)
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            allowed = f"at most {MAX_TEMPLATE_CHARACTERS}"
            raise UserError(f"data.chat_template: {name} has {len(text)} characters; allowed: {allowed}")
        self.environment = self._environment()
        try:
            with self._limits:
                self._template = self.environment.from_string(text)
        except UserError:
            raise
        except Exception as error:
            # Jinja's own kinds, or those of Python's compiler.
            raise UserError(f"data.chat_template: {name} does not compile: {one_line(error)}") from error

    def render(self, **variables: Any) -> str:
        """Return the text.

        Raises:
            RenderingLimitError: a limit is exceeded.
            Exception: any error that the template raises.
        """
        with self._limits:
            text: str = self._template.render(**variables)
        return text

    def generate(self, **variables: Any) -> Iterator[str]:
        """Yield the parts of the text; errors as in `render`."""
        num_characters = 0
        with self._limits:
            for part in self._template.generate(**variables):
                num_characters += len(part)
                self._check(num_characters, MAX_CHARACTERS, "characters of output")
                yield part

    def _environment(self) -> Any:
        # Not the template itself: compiling it there would already compute its constants, without limits.
        environment: Any = chat_template_utils._compile_jinja_template("").environment.overlay()
        limited = {"*": self._times, "**": self._power, "%": self._modulo}
        environment.intercepted_binops = frozenset(limited)
        environment.binop_table = {**environment.binop_table, **limited}
        environment.concat = self._concat
        filters = {k: v for k, v in environment.filters.items() if k not in REMOVED_FILTERS}
        environment.filters = filters | {
            name: self._with_width(filters[name]) for name in ("indent", "tojson")
        }
        is_safe, wrap_format = environment.is_safe_attribute, environment.wrap_str_format
        environment.is_safe_attribute = lambda obj, attr, value: (
            attr not in SIZED_METHODS and is_safe(obj, attr, value)
        )
        environment.wrap_str_format = lambda value: self._checked_format(value, wrap_format(value))
        environment.filters["format"] = lambda text, *args, **kwargs: self._modulo(str(text), kwargs or args)
        return environment

    def _check(self, size: int, limit: int, unit: str) -> None:
        if size > limit:
            raise RenderingLimitError(f"{self.name} makes {size} {unit}, more than {limit}")

    def _concat(self, parts: Iterable[str]) -> str:
        texts = list(parts)
        self._check(sum(map(len, texts)), MAX_CHARACTERS, "characters of output")
        return "".join(texts)

    def _times(self, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(other, int):
                if isinstance(one, int):
                    self._check(one.bit_length() + other.bit_length(), MAX_BITS, "bits of a number")
                elif hasattr(one, "__len__"):
                    self._check(len(one) * other, MAX_CHARACTERS, "repeated items")
        return operator.mul(left, right)

    def _power(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            self._check(left.bit_length() * right, MAX_BITS, "bits of a number")
        return operator.pow(left, right)

    def _modulo(self, left: Any, right: Any) -> Any:
        if isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise RenderingLimitError(f"{self.name} formats {left!r:.60}, wider than {MAX_WIDTH}")
        return operator.mod(left, right)

    def _checked_format(self, method: Any, wrapper: Any) -> Any:
        if wrapper is not None and _WIDE_FORMAT.search(method.__self__):
            raise RenderingLimitError(f"{self.name} formats {method.__self__!r:.60}, wider than {MAX_WIDTH}")
        return wrapper

    def _with_width(self, filter_function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter whose arguments, apart from the value, are no numbers above MAX_WIDTH."""

        def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
            for given in (*args, *kwargs.values()):
                if isinstance(given, int | str):
                    self._check(len(given) if isinstance(given, str) else given, MAX_WIDTH, "columns")
            return filter_function(value, *args, **kwargs)

        return limited
