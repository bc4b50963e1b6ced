"""Chat templates of strangers: no escape from the sandbox, and no endless time, memory or output."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.config import DataConfig
from dflash_core.data import limited_template, render_limits
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection
from dflash_core.errors import UserError
from tests.support.chat_families import small_tokenizer

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(s='a' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
)


def encoder_of(text: str) -> ChatEncoder:
    tokenizer = copy.copy(small_tokenizer())
    tokenizer.chat_template = text
    return ChatEncoder(tokenizer, DataConfig(), None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ 'a' * 10 ** 10 }}", "makes 10000000000 repeated items"),
        ("{{ 10 ** 10 * 'a' }}", "makes 10000000000 repeated items"),
        ("{% set x = [1] * 10 ** 10 %}", "makes 10000000000 repeated items"),
        ("{{ 10 ** (10 ** 10) }}", "makes 40000000000 bits of a number"),
        ("{{ '%010000000000d' % 1 }}", "formats '%010000000000d', wider than"),
        ("{{ '%*d'|format(10 ** 10, 1) }}", "formats '%[*]d', wider than"),
        ("{{ '{:>10000000000}'.format('a') }}", "formats '{:>10000000000}', wider than"),
        ("{{ 'a\\nb'|indent(10 ** 10) }}", "makes 10000000000 columns"),
        ("{{ [1]|tojson(indent=10 ** 10) }}", "makes 10000000000 columns"),
        ("{{ 'a'|center(10 ** 10) }}", "does not compile: No filter named 'center'"),
        ("{% for %}", "does not compile: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile: "),
        (" " * (2 << 20), "has 2097152 characters"),
    ],
)
def test_a_huge_value_is_one_message(text: str, problem: str) -> None:
    with pytest.raises(
        UserError, match=rf"^data\.chat_template: the tokenizer's template 'default' {problem}"
    ):
        encoder_of(text)


def test_a_huge_output_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_template, "MAX_CHARACTERS", 10_000)
    loop = "{% for i in range(1000) %}{{ 'a' * 100 }}{% endfor %}"
    for text in (
        loop,
        f"{{% set x %}}{loop}{{% endset %}}",
        f"{{% generation %}}{loop}{{% endgeneration %}}",
    ):
        with pytest.raises(UserError, match="makes 100000 characters of output, more than 10000"):
            encoder_of(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LOOPS, "renders one conversation for more than 0.3 s"),
        (DOUBLED, "takes more than 0.3 GB of memory"),
    ],
)
def test_endless_loops_and_growing_texts_are_one_message(
    text: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_limits(monkeypatch, seconds=0.3 if text == LOOPS else 60)
    with pytest.raises(UserError, match=f"^data.chat_template: the tokenizer's template 'default' {problem}"):
        encoder_of(text)


def fresh_limits(monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    monkeypatch.setattr(render_limits, "MAX_SECONDS", seconds)
    monkeypatch.setattr(render_limits, "MAX_BYTES", 300_000_000)
    # The other process is not to act first on a busy machine.
    monkeypatch.setattr(render_limits, "HARD_FACTOR", 1000)
    monkeypatch.setattr(render_limits, "_watch", None)


@pytest.mark.parametrize(
    "attack",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "''['__class__']",
        "''|attr('__class__')",
        "namespace.__init__.__globals__",
        "cycler.__init__.__globals__.os.popen('touch MADE').read()",
        "strftime_now.__self__",
        "messages.append(1)",
        "'a'.ljust(10 ** 10)",
        "(0).to_bytes(10 ** 10, 'big')",
        "range(10 ** 12)",
        "m()",
        "'{0.__class__}'.format(1)",
    ],
)
def test_attacks_on_attributes_reject_the_row_or_print_nothing(attack: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    encoder = encoder_of(
        "{% macro m() %}{{ m() }}{% endmacro %}{{ " + attack.replace("MADE", str(made)) + " }}x"
    )
    rendered = encoder.render(Conversation(MESSAGES))
    if not isinstance(rendered, Rejection):
        assert rendered.text == "x"
    assert not made.exists()


def test_one_operation_without_end_kills_the_process_with_a_message() -> None:
    code = (
        "from dflash_core.data import render_limits as r\n"
        "r.MAX_SECONDS = 0.2\n"
        "with r.RenderLimits('t.jinja'):\n"
        "    a = []\n"
        "    for _ in range(80): a = [a, a]\n"
        "    str(a)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert "renders one conversation for more than 0.4 s and does not stop; process" in done.stderr


def test_the_watch_ends_when_nothing_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_limits(monkeypatch, seconds=60)
    monkeypatch.setattr(render_limits, "_IDLE_SECONDS", 0.0)
    limits = render_limits.RenderLimits("t.jinja")
    with limits:
        pass
    watch = render_limits._watch
    assert watch is not None
    thread = watch.thread
    if thread is not None:
        thread.join(60)
    assert watch.thread is None
    # It starts again.
    with limits:
        assert watch.thread is not None


def test_a_forked_process_has_its_own_watch() -> None:
    limits = render_limits.RenderLimits("t.jinja")
    with limits:
        pass
    child = os.fork()
    if child == 0:
        with limits:
            is_own = render_limits._watch is limits._watch and len(limits._watch.names) == 1
        os._exit(0 if is_own else 1)
    assert os.waitpid(child, 0)[1] == 0
