"""Attention of the target with our own masking rules: packed, padded without a mask, and decoding.

`transformers` calls `attention` through `AttentionInterface`; the mask function registered under the same
name returns None, so no model ever builds a mask tensor. What a query may see is decided here, in three
cases, by the `Pass` that the caller has begun (a context variable, since many models drop keywords on the
way):

* `cu_seqlens` given: samples lie one after another in one row; each attends to itself alone, causally. On
  CUDA this is one `varlen_attn` call, elsewhere one SDPA call per sample, so the price is the sum of S^2, not
  T^2.
* `cache` given: a few new tokens per row, at explicit positions, over that row's cached keys (`DecodeCache`);
  with `cu_seqlens` too, whole prompts, packed, whose keys are kept for later.
* neither: rows are whole samples, padded on the right; causality alone keeps real tokens from seeing padding.

Guarantee: in all three a token sees what it would see in a plain causal forward of its sample alone. What is
not computed here (a mask of the model's own, a choice among keys, a second attention in the same layer) is
rejected at the first call, never ignored.

Price: soft caps and sinks have no fused product, so their scores [N, S, S] are held for one sample at a time.

Shape letters: B rows, N query heads, G key/value heads, H head dim, S sequence, T packed tokens, K new tokens
per row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from dflash_core.errors import UserError
from dflash_core.target.decode_cache import DecodeCache

# A name with "flash" in it would be taken for a flash attention package.
ATTENTION_NAME = "packed_capture"
# Keywords that change nothing in a forward of a frozen causal model.
HARMLESS = {
    "cache_position",
    "dropout",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True)
class Terms:
    """What scores of queries and keys become before they are averaged over."""

    # of the scores; None: the root of the head dim
    scaling: float | None = None
    # tokens that a query sees, its own included
    window: int | None = None
    # scores become cap * tanh(scores / cap)
    soft_cap: float | None = None
    # [N]: score of one more key per head, whose value is zero
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True when torch's fused attention computes it."""
        return self.soft_cap is None and self.sinks is None


@dataclass
class Pass:
    """One forward pass of the target: how `attention` computes, and the layers that have called it."""

    # int32 [n + 1], on the device: the rows are packed
    cu_seqlens: torch.Tensor | None = None
    # tokens of the longest packed sample
    longest: int = 0
    cache: DecodeCache | None = None
    called: set[int] = field(default_factory=set)


_current: ContextVar[Pass | None] = ContextVar("target_pass", default=None)


@contextmanager
def begin(forward: Pass) -> Iterator[None]:
    """Let every attention inside the block compute as this pass asks.

    Raises:
        UserError: no layer has called `attention`, so nothing kept tokens from seeing each other.
    """
    token = _current.set(forward)
    try:
        yield
    finally:
        _current.reset(token)
    if not forward.called:
        raise UserError(
            "target.name: its layers do not call transformers' attention interface; allowed: targets whose "
            "attention can be exchanged"
        )


@functools.cache
def _varlen_attn() -> Any:
    """Return torch's packed attention, or None where this torch has none; its import takes seconds."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute query [B, N, S, H], key, value [B, G, S, H] -> [B, S, N, H], as `AttentionInterface` calls it.

    Raises:
        UserError: the target's attention has a term that is not computed here, or a layer calls twice.
    """
    forward = _current.get() or Pass()
    layer: int = module.layer_idx  # type: ignore[assignment]
    _check_call(forward, layer, attention_mask, is_causal, kwargs)
    terms = Terms(scaling, sliding_window, softcap, s_aux)
    bounds, cache = forward.cu_seqlens, forward.cache
    if cache is not None:
        cache.store(layer, key, value)
        if bounds is None:
            return _decode(query, cache, layer, terms).contiguous(), None
    if bounds is None:
        return _causal(query, key, value, terms).transpose(1, 2).contiguous(), None
    if query.is_cuda and (options := _varlen_options(query, key, value, terms)) is not None:
        q_TNH, k_TGH, v_TGH = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = forward.longest
        out_TNH = _varlen_attn()(q_TNH, k_TGH, v_TGH, bounds, bounds, longest, longest, **options)
        return out_TNH[None], None
    ends = bounds.tolist()
    out_1TNH = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for start, end in zip(ends, ends[1:]):
        out_1NSH = _causal(query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], terms)
        out_1TNH[:, start:end] = out_1NSH.transpose(1, 2)
    return out_1TNH, None


