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
not computed here (a soft cap, sinks, a mask of the model's own, a second attention in the same layer) is
rejected at the first call, never ignored.

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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute query [B, N, S, H], key, value [B, G, S, H] -> [B, S, N, H], as `AttentionInterface` calls it.

    Raises:
        UserError: the target's attention has a term that is not computed here (a soft cap, sinks, a mask), or
            a layer calls twice.
    """
    forward = _current.get() or Pass()
    layer: int = module.layer_idx  # type: ignore[assignment]
    _check_call(forward, layer, attention_mask, is_causal, kwargs)
    bounds, cache = forward.cu_seqlens, forward.cache
    if cache is not None:
        cache.store(layer, key, value)
        if bounds is None:
            return _decode(query, cache, layer, scaling, sliding_window).contiguous(), None
    if bounds is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2).contiguous(), None
    if query.is_cuda and (options := _varlen_options(query, key, scaling, sliding_window)) is not None:
        q_TNH, k_TGH, v_TGH = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = forward.longest
        out_TNH = _varlen_attn()(q_TNH, k_TGH, v_TGH, bounds, bounds, longest, longest, **options)
        return out_TNH[None], None
    ends = bounds.tolist()
    out_1TNH = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for start, end in zip(ends, ends[1:]):
        out_1NSH = _causal(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], scaling, sliding_window
        )
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


def _decode(
    query_BNKH: torch.Tensor, cache: DecodeCache, layer: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attend from new tokens to their rows of the cache, [B, K, N, H].

    Query heads that share a key head are laid side by side as more queries of it: the cache is read in place,
    where grouped attention would copy it once per query head.
    """
    keys, values = cache.visible(layer)
    num_groups, (_, num_heads, num_new, _) = keys.shape[1], query_BNKH.shape
    repeats = num_heads // num_groups
    query = query_BNKH.unflatten(1, (num_groups, repeats)).flatten(2, 3)  # [B, G, repeats * K, H]
    mask = cache.mask(repeats, window)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.unflatten(2, (repeats, num_new)).flatten(1, 2).transpose(1, 2)


def _varlen_options(
    query: torch.Tensor, key: torch.Tensor, scaling: float | None, window: int | None
) -> dict[str, Any] | None:
    """Return the keywords of `varlen_attn` for this torch, or None where it cannot do it.

    They grew from release to release.
    """
    if query.dtype not in (torch.bfloat16, torch.float16) or _varlen_attn() is None:
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


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    gqa = query.shape[1] != key.shape[1]
    length = query.shape[2]
    if window is None or window >= length:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    visible = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=gqa)


def register() -> None:
    """Make `attention` known to transformers under `ATTENTION_NAME`; safe to call again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
