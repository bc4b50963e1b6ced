"""Decoding steps of plain decoders on a CPU: a few tokens per row, without the model's own modules.

Why: of a step of a small target, most of the time passes between the products: a module call, a hook, a
cast and a copy each cost as much as a small product. Here a layer is about twenty calls of torch: products
with packed weights (see `packed_linear`), one rotation for queries and keys, masks and rotary tables once
per step.

Which targets: those whose layers are exactly one of `KINDS`, unchanged: norm, attention, norm, gated MLP.
Every other target decodes by the model's own forward, which is also the reference in the tests;
`check_target` compares what is computed here with the model alone.

Measured on AVX512 with packed weights: up to 64 rows, the bits of a token's states depend neither on how many
tokens are read with it nor on their rows. In float32 that ends at 384 positions, where the product of scores
and values splits its sums. No result relies on it: other processors may round otherwise.

Shape letters: B rows, K tokens per row, R = B * K, N query heads, G key/value heads, M = N / G, H head dim,
D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_core.target.decode_cache import DecodeCache
from dflash_core.target.packed_linear import FewRows, PackedRows, PlainRows, can_pack

# Layers of transformers that compute as `_Layer` does, by module and class.
KINDS = {
    ("transformers.models.llama.modeling_llama", "LlamaDecoderLayer"),
    ("transformers.models.mistral.modeling_mistral", "MistralDecoderLayer"),
    ("transformers.models.qwen2.modeling_qwen2", "Qwen2DecoderLayer"),
    ("transformers.models.qwen3.modeling_qwen3", "Qwen3DecoderLayer"),
}
DTYPES = (torch.float32, torch.bfloat16)
# In float32 a query's bits depend on the number of queries below this one, and a product's below two rows.
MIN_QUERIES = 3


def is_plain(model: Any, decoder: Any) -> bool:
    """Return True for a model on the CPU whose decoder computes as `FewTokens` does."""
    kinds = {(type(layer).__module__, type(layer).__qualname__) for layer in decoder.layers}
    parts = list(decoder.modules())
    return (
        kinds <= KINDS
        and all(type(part) is nn.Linear for part in parts if isinstance(part, nn.Linear))
        and type(model.get_input_embeddings()) is nn.Embedding
        and model.config.get_text_config().hidden_act == "silu"
        and all(p.device.type == "cpu" and p.dtype in DTYPES for p in decoder.parameters())
        and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        # as packages wrap it that move weights between devices
        and not any("forward" in vars(part) for part in parts)
    )


class FewTokens:
    """The layers of a plain decoder, for a few tokens per row over a `DecodeCache`."""

    def __init__(self, model: Any, decoder: Any) -> None:
        self.embed_VD = model.get_input_embeddings().weight
        self.rotary = decoder.rotary_emb
        pack = can_pack(list(layer_weights(decoder)))
        self.layers = [_Layer(layer, pack=pack) for layer in decoder.layers]
        self.norm = _Norm(decoder.norm)
        # Two rows where one alone would round otherwise.
        self.doubles = pack and self.embed_VD.dtype == torch.float32

    def __call__(
        self,
        ids_BK: Tensor,
        cache: DecodeCache,
        positions_BK: Tensor,
        slots: dict[int, int],
        keep: Callable[[int, Tensor], None],
    ) -> Tensor:
        """Return states after the final norm [B, K, D]; `cache.begin` was called with the positions.

        Args:
            ids_BK, cache, positions_BK: as in `Target.decode`.
            slots: of the layers whose outputs are wanted, by number.
            keep: called with the slot and the output [B, K, D] of each of them.
        """
        if self.doubles and ids_BK.numel() == 1:
            twice = positions_BK.expand(1, 2)
            cache.begin(twice)
            states = self(ids_BK.expand(1, 2), cache, twice, slots, lambda slot, x: keep(slot, x[:, :1]))
            return states[:, :1]
        shape = (*ids_BK.shape, -1)
        x_RD = F.embedding(ids_BK, self.embed_VD).flatten(0, 1)
        tables = self._tables(x_RD, positions_BK)
        for i, layer in enumerate(self.layers):
            x_RD = layer(i, x_RD, cache, tables)
            if i in slots:
                keep(slots[i], x_RD.view(shape))
        return self.norm(x_RD).view(shape)

    def _tables(self, x_RD: Tensor, positions_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [R, 1, H], sin with the sign of x rolled by H / 2."""
        cos, sin = self.rotary(x_RD, positions_BK)
        cos_RH, sin_RH = cos.flatten(0, 1), sin.flatten(0, 1)
        first, second = sin_RH.chunk(2, dim=-1)
        return cos_RH[:, None], torch.cat([-first, second], dim=-1)[:, None]


