"""Checks of a model's files before anything reads them for real: a directory may come from a stranger.

Nothing is executed or allocated here. Sizes in `config.json` are compared with what the weights hold, so a
configuration of a billion layers is rejected before a model of that size is built, and every file has to lie
inside the directory (or be a link into the Hugging Face cache that the directory belongs to).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_core.errors import UserError

# Larger files are no configuration; the largest tokenizers have about 40 MB.
MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES = 64 << 20, 1 << 30
# Quantised weights hold up to this many numbers per stored one.
MAX_PACKING = 16
# Keys of config.json that are sizes of tensors, and those that are numbers of layers.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)
LAYERS = ("num_hidden_layers",)
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.index.json",
)
# Settings of tokenizers that name a file to read.
FILE_SETTINGS = ("vocab_file", "merges_file", "tokenizer_file", "spm_file", "source_spm", "target_spm")
_Shapes = dict[str, tuple[int, ...]]


def read_json(path: Path, *, field: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: of the file.
        field: the setting that named it, for the message.
        max_bytes: larger files are rejected unread.

    Raises:
        UserError: it cannot be read, is too large, or holds something else.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise UserError(f"{field}: {path} has {size} bytes; allowed: at most {max_bytes}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{field}: {path} cannot be read: {reason}; allowed: a JSON object") from error
    if not isinstance(value, dict):
        raise UserError(f"{field}: {path} holds {value!r:.60}; allowed: a JSON object")
    return value


def tensor_shapes(path: Path, *, field: str | None = None) -> _Shapes:
    """Return the shape of each tensor of a safetensors file, by its header alone.

    The library checks its length, and that shapes, dtypes and offsets fit each other and the file.

    Raises:
        UserError: the header is damaged or lies.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        where = f"{field}: {path} cannot be read:" if field else f"{path}: cannot be read:"
        raise UserError(f"{where} {error}; allowed: safetensors weights") from error


def check_links(directory: Path, patterns: Iterable[str], *, field: str) -> None:
    """Check that every file of these patterns belongs to the directory.

    Links inside it, those of a snapshot of the Hugging Face cache to the cache's own files, and links to
    weights, whose header is checked, are allowed.

    Raises:
        UserError: a link leads elsewhere: what it names would be copied, or read as part of the model.
    """
    root = directory.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
        real = path.resolve()
        if not any(real.is_relative_to(home) for home in homes) and path.suffix != ".safetensors":
            raise UserError(
                f"{field}: {path} leads to {real}, outside of the directory; allowed: files of the directory "
                "itself. Copy the file there if it belongs to the model"
            )


def check_model_files(directory: Path, *, field: str) -> None:
    """Check the configurations, the index and the headers of the weights of a model directory.

    Raises:
        UserError: a file is damaged, names files outside the directory, or contradicts the others.
    """
    for name in ("tokenizer.json", "vocab.json"):
        path = directory / name
        if path.is_file() and (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise UserError(f"{field}: {path} has {size} bytes; allowed: at most {MAX_TOKENIZER_BYTES}")
    contents = {
        path.name: read_json(path, field=field)
        for pattern in CONFIG_FILES
        for path in sorted(directory.glob(pattern))
    }
    for name, values in contents.items():
        _check_named_files(directory, name, values, field)
    shapes: _Shapes = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes |= tensor_shapes(path, field=field)
    if shapes and "config.json" in contents:
        check_sizes(contents["config.json"], shapes, directory / "config.json", field=field)
    ids = contents.get("generation_config.json", {}).get("eos_token_id")
    if ids is not None and not all(
        type(i) is int and i >= 0 for i in (ids if isinstance(ids, list) else [ids])
    ):
        raise UserError(
            f"{field}: {directory / 'generation_config.json'}: eos_token_id is {ids!r:.60}; allowed: a token "
            "id, or a list of them"
        )


def check_sizes(config: dict[str, Any], shapes: _Shapes, path: Path, *, field: str) -> None:
    """Check the sizes of a config.json against the tensors that are stored.

    Raises:
        UserError: a size is no whole number, or larger than the weights allow.
    """
    elements = MAX_PACKING * sum(_product(shape) for shape in shapes.values())
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, dict) else {}):
        limits = dict.fromkeys(SIZES, elements) | dict.fromkeys(LAYERS, len(shapes))
        for key, limit in limits.items():
            value = values.get(key)
            if value is None or (type(value) is int and 0 <= value <= limit):
                continue
            if isinstance(value, list) and all(type(v) is int and 0 <= v <= limit for v in value):
                # Some models give one size per layer.
                continue
            raise UserError(
                f"{field}: {path}: {key} is {value!r:.60}; allowed by its weights, {len(shapes)} tensors: a "
                f"whole number up to {limit}"
            )
        vocabulary, width = values.get("vocab_size"), values.get("hidden_size")
        if isinstance(vocabulary, int) and isinstance(width, int) and vocabulary * width > elements:
            raise UserError(
                f"{field}: {path}: vocab_size {vocabulary} times hidden_size {width} is more than its "
                f"weights hold; allowed: {elements}"
            )


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _check_named_files(directory: Path, name: str, values: dict[str, Any], field: str) -> None:
    """Check that the JSON file `name` names no existing file outside the directory.

    Names of files that do not exist are left alone: many tokenizers keep a path of their author's machine.
    """
    weights = values.get("weight_map")
    named = list(weights.values()) if isinstance(weights, dict) else []
    named += [values[key] for key in FILE_SETTINGS if key in values]
    for file in {file for file in named if isinstance(file, str) and Path(file).name != file}:
        if (directory / file).exists():
            raise UserError(f"{field}: {directory / name} names {file!r}; allowed: names of files next to it")
