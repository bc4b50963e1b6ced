"""Shape of a drafter: everything about it except its weights, as `config.json` of an export has it.

Policy: what the settings leave open is taken from the target. The rotary embedding is the drafter's own:
plain, over the whole head, with the base of the target's full attention. z-lab's code, vLLM and SGLang rotate
by the drafter's configuration alone, whatever the target does, so a target with a scaled, partial or missing
rotary embedding needs no special drafter. Published drafters may have a scaled one, windows in some layers,
and biases in attention; those are read, kept and written again, and never chosen here. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_core.config import DrafterConfig
from dflash_core.errors import UserError
from dflash_core.target.shape import TargetShape

# Kinds of layers, as in `layer_types` of a configuration.
FULL, SLIDING = "full_attention", "sliding_attention"
# Scaled rotary embeddings whose frequencies do not depend on the length of a sample.
SCALED_ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Everything about a drafter except its weights."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based decoder layers of the target whose outputs are read
    num_target_layers: int
    vocab_size: int  # of the target
    rope_theta: float
    # {}: plain; else the rope_parameters of a published drafter: {"rope_type": "yarn", "factor": 4.0, ...}
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    sliding_window: int | None = None
    # layers that have the sliding window; None: all of them where there is one
    sliding_layers: tuple[int, ...] | None = None
    # q, k, v and o projections have a bias
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter.num_kv_heads: {self.num_kv_heads} is not allowed; "
                f"allowed: divisors of num_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim: {self.head_dim} is not allowed; allowed: even numbers")
        check_mask_token(self.mask_token_id, self.vocab_size)
        wrong = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if wrong or not self.target_layer_ids:
            raise UserError(
                f"drafter.target_layer_ids: {list(self.target_layer_ids)} is not allowed; "
                f"allowed: at least one id of a decoder layer, 0 to {self.num_target_layers - 1}"
            )

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None where it sees the whole context."""
        sliding = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if sliding else None

    def layer_types(self) -> list[str]:
        """Return the kind of each layer."""
        return [FULL if self.window_of(i) is None else SLIDING for i in range(self.num_layers)]

    def rope_parameters(self) -> dict[str, Any]:
        """Return the rotary embedding as transformers 5 writes it."""
        return {"rope_type": "default", **self.rope_scaling, "rope_theta": self.rope_theta}


def drafter_shape(
    target: TargetShape, config: DrafterConfig, target_layer_ids: tuple[int, ...]
) -> DrafterShape:
    """Return the shape of a target's drafter; what `config` leaves open is taken from the target.

    Args:
        target: shape of the target.
        config: settings of the drafter.
        target_layer_ids: decoder layers to read.

    Raises:
        UserError: no mask token, or an impossible shape.
    """
    if config.mask_token_id is None:
        raise UserError(
            "drafter.mask_token_id: not set; set the id of a reserved token of the target's vocabulary that "
            "no data uses (never the padding or end token)"
        )
    heads = config.num_heads or target.num_heads
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=config.num_kv_heads or target.num_kv_heads,
        head_dim=config.head_dim or target.head_dim,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        rope_theta=config.rope_theta or target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        sliding_window=config.sliding_window,
    )


def read_rope(config: Mapping[str, Any], path: object) -> tuple[float, dict[str, Any]]:
    """Return (rope_theta, rope_scaling) of an exported drafter's `config.json`.

    Reads both layouts of transformers: `rope_parameters` (5.x) and `rope_theta` with `rope_scaling` (4.x).

    Args:
        config: the content of the file.
        path: the file, for the message.

    Raises:
        UserError: no rope_theta, one per layer type, frequencies that depend on the length of a sample, or
            values that are no numbers.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"{path}: rope_parameters is {given!r:.60}; allowed: a mapping")
    parameters = dict(given)
    theta = parameters.pop("rope_theta", config.get("rope_theta"))
    older_kind = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", older_kind)
    share = parameters.pop("partial_rotary_factor", 1.0)
    if theta is None or any(isinstance(value, dict) for value in parameters.values()):
        found = parameters or "missing"
        raise UserError(f"{path}: rope_theta is {found}; allowed: one base for all layers")
    if share not in (None, 1, 1.0):
        raise UserError(f"{path}: partial_rotary_factor is {share}; allowed: 1, the whole head rotated")
    theta = positive_number(theta, "rope_theta", path)
    if kind == "default":
        return theta, {}
    if kind not in SCALED_ROPE_TYPES:
        allowed = ", ".join(("default", *SCALED_ROPE_TYPES))
        raise UserError(f"{path}: rope_type is {kind!r}; allowed: {allowed}")
    for name, value in parameters.items():
        if value is not None and not isinstance(value, bool):
            positive_number(value, f"rope_parameters.{name}", path)
    return theta, {"rope_type": kind, **parameters}


def positive_number(value: Any, name: str, path: object) -> float:
    """Return a value of a drafter's `config.json` as a number.

    Raises:
        UserError: it is no finite number above 0.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UserError(f"{path}: {name} is {value!r:.60}; allowed: a number above 0")
    return float(value)


def check_mask_token(mask_token_id: int, vocab_size: int) -> None:
    """Check that a mask token is a row of the target's embedding.

    Raises:
        UserError: it is not.
    """
    if not 0 <= mask_token_id < vocab_size:
        raise UserError(
            f"drafter.mask_token_id: {mask_token_id} is not allowed; "
            f"allowed: an existing row of the target's embedding, 0 to {vocab_size - 1}"
        )
