"""Digests of code that change only where its meaning can: for stages' versions, and for runs that resume.

Paths, imports, docstrings, comments and line breaks do not count. The digests are the same on every Python.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
FSTRING_START, FSTRING_END = (getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END"))


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it; `from a import b` counts as `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_file(name: str) -> Path | None:
    """Return the file of a module or package of this project, or None."""
    path = ROOT / Path(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def closure(sources: tuple[str, ...]) -> set[Path]:
    """Return the files behind modules of dflash_core and all they import from there.

    Settings are left out: their values are in the key.
    """
    waiting, reached = list(sources), set()
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if path is None or path in reached or name.startswith("dflash_core.config"):
            continue
        reached.add(path)
        waiting += [m for m in imported_modules(path) if m.startswith("dflash_core")]
    return reached


def code_digest(sources: tuple[str, ...]) -> str:
    """Return the digest of the code behind some modules.

    It covers the top-level statements of all files as a set, so moving code between modules does not change
    it.
    """
    return _digest(sorted(text for path in closure(sources) for text in statements_of(path)))


def module_digests(sources: tuple[str, ...]) -> dict[str, str]:
    """Return the digest of each file behind some modules, by its path in this project."""
    return {
        path.relative_to(ROOT).as_posix(): _digest(sorted(statements_of(path)))
        for path in sorted(closure(sources))
    }


def _digest(statements: list[str]) -> str:
    return hashlib.blake2b("\n".join(statements).encode(), digest_size=8).hexdigest()


def statements_of(path: Path) -> Iterator[str]:
    """Yield the code of each top-level statement of a file, one line per token."""
    text = path.read_text(encoding="utf-8")
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and is_docstring(body[0]):
            blank(lines, body[0])
        if isinstance(node, ast.Import | ast.ImportFrom):
            blank(lines, node)
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) and not is_docstring(node):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            yield "\n".join(tokens_of("".join(lines[first - 1 : node.end_lineno])))


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a bare string."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def blank(lines: list[str], node: ast.stmt) -> None:
    """Replace a statement by `pass`, so that the rest still parses."""
    for number in range(node.lineno - 1, node.end_lineno or 0):
        lines[number] = "\n"
    lines[node.lineno - 1] = " " * node.col_offset + "pass\n"


def tokens_of(code: str) -> Iterator[str]:
    """Yield the tokens that count; an f-string is one token, as before Python 3.12."""
    lines, opened = code.splitlines(keepends=True), []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == FSTRING_START:
            opened.append(token.start)
        elif token.type == FSTRING_END:
            start = opened.pop()
            if not opened:
                yield source_between(lines, start, token.end)
        elif not opened and token.type in (tokenize.INDENT, tokenize.DEDENT):
            yield tokenize.tok_name[token.type]
        elif not opened and token.type not in LAYOUT and token.string != "pass":
            yield token.string


def source_between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the source text between two token positions."""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return "".join([lines[start[0] - 1][start[1] :], *middle, lines[end[0] - 1][: end[1]]])
