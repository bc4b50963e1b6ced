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
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_core.drafter.shape import DrafterShape
from dflash_core.kernels.block_attention import block_attention

LayerContext = tuple[Tensor, Tensor]  # k_TGH and v_TGH of one layer


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
    """A linear map that runs in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Rotary(NamedTuple):
    """Frequencies of the rotary embedding: one per pair of channels, and a factor on cos and sin."""

    frequencies: Tensor  # float32 [H / 2]
    factor: float


def rotary(shape: DrafterShape, device: torch.device) -> Rotary:
    """Return theta ** -(2 i / H) for i = 0..H / 2 - 1; for a scaled embedding what transformers computes."""
    if not shape.rope_scaling:
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
        return Rotary(shape.rope_theta**-exponent, 1.0)
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=shape.rope_parameters(),
    )
    embedding: Any = Qwen3RotaryEmbedding(config)
    return Rotary(embedding.inv_freq.float().to(device), float(embedding.attention_scaling))


def rotary_tables(position: Tensor, rotation: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, [..., 1, H / 2], of positions [...]; angles in float32."""
    angle = position.to(torch.float32)[..., None, None] * rotation.frequencies
    cos, sin = angle.cos(), angle.sin()
    if rotation.factor != 1.0:
        cos, sin = cos * rotation.factor, sin * rotation.factor
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in the half-split layout of Llama and Qwen: dimension i pairs with i + H / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block, by the same projections."""

    def __init__(self, shape: DrafterShape, layer: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.sliding_window = shape.window_of(layer)
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query_width, bias=shape.attention_bias)
        self.k_proj = Linear(shape.hidden_size, key_width, bias=shape.attention_bias)
        self.v_proj = Linear(shape.hidden_size, key_width, bias=shape.attention_bias)
        self.o_proj = Linear(query_width, shape.hidden_size, bias=shape.attention_bias)
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

    def __init__(self, shape: DrafterShape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
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
        self._rotary: dict[torch.device, Rotary] = {}
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape, i) for i in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        generator = generator or torch.Generator().manual_seed(0)
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

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
        if position.device not in self._rotary:
            self._rotary[position.device] = rotary(self.shape, position.device)
        return rotary_tables(position, self._rotary[position.device], dtype)
