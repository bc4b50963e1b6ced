"""A drafter as a directory that z-lab's code, SGLang and vLLM load: config.json and model.safetensors.

Policy: `config.json` holds everything that drafting depends on, twice where readers look in two places
(`block_size`, `rope_theta`). A reader that has to guess the captured layers, the mask token or the block size
drafts badly without any error, so loading rejects a directory that leaves one out.

Guarantee: a directory appears complete or not at all, and outputs are bit-equal after a reload.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.shape import FULL, SLIDING, DrafterShape, positive_number, read_rope
from dflash_core.errors import UserError
from dflash_core.files import publish_directory
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.model_files import tensor_shapes

# Caches are larger by a block than the answers; published drafters have 8 and 16.
MAX_BLOCK_SIZE = 1024
# Key of config.json -> field of DrafterShape.
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "num_target_layers": "num_target_layers",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}


def drafter_config(shape: DrafterShape, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of `config.json`."""
    kinds = shape.layer_types()
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "block_size": shape.block_size,
        },
        **{key: getattr(shape, name) for key, name in SIZES.items()},
        "layer_types": kinds,
        "is_causal": False,
        "use_sliding_window": SLIDING in kinds,
        "sliding_window": shape.sliding_window,
        "max_window_layers": 0 if SLIDING in kinds else shape.num_layers,
        "rope_theta": shape.rope_theta,
        "rope_parameters": shape.rope_parameters(),
        # Halves of a head are rotated against each other, whatever the target does. SGLang reads both names.
        "is_neox_style": True,
        "rope_is_neox_style": True,
        "hidden_act": "silu",
        "attention_bias": shape.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
    }


