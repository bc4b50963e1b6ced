"""Tiny random checkpoints of target families: one for each way in which a published target computes.

Each row says how its targets run here (see `dflash_core.target.mode`): `packed`, `padded` (samples influence
each other in a pack), `slow` (the model's own attention), or the reason for which they are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCABULARY = 128
# Sizes that nearly every configuration class takes; those that a class does not know have no effect.
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
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
HALF_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16}
DELTA = {
    **HALF_LINEAR,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
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
}
SPARSE = {**LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PACKED, PADDED, SLOW = "packed", "padded", "slow"


class Family(NamedTuple):
    """One way in which targets compute."""

    # published targets that compute so
    models: str
    # configuration class of transformers
    config: str
    # what differs from SIZES
    changes: dict[str, Any] = {}
    # PACKED, PADDED, SLOW, or part of the message that rejects it
    runs: str = PACKED


H16, W16 = {"head_dim": 16}, {"head_dim": 16, "sliding_window": 16}
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 2, TinyLlama, SmolLM2", "LlamaConfig"),
    "llama3": Family("Llama 3.1, 3.2, 3.3", "LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2Config"),
    "qwen3": Family("Qwen3 4B, 8B", "Qwen3Config", H16),
    "qwen3 yarn": Family("Qwen3 with YaRN", "Qwen3Config", {**H16, "rope_parameters": YARN}),
    "qwen3 moe": Family("Qwen3 30B-A3B, Qwen3-Coder 30B", "Qwen3MoeConfig", {**H16, **EXPERTS}),
    "mistral": Family("Mistral 7B, Nemo, Ministral", "MistralConfig", W16),
    "mixtral": Family("Mixtral", "MixtralConfig", EXPERTS),
    "gemma": Family("Gemma 1", "GemmaConfig", H16),
    "gemma2 without cap": Family(
        "Gemma 2 with the soft cap of its logits alone",
        "Gemma2Config",
        {**W16, "attn_logit_softcapping": None, "final_logit_softcapping": 30.0},
    ),
    "gemma2": Family("Gemma 2", "Gemma2Config", W16),
    "gemma3": Family("Gemma 3", "Gemma3TextConfig", W16),
    "gemma4": Family(
        "Gemma 4",
        "Gemma4TextConfig",
        {**W16, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "vaultgemma": Family("VaultGemma", "VaultGemmaConfig", W16),
    "granite": Family("Granite 3", "GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "granite moe": Family("Granite 3 MoE", "GraniteMoeConfig", {**EXPERTS, "logits_scaling": 8.0}),
    "granite hybrid": Family(
        "Granite 4 H",
        "GraniteMoeHybridConfig",
        {**MAMBA, **EXPERTS, "layers_block_type": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
        PADDED,
    ),
    "cohere": Family("Command R", "CohereConfig", {"logit_scale": 0.0625}),
    "cohere2": Family("Command A, R7B", "Cohere2Config", {"logit_scale": 0.0625, "sliding_window": 16}),
    "phi": Family("Phi-1, Phi-2", "PhiConfig"),
    "phi3": Family("Phi-3 mini 4k, Phi-4", "Phi3Config"),
    "phi moe": Family(
        "Phi-3.5 MoE", "PhimoeConfig", {"num_local_experts": 4, "lm_head_bias": True, "sliding_window": None}
    ),
    "olmo": Family("OLMo 1", "OlmoConfig"),
    "olmo2": Family("OLMo 2", "Olmo2Config"),
    "olmo3": Family("OLMo 3", "Olmo3Config", W16),
    "olmoe": Family("OLMoE", "OlmoeConfig", EXPERTS),
    "olmo hybrid": Family("OLMo Hybrid", "OlmoHybridConfig", {**DELTA, "linear_num_key_heads": 4}, PADDED),
    "glm": Family("GLM-4 9B", "GlmConfig", H16),
    "glm4": Family("GLM-4 0414", "Glm4Config", H16),
    "glm4 moe": Family("GLM-4.5, 4.6, 4.7", "Glm4MoeConfig", {**H16, **LATENT}),
    "glm dsa": Family("GLM-5, 5.1", "GlmMoeDsaConfig", SPARSE, SLOW),
    "deepseek v3": Family("DeepSeek V3, R1; Kimi K2; GLM-4.7-Flash", "DeepseekV3Config", LATENT),
    "deepseek v3.2": Family("DeepSeek V3.2", "DeepseekV32Config", SPARSE, SLOW),
    "gpt-oss": Family("gpt-oss 20B, 120B", "GptOssConfig", {**W16, "num_local_experts": 4}),
    "mimo": Family("MiMo-V2-Flash", "MiMoV2FlashConfig", H16),
    "qwen3-next": Family(
        "Qwen3-Next, Qwen3-Coder-Next",
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
        PADDED,
    ),
    "qwen3.5": Family("Qwen3.5, Qwen3.6", "Qwen3_5TextConfig", DELTA, PADDED),
    "minimax": Family("MiniMax-Text-01, M1", "MiniMaxConfig", {**HALF_LINEAR, **EXPERTS}, PADDED),
    "minimax m2": Family("MiniMax M2, M2.5", "MiniMaxM2Config", {**H16, **EXPERTS}),
    "nemotron": Family("Nemotron-4, Minitron", "NemotronConfig"),
    "nemotron h": Family(
        "Nemotron-H, Nemotron 3",
        "NemotronHConfig",
        {
            **H16,
            "layers_block_type": ["mamba", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
        PADDED,
    ),
    "bamba": Family("Bamba", "BambaConfig", {**MAMBA, "attn_layer_indices": [1, 3]}, PADDED),
    "jamba": Family(
        "Jamba",
        "JambaConfig",
        {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        PADDED,
    ),
    "falcon h1": Family("Falcon-H1", "FalconH1Config", {**MAMBA, **H16, "mamba_d_ssm": 128}, PADDED),
    "recurrent gemma": Family(
        "RecurrentGemma",
        "RecurrentGemmaConfig",
        {**H16, "lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
        PADDED,
    ),
    "lfm2": Family(
        "LFM2",
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "block_ff_dim": 96,
            "block_auto_adjust_ff_dim": False,
        },
        PADDED,
    ),
    "llama4": Family(
        "Llama 4",
        "Llama4TextConfig",
        {
            **H16,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
        },
        SLOW,
    ),
    "smollm3": Family("SmolLM3", "SmolLM3Config"),
    "seed-oss": Family("Seed-OSS", "SeedOssConfig", H16),
    "ernie": Family("ERNIE 4.5", "Ernie4_5Config", H16),
    "hunyuan": Family("Hunyuan dense", "HunYuanDenseV1Config", H16),
    "exaone4": Family("EXAONE 4", "Exaone4Config", {"sliding_window": 16}),
    "apertus": Family("Apertus", "ApertusConfig"),
    "arcee": Family("Arcee", "ArceeConfig"),
    "afmoe": Family("Trinity", "AfmoeConfig", {**W16, **EXPERTS}),
    "helium": Family("Helium", "HeliumConfig", H16),
    "starcoder2": Family("StarCoder2", "Starcoder2Config", {"sliding_window": None}),
    "stablelm": Family("StableLM", "StableLmConfig"),
    "gpt-neox": Family("Pythia, GPT-NeoX", "GPTNeoXConfig"),
    "diffllama": Family("DiffLlama", "DiffLlamaConfig", {}, SLOW),
    "doge": Family("Doge", "DogeConfig", {}, SLOW),
    "longrope": Family(
        "Phi-3.5, Phi-4-mini: up to the original length",
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 128,
                "factor": 2.0,
            },
        },
    ),
    "xglm": Family("XGLM", "XGLMConfig", {"ffn_dim": 96, "d_model": 64, "num_layers": 4}, "do not call"),
    "gpt2": Family("GPT-2", "GPT2Config", {"n_embd": 64, "n_layer": 4, "n_head": 4}, "has no list of layers"),
    "bloom": Family("Bloom", "BloomConfig", {"n_layer": 4, "n_head": 4}, "target.name"),
}


def make_family(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a random checkpoint of a family; its biases and norms differ from 0 and 1."""
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**SIZES, **family.changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.3 if parameter.dim() == 1 else 0.1)
    model.save_pretrained(directory)
    return directory