def _check_call(
    forward: Pass, layer: int, mask: torch.Tensor | None, is_causal: bool | None, keywords: dict[str, Any]
) -> None:
    """Reject a call that asks for more than plain causal attention, once per layer."""
    unknown = [name for name, value in keywords.items() if value is not None and name not in HARMLESS]
    term = f"{unknown[0]!r}" if unknown else "a mask of its own" if mask is not None else "no causal order"
    if unknown or mask is not None or is_causal is False:
        raise UserError(
            f"target.name: attention with {term} is not supported; allowed: plain causal attention"
        )
    if layer in forward.called:
        raise UserError(
            f"target.name: layer {layer} calls attention twice in one pass, which is not supported; allowed: "
            "one attention per layer"
        )
    forward.called.add(layer)


def _decode(query_BNKH: torch.Tensor, cache: DecodeCache, layer: int, terms: Terms) -> torch.Tensor:
    """Attend from new tokens to their rows of the cache, [B, K, N, H].

    Query heads that share a key head are laid side by side as more queries of it: the cache is read in place,
    where grouped attention would copy it once per query head.
    """
    keys, values = cache.visible(layer)
    num_groups, (_, num_heads, num_new, _) = keys.shape[1], query_BNKH.shape
    repeats = num_heads // num_groups
    query = query_BNKH.unflatten(1, (num_groups, repeats)).flatten(2, 3)  # [B, G, repeats * K, H]
    visible = cache.mask(repeats, terms.window)
    if terms.is_plain:
        out = scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=terms.scaling)
    else:
        sinks = terms.sinks
        if sinks is not None:
            sinks = sinks.view(num_groups, repeats).repeat_interleave(num_new, dim=1)
        out = _attend(query, keys, values, visible, terms, sinks)
    return out.unflatten(2, (repeats, num_new)).flatten(1, 2).transpose(1, 2)


def _varlen_options(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
) -> dict[str, Any] | None:
    """Return the keywords of `varlen_attn` for this torch, or None where it cannot do it.

    They grew from release to release.
    """
    scaling, window = terms.scaling, terms.window
    if query.dtype not in (torch.bfloat16, torch.float16) or _varlen_attn() is None or not terms.is_plain:
        return None
    # One width for all three, as flash attention has it.
    if not query.shape[-1] == value.shape[-1] <= 256:
        return None
    known = inspect.signature(_varlen_attn()).parameters
    plain_scale = scaling is None or abs(scaling - query.shape[-1] ** -0.5) < 1e-9
    if (window is not None and "window_size" not in known) or not (plain_scale or "scale" in known):
        return None
    options: dict[str, Any] = {}
    if "window_size" in known:
        # (tokens to the left, tokens to the right)
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    if "scale" in known:
        options["scale"] = scaling
    if "enable_gqa" in known:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    return options


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return causal attention [B, N, S, H] within rows of one sample each."""
    gqa, length, window = query.shape[1] != key.shape[1], query.shape[2], terms.window
    if terms.is_plain and (window is None or window >= length):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=terms.scaling, enable_gqa=gqa
        )
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if terms.is_plain:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=terms.scaling, enable_gqa=gqa
        )
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return _attend(query, key, value, visible, terms, None if terms.sinks is None else terms.sinks[:, None])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    terms: Terms,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with a soft cap and sinks, by the formula.

    Args:
        query: [B, N, S, H]; key and value: [B, N, L, H].
        visible: bool, broadcast to [B, N, S, L].
        terms: of the scores.
        sinks: score of each query's sink, broadcast to [N, S]; None: none.
    """
    scale = query.shape[-1] ** -0.5 if terms.scaling is None else terms.scaling
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if terms.soft_cap is not None:
        scores = torch.tanh(scores / terms.soft_cap) * terms.soft_cap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(dim=-1).to(value.dtype) @ value
    sink = sinks.float()[None, :, :, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].to(value.dtype) @ value


def register() -> None:
    """Make `attention` known to transformers under `ATTENTION_NAME`; safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
