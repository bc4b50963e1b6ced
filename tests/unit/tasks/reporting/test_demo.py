"""The demo's terminal and page, on two small answers."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from dflash_core.decoding.stream import Step, StreamedAnswer
from tasks.reporting import demo_page, demo_terminal
from tasks.reporting.demo_terminal import Comparison


def step(seconds: float, *pieces: tuple[str, bool], drafted: int = 0) -> Step:
    accepted = sum(is_draft for _, is_draft in pieces)
    num_tokens = len(pieces)
    return Step(seconds=seconds, pieces=pieces, num_tokens=num_tokens, accepted=accepted, drafted=drafted)


@pytest.fixture
def comparison() -> Comparison:
    """Return five tokens in 1 s, and in 0.5 s with two of six drafts accepted."""
    words = ["a", " <b>", " c", " d", "!"]
    plain = StreamedAnswer([step(0.2, (word, False)) for word in words], [1, 2, 3, 4, 5])
    steps = [step(0.1, ("a", False))]
    steps += [step(0.2, (" <b>", True), (" c", True), (" d", False), drafted=3)]
    steps += [step(0.2, ("!", False), drafted=3)]
    speculative = StreamedAnswer(steps, [1, 2, 3, 4, 5])
    return Comparison(prompt="say\x1b[2J <it>", plain=plain, speculative=speculative, block_size=4)


def shown(comparison: Comparison, *, is_terminal: bool, **settings: object) -> str:
    file = io.StringIO()
    settings |= {"width": 100, "height": 30, "highlight": False}
    console = Console(file=file, force_terminal=is_terminal, **settings)  # type: ignore[arg-type]
    demo_terminal.show(comparison, console)
    return file.getvalue()


def test_figures_of_both_sides(comparison: Comparison) -> None:
    assert demo_terminal.verdict(comparison) == [
        "plain 5.0 tokens/s, speculative 10.0 tokens/s: 2.00 times",
        "acceptance length 2.00 of at most 4; 2 of 6 drafts accepted",
        "output: the same tokens",
    ]


def test_without_a_terminal_the_sides_follow_each_other(comparison: Comparison) -> None:
    text = shown(comparison, is_terminal=False)
    assert "\x1b" not in text
    assert text.index("plain: 5 tokens, 1.0 s: 5.0 tokens/s") < text.index("speculative: 5 tokens, 0.5 s")
    assert "a <b> c d!" in text
    assert "a[ <b> c] d!" in text


def test_in_a_terminal_drafts_are_coloured_and_control_characters_escaped(comparison: Comparison) -> None:
    text = shown(comparison, is_terminal=True, color_system="standard")
    assert "\x1b[1;32m <b>" in text
    assert r"say\x1b[2J" in text
    plain = shown(comparison, is_terminal=True, color_system="standard", no_color=True)
    assert "\x1b[1m <b>" in plain
    assert "\x1b[1;32m" not in plain


def test_the_part_of_a_replay(comparison: Comparison) -> None:
    part = comparison.speculative.after(0.35)
    assert part.text == "a <b> c d"
    assert demo_terminal.figures(part, 0.35) == "4 tokens, 0.3 s: 11.4 tokens/s; 3.00 tokens per step"


def test_the_page_holds_everything_and_asks_for_nothing(comparison: Comparison, tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    demo_page.write_page(page, [comparison], title="run <1>", about="a target")
    text = page.read_text(encoding="utf-8")
    assert "run &lt;1&gt;" in text
    assert "<b> &lt;b&gt;</b><b> c</b> d</span>" in text
    assert "2.00 times" in text
    assert "\x1b" not in text
    assert not [word for word in ("http:", "https:", "src=", "url(", "@import", "<link") if word in text]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
def test_the_page_replays_in_a_browser(comparison: Comparison, tmp_path: Path) -> None:
    from benchmarks.screenshots import Browser

    page = tmp_path / "demo.html"
    demo_page.write_page(page, [comparison], title="demo", about="a target")
    with ExitStack() as stack:
        browser = Browser(stack)
        browser.open(page.as_uri(), wanted=["2.00 times"])
        assert browser.evaluate("document.querySelector('button').hidden") is False
        browser.evaluate("document.querySelector('button').click()")
        hidden = "document.querySelectorAll('.unknown').length"
        assert browser.evaluate("document.querySelector('button').disabled") is True
        browser.wait_for(["demo"])
        for _ in range(600):
            if browser.evaluate("document.querySelector('button').disabled") is False:
                break
        assert browser.evaluate(hidden) == 0
        rates = browser.evaluate(
            "JSON.stringify([...document.querySelectorAll('.rate')].map(r => r.textContent))"
        )
        assert json.loads(rates) == ["5.0 tokens/s", "10.0 tokens/s"]
