"""The default data set: documented functions of the running interpreter's standard library.

Real code with a realistic long tail of lengths, and nothing to download. Each documented function becomes one
conversation: "write this function", with its signature and docstring, answered by its source. The same
interpreter gives the same rows in the same order; `corpus_digest` identifies them.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Stands for this corpus wherever a data file can be named.
SOURCE = "stdlib"

_SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "turtledemo",
}
_SKIPPED_DIRECTORIES |= {"__pycache__", "lib2to3", "ensurepip", "config"}

PROMPT = """Write the Python {kind} `{name}` of the module `{module}`.

```python
{signature}
```

{docstring}"""


def library_root() -> Path:
    """Return the directory of the standard library's Python files."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path | None = None) -> list[Path]:
    """Return the library's modules in a fixed order, including sub-packages and excluding tests."""
    root = root or library_root()

    def is_skipped(path: Path) -> bool:
        parts = path.relative_to(root).parts
        skipped = any(part in _SKIPPED_DIRECTORIES or part.startswith("config-") for part in parts)
        return skipped or path.name.startswith("test_")

    paths = (path for path in root.rglob("*.py") if not is_skipped(path))
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def corpus_digest(root: Path | None = None) -> str:
    """Return a digest of every source file's name and bytes and of the wording of the prompt."""
    root = root or library_root()
    hasher = hashlib.blake2b(PROMPT.encode(), digest_size=16)
    for path in source_files(root):
        content = hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + content)
    return hasher.hexdigest()


def corpus_rows(root: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row `{"messages": [user, assistant]}` per documented function, in a fixed order."""
    root = root or library_root()
    for path in source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                # The library's code may warn, e.g. about invalid escapes.
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            # Deliberately invalid files, and files in other encodings.
            continue
        # Lines as ast counts them: form feeds and U+2028 do not end a line.
        lines = text.split("\n")
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for qualified_name, node, is_method in _functions(tree, ""):
            row = _row(module, qualified_name, node, lines, is_method=is_method)
            if row is not None:
                yield row


def _functions(
    node: ast.AST, prefix: str, *, in_class: bool = False
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Yield (qualified name, node, is a method) in source order, without functions nested in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child, in_class
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", in_class=True)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, prefix, in_class=in_class)


def _row(
    module: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], *, is_method: bool
) -> dict[str, Any] | None:
    docstring = ast.get_docstring(node)
    if not docstring or node.end_lineno is None:
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"
    kind = "method" if is_method else "function"
    prompt = PROMPT.format(kind=kind, name=name, module=module, signature=signature, docstring=docstring)
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": source}]}
