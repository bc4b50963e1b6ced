"""Straightforward drafter and loss: a dense mask, all logits, plain autograd. Baseline of `drafter_step`.

It is also the oracle of the drafter's tests. It imports nothing of the product and was written from the
paper (arXiv 2602.06036), so both can share a misreading of the paper and no other mistake. Slow and
large on purpose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_mask(cu_seqlens, anchors, anchor_sample, block_size, sliding_window=None) -> Tensor:
    """Return bool [A * K, T + A * K]: keys are the packed context, then every slot of every block."""
    num_rows, num_blocks = int(cu_seqlens[-1]), len(anchors)
    row = torch.arange(num_rows)
    sample_of_row = torch.bucketize(row, cu_seqlens.long(), right=True) - 1
    slot_block = torch.arange(num_blocks).repeat_interleave(block_size)
    slot_number = torch.arange(block_size).repeat(num_blocks)
    same_sample = sample_of_row[None] == anchor_sample.long()[slot_block][:, None]
    before_anchor = row[None] < anchors.long()[slot_block][:, None]
    context = same_sample & before_anchor
    if sliding_window is not None:
        context &= (anchors.long()[slot_block] + slot_number)[:, None] - row[None] < sliding_window
    return torch.cat([context, slot_block[:, None] == slot_block[None]], dim=1)


def dense_hidden(weights, shape, embed, features, token_ids, cu_seqlens, anchors, anchor_sample) -> Tensor:
    """Return final hidden states [A, K, D]; `weights` is a state dict whose tensors may require gradients."""
    block_size, num_rows, eps = shape.block_size, len(features), shape.rms_norm_eps
    starts = cu_seqlens.long()[:-1]
    context = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    ids = torch.full((len(anchors), block_size), shape.mask_token_id)
    ids[:, 0] = token_ids[anchors.long()]
    x = embed[ids.flatten()]
    lengths = cu_seqlens.long().diff()
    row_position = torch.arange(num_rows) - starts.repeat_interleave(lengths)
    anchor_position = anchors.long() - starts[anchor_sample.long()]
    slot_position = (anchor_position[:, None] + torch.arange(block_size)).flatten()
    for i in range(shape.num_layers):
        sliding = shape.sliding_layers is None or i in shape.sliding_layers
        window = shape.sliding_window if sliding else None
        mask = dense_mask(cu_seqlens, anchors, anchor_sample, block_size, window)
        w = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items() if k.startswith(f"layers.{i}.")}
        h = rms_norm(x, w["input_layernorm.weight"], eps)
        # the context passes no input norm
        source = torch.cat([context, h])
        position = torch.cat([row_position, slot_position])
        q = split_heads(linear(h, w, "self_attn.q_proj"), shape.head_dim)
        k = split_heads(linear(source, w, "self_attn.k_proj"), shape.head_dim)
        v = split_heads(linear(source, w, "self_attn.v_proj"), shape.head_dim)
        q = rope(rms_norm(q, w["self_attn.q_norm.weight"], eps), slot_position, shape.rope_theta)
        k = rope(rms_norm(k, w["self_attn.k_norm.weight"], eps), position, shape.rope_theta)
        group = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + linear(out.transpose(0, 1).flatten(1), w, "self_attn.o_proj")
        h = rms_norm(x, w["post_attention_layernorm.weight"], eps)
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"], eps).unflatten(0, (-1, block_size))


def dense_loss(
    hidden, head, token_ids, loss_mask, cu_seqlens, anchors, anchor_sample, objective, last_hidden=None
):
    """Return loss_sum with its graph, weight_sum, correct [A, K] and supervised [A, K].

    `objective` has the fields of `config.ObjectiveConfig`; `last_hidden` is needed for the target's
    labels and KL.
    """
    num_blocks, block_size, _ = hidden.shape
    logits = hidden @ head.T
    log_prob = logits.log_softmax(-1)
    supervised = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    label = torch.zeros(num_blocks, block_size, dtype=torch.long)
    for a in range(num_blocks):
        for k in range(1, block_size):
            row = int(anchors[a]) + k
            if row >= int(cu_seqlens[int(anchor_sample[a]) + 1]) or not loss_mask[row]:
                break
            supervised[a, k] = True
            from_data = objective.labels == "data"
            label[a, k] = token_ids[row] if from_data else (last_hidden[row - 1] @ head.T).argmax()
            if objective.stop_at_disagreement and label[a, k] != token_ids[row]:
                break
    label_log_prob = log_prob.gather(-1, label[..., None])[..., 0]
    loss = -label_log_prob
    if objective.loss == "kl":
        rows = (anchors.long()[:, None] + torch.arange(block_size) - 1).clamp(0, len(last_hidden) - 1)
        target = (last_hidden[rows] @ head.T).log_softmax(-1)
        loss = (target.exp() * (target - log_prob)).sum(-1)
    weight = torch.zeros_like(loss)
    if objective.weighting == "decay":
        gamma = objective.gamma or {16: 7, 10: 5, 8: 4}.get(block_size, block_size / 2)
        weight = torch.exp(-(torch.arange(block_size, dtype=loss.dtype) - 1) / gamma).repeat(num_blocks, 1)
    else:
        q = (1 - objective.dpace_alpha) * label_log_prob.detach().exp() + objective.dpace_alpha
        for j in range(1, block_size):
            for m in range(j, block_size):
                weight[:, j] += q[:, 1 : m + 1].prod(dim=1) * supervised[:, m]
    weight = weight * supervised
    return (weight * loss).sum(), weight.sum(), (logits.argmax(-1) == label) & supervised, supervised


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Turn [rows, heads * H] into [heads, rows, H]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(0, 1)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Apply a linear map, with its bias where it has one."""
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate as Llama in transformers does: x cos + rotate_half(x) sin, both tables repeated twice."""
    half = x.shape[-1] // 2
    inverse_frequency = 1.0 / theta ** (torch.arange(half, dtype=torch.float64) / half)
    angle = (position.double()[:, None] * inverse_frequency).repeat(1, 2)
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)
