"""The default data set: documented functions of the running interpreter's standard library.

Real code with a real long tail of lengths, and nothing to download. Each documented function becomes one
conversation: "write this function", with its signature and docstring, answered by its source. The same
interpreter gives the same rows in the same order; `corpus_digest` names them.
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
    """Directory of the standard library's Python files."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path | None = None) -> list[Path]:
    """The library's modules, sub-packages included, tests excluded, in a fixed order."""
    root = root or library_root()
    return sorted(
        (
            path
            for path in root.rglob("*.py")
            if not any(
                part in _SKIPPED_DIRECTORIES or part.startswith("config-")
                for part in path.relative_to(root).parts
            )
            and not path.name.startswith("test_")
        ),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def corpus_digest(root: Path | None = None) -> str:
    """Digest of every source file's name and bytes and of the wording of the prompt."""
    root = root or library_root()
    hasher = hashlib.blake2b(PROMPT.encode(), digest_size=16)
    for path in source_files(root):
        content = hashlib.blake2b(path.read_bytes(), digest_size=16).digest()
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + content)
    return hasher.hexdigest()


def corpus_rows(root: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row `{"messages": [user, assistant]}` for each documented function, in a fixed order."""
    root = root or library_root()
    for path in source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes and the like are the library's business
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue  # files kept broken on purpose, and bytes in other encodings
        lines = text.split("\n")  # as ast counts them: form feeds and U+2028 end no line
        module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for qualified_name, node, is_method in _functions(tree, ""):
            row = _row(module, qualified_name, node, is_method, lines)
            if row is not None:
                yield row


def _functions(
    node: ast.AST, prefix: str, in_class: bool = False
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """Functions and methods in source order; those inside functions belong to their function's source."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child, in_class
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", in_class=True)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, prefix, in_class)


def _row(
    module: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool, lines: list[str]
) -> dict[str, Any] | None:
    docstring = ast.get_docstring(node)
    if not docstring or node.end_lineno is None:
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"
    prompt = PROMPT.format(
        kind="method" if is_method else "function",
        name=name,
        module=module,
        signature=signature,
        docstring=docstring,
    )
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": source},
        ]
    }
