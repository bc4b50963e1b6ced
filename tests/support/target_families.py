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
    "llama3 rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn rope": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "partial rope": ("Glm4Config", {"head_dim": 16}),
    "latent attention": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    # Their layers pass no keywords on to attention.
    "nemotron": ("NemotronConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "parallel layers": ("GPTNeoXConfig", {}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "lm_head_bias": True, "sliding_window": None}),
}

# Families whose attention cannot be exchanged for ours: name -> (class, differences, part of the message).
REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sinks": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16}, "'s_aux' is not supported"),
    "attention soft cap": ("Gemma2Config", {"head_dim": 16}, "'softcap' is not supported"),
    "own mask": ("DogeConfig", {}, "a mask of its own is not supported"),
    "twice a layer": ("DiffLlamaConfig", {}, "calls attention twice"),
    "own attention": ("XGLMConfig", {"ffn_dim": 96, "d_model": 64, "num_layers": 4}, "do not call"),
    "no list of layers": ("GPT2Config", {"n_embd": 64, "n_layer": 4, "n_head": 4}, "has no list of layers"),
}


def make_family(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a random checkpoint of a family; its biases and norms differ from 0 and 1."""
    import transformers

    kind, changes = (FAMILIES.get(name) or REJECTED[name])[:2]
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
