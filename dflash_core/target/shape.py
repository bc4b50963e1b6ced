"""Sizes of a target that its drafter takes over, read from a transformers configuration. Needs no torch.

Policy: a configuration says the same thing in many ways (an older name, a value per layer, a value that only
one expert has). They are all read here, so that every other module sees plain numbers. Nothing about the
target's own rotary embedding matters but its base: the rotation of a drafter is its own (see `DrafterShape`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The rotary base of a drafter whose target has no rotary embedding.
DEFAULT_ROPE_THETA = 1e6
# Width of a drafter's MLP, in hidden sizes, where the target has no dense MLP to take it from: published
# drafters of mixture-of-experts targets have about this.
DEFAULT_MLP_RATIO = 3
# Names under which configurations give their number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a drafter takes from its target where its own settings leave it open."""

    hidden_size: int
    # decoder layers
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # of a dense MLP; 3 x hidden_size where the target's layers have experts or give no width
    intermediate_size: int
    vocab_size: int
    # of full attention, where layers differ
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int


def read_shape(config: Any, *, num_layers: int | None = None) -> TargetShape:
    """Return the shape of a target.

    Args:
        config: its transformers configuration, the whole one or its text part.
        num_layers: number of its decoder layers, where known; None: what the configuration says.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden_size = _value(text, "hidden_size")
    heads = _value(text, "num_attention_heads")
    return TargetShape(
        hidden_size=hidden_size,
        num_layers=num_layers or _value(text, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_value(text, "num_key_value_heads") or heads,
        head_dim=_value(text, "head_dim") or hidden_size // heads,
        intermediate_size=_mlp_width(text, hidden_size),
        vocab_size=_value(text, "vocab_size"),
        rope_theta=rope_theta(text) or DEFAULT_ROPE_THETA,
        rms_norm_eps=float(_value(text, "rms_norm_eps") or 1e-6),
        max_position_embeddings=int(_value(text, "max_position_embeddings") or 8192),
    )


def rope_theta(config: Any) -> float | None:
    """Return the base of the rotary embedding, or None; that of full attention where layers differ.

    Reads both layouts of transformers: `rope_parameters` (5.x) and `rope_theta` with `rope_scaling` (4.x).
    """
    parameters = dict(_value(config, "rope_parameters") or {})
    by_layer_type = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if by_layer_type:
        parameters = by_layer_type.get("full_attention") or next(iter(by_layer_type.values()))
    theta = parameters.get("rope_theta", _value(config, "rope_theta"))
    return None if theta is None else float(theta)


def _mlp_width(config: Any, hidden_size: int) -> int:
    width = _value(config, "intermediate_size")
    has_experts = any((_value(config, name) or 0) > 1 for name in EXPERT_COUNTS)
    dense = isinstance(width, int) and not (has_experts and width < 2 * hidden_size)
    return width if dense else DEFAULT_MLP_RATIO * hidden_size


def _value(config: Any, name: str) -> Any:
    """Return an attribute, of the last layer where layers differ in it; None where there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # transformers raises a RuntimeError of its own for a value that differs between layers. The last
        # layer is one of full attention wherever such layers are mixed with others.
        return getattr(config.per_layer_config[-1], name, None)