def save_drafter(drafter: DFlashDrafter, directory: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` into `directory`, complete or not at all; replaces it.

    Args:
        drafter: with whole weights; gather sharded ones with `full_weights` first.
        directory: under its final name only when complete.
        dtype: of the stored weights; None: as they are (float32 masters), so that a reload is bit-equal.
    """
    weights = {
        name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    stored = dtype or next(iter(weights.values())).dtype
    with publish_directory(Path(directory)) as staging:
        save_file(weights, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(drafter_config(drafter.shape, stored), indent=2) + "\n")
        # Readable like any other file: safetensors makes its own private.
        staging.chmod(0o755)
        for path in staging.iterdir():
            path.chmod(0o644)


def load_drafter(directory: str | Path, *, device: str | torch.device = "cpu") -> DFlashDrafter:
    """Read a drafter written by `save_drafter`, or by another trainer in the same format.

    Weights come back in the dtype they are stored in; outputs are bit-equal to those before the export.

    Raises:
        UserError: no such directory, a key that drafting depends on is missing, values that contradict each
            other, or tensors that do not fit them. The message names the file and the key.
    """
    source = Path(directory)
    path = source / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); allowed: an exported drafter") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); allowed: an exported drafter") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds {config!r:.60}; allowed: an exported drafter")
    shape, weights_path = _shape(config, path), source / WEIGHTS_FILE
    # Before a drafter of this size is built.
    _check_sizes(shape, weights_path)
    drafter = DFlashDrafter(shape).to(device)
    try:
        weights = load_file(weights_path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights_path}: cannot be read ({error}); allowed: safetensors weights") from error
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wrong := sorted(name for name in expected | stored if expected.get(name) != stored.get(name)):
        name = wrong[0]
        raise UserError(
            f"{weights_path}: {name} is {stored.get(name, 'missing')}; allowed by {CONFIG_FILE}: "
            f"{expected.get(name, 'no such tensor')} ({len(wrong)} tensors do not fit)"
        )
    drafter.load_state_dict(weights, assign=True)
    return drafter


def _check_sizes(shape: DrafterShape, weights_path: Path) -> None:
    """Check that the weights are large enough for the sizes of the configuration.

    Raises:
        UserError: they are not, or their header cannot be read.
    """
    shapes = tensor_shapes(weights_path)
    stored = sum(math.prod(sizes) for sizes in shapes.values())
    width, layers = shape.hidden_size, shape.num_layers
    needed = max(
        layers * width * shape.intermediate_size,
        layers * width * shape.num_heads * shape.head_dim,
        width * width * len(shape.target_layer_ids),
    )
    if layers > len(shapes) or needed > stored:
        raise UserError(
            f"{weights_path}: {len(shapes)} tensors of {stored} numbers; {CONFIG_FILE} asks for {layers} "
            f"layers of width {width}, {needed} numbers or more; allowed: weights that fit {CONFIG_FILE}"
        )


def _shape(config: dict[str, Any], path: Path) -> DrafterShape:
    """Read the shape from `config.json`; no value is defaulted, a missing one is an error with its key."""
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise UserError(f"{path}: dflash_config is {inner!r:.60}; allowed: a mapping")

    def need(holder: dict[str, Any], key: str, label: str) -> Any:
        if holder.get(key) is None:
            raise UserError(
                f"{path}: {label} is missing; allowed: the value the drafter was trained with (a guess would "
                "load and draft badly)"
            )
        return holder[key]

    layer_ids = need(inner, "target_layer_ids", "dflash_config.target_layer_ids")
    mask_token_id = need(inner, "mask_token_id", "dflash_config.mask_token_id")
    if not isinstance(layer_ids, list):
        raise UserError(f"{path}: target_layer_ids is {layer_ids!r:.60}; allowed: a list of layers")
    whole = {key: need(config, key, key) for key in SIZES if key != "rms_norm_eps"}
    whole |= {
        "mask_token_id": mask_token_id,
        **{f"target_layer_ids[{i}]": v for i, v in enumerate(layer_ids)},
    }
    given = {"block_size": config.get("block_size"), "dflash_config.block_size": inner.get("block_size")}
    whole |= {key: value for key, value in given.items() if value is not None}
    for key, value in whole.items():
        if type(value) is not int or value < (key in SIZES):
            raise UserError(
                f"{path}: {key} is {value!r:.60}; allowed: a whole number from {int(key in SIZES)}"
            )
    block_sizes = {value for value in given.values() if value is not None}
    if len(block_sizes) != 1:
        raise UserError(
            f"{path}: block_size is {'missing' if not block_sizes else sorted(block_sizes)}; allowed: one "
            "value, at the top level, in dflash_config, or the same in both"
        )
    if not 2 <= min(block_sizes) <= MAX_BLOCK_SIZE:
        raise UserError(f"{path}: block_size is {min(block_sizes)}; allowed: 2 to {MAX_BLOCK_SIZE}")
    positive_number(need(config, "rms_norm_eps", "rms_norm_eps"), "rms_norm_eps", path)
    if config.get("is_causal"):
        raise UserError(f"{path}: is_causal is true; allowed: false, slots of a block see each other")
    window, sliding_layers = _windows(config, path)
    theta, scaling = read_rope(config, path)
    return DrafterShape(
        **{name: need(config, key, key) for key, name in SIZES.items()},
        block_size=block_sizes.pop(),
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(layer_ids),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_bias=bool(config.get("attention_bias")),
    )


def _windows(config: dict[str, Any], path: Path) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the sliding window, and the layers that have it: None for all.

    Raises:
        UserError: `layer_types` and the window contradict each other, or an unknown kind of layer.
    """
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"{path}: layer_types is {kinds!r:.60}; allowed: a list of {FULL} and {SLIDING}")
    uses_window = config.get("use_sliding_window") or SLIDING in kinds
    window = config.get("sliding_window") if uses_window else None
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"{path}: sliding_window is {window!r:.60}; allowed: a whole number from 1")
    if not set(kinds) <= {FULL, SLIDING}:
        raise UserError(f"{path}: layer_types is {sorted(set(kinds))}; allowed: {FULL} and {SLIDING}")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
    if kinds and bool(sliding) != (window is not None):
        raise UserError(
            f"{path}: layer_types {sorted(set(kinds))} with a sliding window of {window}; allowed: "
            f"{SLIDING} in at least one layer together with a sliding_window, or neither"
        )
    return window, None if len(sliding) == len(kinds) else sliding or None
