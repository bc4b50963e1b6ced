"""The drafter: a small non-causal Qwen3-style stack that reads the target's hidden states (arXiv 2602.06036).

It has no embedding and no lm_head: block tokens are embedded by the target, logits come from the target's
lm_head. Tensor names are those of the checkpoints that z-lab/dflash, SGLang and vLLM load.

A microbatch is three calls, so that the context is projected once however many chunks its blocks go through:

    context_TD = drafter.project_context(features)                      # fc and hidden_norm
    context = drafter.project_layers(context_TD, position_T)            # keys and values of every layer
    hidden_AKD = drafter.forward_blocks(embeds_AKD, context, ...)       # any number of blocks at a time

Weights stay in their own dtype (float32 masters); products run in the dtype of the activations that are
passed in.

Shape letters: A blocks, K block size, T packed context tokens, L captured layers, D model width, N query
heads, G key/value heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_core.config import DrafterConfig
from dflash_core.drafter.compatibility import check_mask_token
from dflash_core.errors import UserError
from dflash_core.kernels.block_attention import block_attention

LayerContext = tuple[Tensor, Tensor]  # k_TGH and v_TGH of one layer


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Everything about a drafter except its weights: the content of `config.json` of an exported drafter."""

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
    rope_theta: float  # of the target
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    sliding_window: int | None = None

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


def drafter_shape(
    target_config: Any, config: DrafterConfig, target_layer_ids: tuple[int, ...]
) -> DrafterShape:
    """Return the shape of a target's drafter; what `config` leaves open is taken from the target.

    Args:
        target_config: transformers configuration of the target (its text part for multimodal models).
        config: settings of the drafter.
        target_layer_ids: decoder layers to read.

    Raises:
        UserError: no mask token, an impossible shape, or a target whose rotary embedding is partial or
            scaled: serving code rotates by rope_theta alone, so training would differ from serving.
    """
    target = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
    if config.mask_token_id is None:
        raise UserError(
            "drafter.mask_token_id: not set; set the id of a reserved token of the target's vocabulary that "
            "no data uses (never the padding or end token)"
        )
    heads = config.num_heads or target.num_attention_heads
    kv_heads = config.num_kv_heads or getattr(target, "num_key_value_heads", None) or heads
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.head_dim or head_size(target),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_hidden_layers,
        vocab_size=target.vocab_size,
        rope_theta=plain_rope_theta(target),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(getattr(target, "max_position_embeddings", 8192)),
        sliding_window=config.sliding_window,
    )


def head_size(target: Any) -> int:
    """Return the dimensions of one attention head of the target."""
    return getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads


def plain_rope_theta(target: Any) -> float:
    """Return rope_theta of a target with plain, full rotary embedding.

    Reads both layouts of transformers: `rope_parameters` (5.x) and `rope_theta` with `rope_scaling` (4.x).

    Raises:
        UserError: scaled (any rope_type but "default"), partial, per-layer or no rotary embedding.
    """
    parameters = dict(getattr(target, "rope_parameters", None) or getattr(target, "rope_scaling", None) or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    share = parameters.get("partial_rotary_factor", getattr(target, "partial_rotary_factor", None))
    share = getattr(target, "rotary_pct", None) if share is None else share  # its older name
    if share is None and (rotated := getattr(target, "rotary_dim", None)) is not None:
        share = rotated / head_size(target)  # given in dimensions
    theta = parameters.get("rope_theta", getattr(target, "rope_theta", None))
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UserError(
            f"target: rotary embedding differs between layers ({parameters}); allowed: one rope_theta"
        )
    if kind != "default":
        raise UserError(f"target: rotary embedding of type {kind!r} is scaled; allowed: the type 'default'")
    if share not in (None, 1, 1.0):
        raise UserError(f"target: partial_rotary_factor is {share}; allowed: 1, the whole head rotated")
    if theta is None:
        raise UserError("target: its configuration has no rope_theta; allowed: targets with rotary embedding")
    return float(theta)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class Linear(nn.Linear):
    """A bias-free linear map that runs in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotary_tables(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, [..., 1, H / 2], of positions [...]; angles in float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position.device) / head_dim
    angle = position.to(torch.float32)[..., None, None] * theta**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in the half-split layout of Llama and Qwen: dimension i pairs with i + H / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block, by the same projections."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.sliding_window = shape.sliding_window
        self.q_proj = Linear(shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> LayerContext:
        """Return rotated keys and plain values [..., G, H] of inputs [..., D]."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), cos, sin), v

    def forward(
        self,
        x_AKD: Tensor,
        context: LayerContext,
        tables: tuple[Tensor, Tensor],
        context_start_A: Tensor,
        anchor_A: Tensor,
        keep_P: Tensor | None = None,
    ) -> Tensor:
        """Return [A, K, D], or [P, D] of the slots to keep."""
        q_AKNH = self.q_proj(x_AKD).unflatten(-1, (-1, self.head_dim))
        q_AKNH = rotate(self.q_norm(q_AKNH), *tables)
        k_AKGH, v_AKGH = self.keys_values(x_AKD, *tables)
        out_AKNH = block_attention(
            q_AKNH,
            *context,
            k_AKGH,
            v_AKGH,
            context_start_A=context_start_A,
            anchor_A=anchor_A,
            sliding_window=self.sliding_window,
        )
        return self.o_proj(_keep(out_AKNH.flatten(-2), keep_P))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP with residuals. The context passes no norm and is not updated."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x_AKD: Tensor,
        context: LayerContext,
        tables: tuple[Tensor, Tensor],
        context_start_A: Tensor,
        anchor_A: Tensor,
        keep_P: Tensor | None = None,
    ) -> Tensor:
        """Return [A, K, D], or [P, D] of the slots to keep."""
        normed_AKD = self.input_layernorm(x_AKD)
        attended = self.self_attn(normed_AKD, context, tables, context_start_A, anchor_A, keep_P)
        x = _keep(x_AKD, keep_P) + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def _keep(x_AKD: Tensor, keep_P: Tensor | None) -> Tensor:
    """Select slots by flat index; None returns all of them as they are."""
    return x_AKD if keep_P is None else x_AKD.flatten(0, 1).index_select(0, keep_P)