class _Norm:
    """RMSNorm x / sqrt(mean(x ** 2) + eps) * weight, in float32, in fewer calls than `F.rms_norm` takes."""

    def __init__(self, norm: Any) -> None:
        self.width = norm.weight.shape[0]
        # x / |x| * sqrt(width) * weight, where |x| ** 2 grows by width * eps
        self.weight = norm.weight.float() * self.width**0.5
        self.added = torch.tensor(self.width * norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.added, length, length).rsqrt_()
        return (x * scale).mul_(self.weight).to(x.dtype)


class _Layer:
    """One layer: x + o(attention(norm x)), then x + down(silu(gate(norm x)) * up(norm x))."""

    def __init__(self, layer: Any, *, pack: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.window = _window(attention)
        self.before, self.between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.norms = None
        if hasattr(attention, "q_norm"):
            self.norms = _Norm(attention.q_norm), _Norm(attention.k_norm)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.num_query_heads, self.num_key_heads = (p.out_features // self.head_dim for p in projections[:2])
        biases = [p.bias for p in projections]
        bias = None if biases[0] is None else torch.cat(biases)
        rows: Callable[..., FewRows] = PackedRows if pack else PlainRows
        self.qkv = rows(torch.cat([p.weight for p in projections]), bias)
        self.o, self.gate, self.up, self.down = (
            rows(p.weight, p.bias) for p in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )

    def __call__(self, i: int, x_RD: Tensor, cache: DecodeCache, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Return the output [R, D]; the keys and values of layer i join the cache."""
        num_rows, num_queries = len(x_RD), self.num_query_heads
        heads_RXH = self.qkv.product(self.before(x_RD)).view(num_rows, -1, self.head_dim)
        rotated = heads_RXH[:, : num_queries + self.num_key_heads]
        if self.norms is not None:
            for norm, part in zip(self.norms, (rotated[:, :num_queries], rotated[:, num_queries:])):
                part.copy_(norm(part))
        cos, sin = tables
        torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin, out=rotated)
        cache.store_joined(i, heads_RXH[:, num_queries:])
        attended_RD = self._attend(i, heads_RXH[:, :num_queries], cache)
        x_RD = self.o.plus(attended_RD, x_RD)
        normed_RD = self.between(x_RD)
        return self.down.plus(self.up.times(normed_RD, self.gate.silu(normed_RD)), x_RD)

    def _attend(self, i: int, query_RNH: Tensor, cache: DecodeCache) -> Tensor:
        """Attend to what the cache holds, [R, N * H]; query heads of a key head stand side by side."""
        num_rows, num_new = cache.positions_BK.shape
        num_groups, repeats = self.num_key_heads, self.num_query_heads // self.num_key_heads
        by_group = (num_rows, num_groups, repeats * num_new, self.head_dim)
        if num_new > 1:
            query_RNH = query_RNH.view(num_rows, num_new, num_groups, repeats, self.head_dim)
            query_RNH = query_RNH.permute(0, 2, 3, 1, 4)
        query, copies = query_RNH.reshape(by_group), 1
        if query.dtype == torch.float32 and by_group[2] < MIN_QUERIES:
            copies = MIN_QUERIES
            query = query.repeat(1, 1, copies, 1)
        keys, values = cache.visible(i)
        bias = cache.bias(copies * repeats, self.window, query.dtype)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=self.scaling)
        if copies > 1:
            out = out[:, :, : by_group[2]]
        if num_new > 1:
            out = out.view(num_rows, num_groups, repeats, num_new, self.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows * num_new, -1)


def layer_weights(decoder: Any) -> Iterator[Tensor]:
    """Yield the weights that packing copies."""
    for module in decoder.layers.modules():
        if isinstance(module, nn.Linear):
            yield module.weight


def _window(attention: Any) -> int | None:
    """Return the tokens that a query of a layer sees, as its forward passes them; None: all."""
    if type(attention).__name__ == "MistralAttention":
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)
