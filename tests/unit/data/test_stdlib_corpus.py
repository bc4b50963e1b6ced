"""The standard-library corpus: documented functions in a fixed order, and the digest of their sources."""

from __future__ import annotations

from pathlib import Path

from dflash_core.data.stdlib_corpus import corpus_digest, corpus_rows, source_files

SHAPES = '''"""Module."""

class Square:
    """A square."""

    @property
    def area(self) -> float:
        """Area of the square.

        In square metres.
        """
        return self.side ** 2\x0c

    def undocumented(self):
        return 1

async def wait(seconds, *, loop=None):
    """Wait."""
    def inner():
        """Not a separate row."""
    await inner()
'''


def make_library(root: Path) -> Path:
    (root / "pkg" / "test").mkdir(parents=True)
    (root / "shapes.py").write_text(SHAPES)
    (root / "pkg" / "__init__.py").write_text('def f(x):\n    """Doc."""\n    return x\n')
    (root / "pkg" / "test" / "test_it.py").write_text('def t():\n    """Doc."""\n')
    (root / "bad.py").write_text("def (\n")
    return root


def test_rows_of_a_small_library(tmp_path: Path) -> None:
    root = make_library(tmp_path)
    rows = list(corpus_rows(root))
    prompts = [row["messages"][0]["content"] for row in rows]
    answers = [row["messages"][1]["content"] for row in rows]
    assert [prompt.splitlines()[0] for prompt in prompts] == [
        "Write the Python function `f` of the module `pkg`.",
        "Write the Python method `Square.area` of the module `shapes`.",
        "Write the Python function `wait` of the module `shapes`.",
    ]
    assert "def area(self) -> float:" in prompts[1]
    assert "Area of the square.\n\nIn square metres." in prompts[1]
    assert answers[1].startswith("@property\ndef area(self) -> float:\n")
    assert answers[1].endswith("return self.side ** 2")
    assert "async def wait(seconds, *, loop=None):" in prompts[2]
    assert answers[2].endswith("    await inner()")


def test_digest_follows_names_and_bytes(tmp_path: Path) -> None:
    root = make_library(tmp_path)
    before = corpus_digest(root)
    assert corpus_digest(root) == before
    (root / "pkg" / "test" / "test_it.py").write_text("changed")
    assert corpus_digest(root) == before
    (root / "bad.py").rename(root / "worse.py")
    assert corpus_digest(root) != before


def test_the_real_library_has_sub_packages_and_no_tests() -> None:
    names = {path.as_posix() for path in source_files()}
    assert any(name.endswith("/asyncio/events.py") for name in names)
    assert any(name.endswith("/textwrap.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name for name in names)
