"""Tiny random checkpoints of target families, one for each way in which a family differs from plain GQA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 128
# Sizes that nearly every configuration class takes.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Name -> (configuration class of transformers, what differs from SIZES).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.0625}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 30.0,
            "sliding_window": 16,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 16}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "lm_head_bias": True, "sliding_window": None}),
}


def make_family(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a random checkpoint of a family; its biases and norms differ from 0 and 1."""
    import transformers

    kind, changes = FAMILIES[name]
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.3 if parameter.dim() == 1 else 0.1)
    model.save_pretrained(directory)
    return directory