class DFlashDrafter(nn.Module):
    """The trainable part of DFlash.

    Args:
        shape: sizes, and settings that serving needs.
        generator: of the initial weights (linear maps normal with deviation 0.02, norms 1); None: seed 0. The
            same seed gives the same weights on every device, since they are drawn on CPU.
    """

    def __init__(self, shape: DrafterShape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        generator = generator or torch.Generator().manual_seed(0)
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)

    def project_context(self, features: Tensor) -> Tensor:
        """Project the target's captured states [T, L * D] to the context [T, D] that all layers share."""
        return self.hidden_norm(self.fc(features))

    def project_layers(self, context_TD: Tensor, position_T: Tensor) -> list[LayerContext]:
        """Return keys (rotated at positions in the sample) and values of the context for each layer."""
        tables = self._tables(position_T, context_TD.dtype)
        layers = cast(Iterable[DrafterLayer], self.layers)
        return [layer.self_attn.keys_values(context_TD, *tables) for layer in layers]

    def forward_blocks(
        self,
        embeds_AKD: Tensor,
        context: list[LayerContext],
        *,
        context_start_A: Tensor,
        anchor_A: Tensor,
        keep_P: Tensor | None = None,
    ) -> Tensor:
        """Return final hidden states of blocks, after the last norm: the input of the target's lm_head.

        Args:
            embeds_AKD: the target's embeddings of [anchor token, MASK x (K - 1)].
            context: of `project_layers`.
            context_start_A: int32, packed row where the block's sample starts. Non-decreasing.
            anchor_A: int32, packed row of the block's anchor. Non-decreasing. Slot k stands at position
                anchor - context_start + k, past the sample's end too.
            keep_P: None, or flat indices a * K + k of the slots whose final state is wanted: the last layer's
                MLP, most of its cost, runs for these alone. All slots are still attended to.

        Returns:
            hidden_AKD, or [P, D] of the slots to keep. Slot k predicts the token at position k of the block,
            no shift; slot 0 is the known anchor.
        """
        slot_K = torch.arange(embeds_AKD.shape[1], device=embeds_AKD.device)
        tables = self._tables((anchor_A - context_start_A)[:, None] + slot_K, embeds_AKD.dtype)
        x_AKD = embeds_AKD
        for i, (layer, layer_context) in enumerate(zip(self.layers, context)):
            keep = keep_P if i == len(self.layers) - 1 else None
            x_AKD = layer(x_AKD, layer_context, tables, context_start_A, anchor_A, keep)
        return self.norm(x_AKD)

    def num_parameters(self) -> int:
        """Return the number of trainable weights."""
        return sum(math.prod(p.shape) for p in self.parameters())

    def _tables(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary_tables(position, self.shape.head_dim, self.shape.rope_theta, dtype)
