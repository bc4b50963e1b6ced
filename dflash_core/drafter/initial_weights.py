"""Initial weights of a drafter that are the target's own: it starts where the captured states end.

Policy: the drafter reads states of the target's layers and answers through the target's lm_head; between the
two, the target itself has the layers behind the last captured one and its final norm. So `fc` starts as "the
last captured state", `hidden_norm` as the norm in front of the next layer, the drafter's layers as the layers
behind it (the last ones, where the drafter has more), `norm` as the final norm. In the layer right behind the
capture, values of the context are then the target's own, and so are keys, except for the head norm that a
drafter adds.

Parts with another shape, or without a counterpart (biases), keep their random weights. A target with
interleaved rotary channels also loads, but gives a worse start. The gain: docs/experiments.md. Other initial
weights: `build_drafter`.

Price: the tensors of these layers are read once per rank; nothing else of the checkpoint is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.load import auto_class, decoder_of

# Dtypes that hold plain weights; a quantised checkpoint stores others.
PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def empty_model(target_config: Any, *, trust_remote_code: bool) -> Any:
    """Build the target's modules without weights, for their names and shapes."""
    with torch.device("meta"):
        return auto_class(target_config).from_config(target_config, trust_remote_code=trust_remote_code)


def stored_tensors(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the tensors of these names that the checkpoint has, and nothing else.

    A checkpoint of the model below the head has names without their first part: `layers.0` for
    `model.layers.0`.
    """
    wanted = set(names)
    known = {name.partition(".")[2]: name for name in wanted} | {name: name for name in wanted}
    read: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys()) & known.keys()
            read |= {known[key]: tensors.get_tensor(key) for key in sorted(stored)}
    return read


@torch.no_grad()
def start_from_target(drafter: DFlashDrafter, directory: Path, model: Any) -> None:
    """Copy weights from the checkpoint in `directory`.

    Every rank reads the same files, whether it holds the target or not.

    Args:
        drafter: changed in place.
        directory: of the target.
        model: from `empty_model`.

    Raises:
        UserError: the drafter has other heads than the target, its layers have one projection for all of q, k
            and v, or the checkpoint lacks a tensor or is quantised.
    """
    check_heads(drafter, model)
    pairs = counterparts(drafter, model)
    names = {id(p): name for name, p in model.named_parameters()}
    stored = stored_tensors(directory, (names[id(theirs)] for _, theirs, _ in pairs))
    for ours, theirs, offset in pairs:
        name = names[id(theirs)]
        if name not in stored or stored[name].dtype not in PLAIN:
            state = dtype_name(stored[name].dtype) if name in stored else "missing"
            raise UserError(
                f"training.first_weights: 'target' is not allowed, {name} in {directory} is {state}; "
                f"allowed: random, or a checkpoint with {', '.join(map(dtype_name, PLAIN))}"
            )
        ours.copy_(stored[name].float() + offset)
    width = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:].fill_diagonal_(1.0)


def check_heads(drafter: DFlashDrafter, model: Any) -> None:
    """Check that the drafter's heads have the number and width of the target's: else weights mean nothing.

    Raises:
        UserError: they differ.
    """
    config, shape = model.config.get_text_config(), drafter.shape
    target = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }
    for name, theirs in target.items():
        ours = getattr(shape, name)
        if ours != theirs:
            raise UserError(
                f"training.first_weights: 'target' is not allowed with drafter.{name} {ours}, the target has "
                f"{theirs}; allowed: random, or a drafter with heads like the target's"
            )


def counterparts(drafter: DFlashDrafter, model: Any) -> list[tuple[Tensor, Tensor, float]]:
    """Return (ours, the target's, offset to add to the target's) for parameters of the same shape.

    30 target layers of which 27 is the last captured: one drafter layer starts as layer 28, two as 28 and 29,
    five as 25 to 29.

    Raises:
        UserError: the target's layers have no separate q_proj.
    """
    decoder, behind = decoder_of(model), drafter.shape.target_layer_ids[-1] + 1
    first = max(0, min(behind, len(decoder.layers) - len(drafter.layers)))
    modules = [*zip(drafter.layers, decoder.layers[first:])]
    modules.append((drafter.norm, getattr(decoder, "norm", None)))
    if behind < len(decoder.layers):
        modules.append((drafter.hidden_norm, getattr(decoder.layers[behind], "input_layernorm", None)))
    pairs: list[tuple[Tensor, Tensor, float]] = []
    for ours, theirs in modules:
        if theirs is None:
            continue
        parts = dict(theirs.named_modules())
        for name, parameter in ours.named_parameters():
            module, _, leaf = name.rpartition(".")
            if module == "post_attention_layernorm" and hasattr(theirs, "post_feedforward_layernorm"):
                # In such layers it norms the output of attention, not the input of the MLP.
                continue
            other = getattr(parts.get(module), leaf, None)
            if isinstance(other, nn.Parameter) and other.shape == parameter.shape:
                pairs.append((parameter, other, offset_of(parts[module])))
    if not any(ours is drafter.get_parameter("layers.0.self_attn.q_proj.weight") for ours, _, _ in pairs):
        raise UserError(
            f"training.first_weights: 'target' is not allowed, layers of {model.config.model_type} have no "
            "separate q_proj; allowed: random"
        )
    return pairs


def offset_of(module: nn.Module) -> float:
    """Return what a norm adds to its stored weight: 1 in Gemma's, 0 in all others and in linear maps."""
    width = module.get_parameter("weight").numel()
    if module.get_parameter("weight").dim() != 1:
        return 0.0
    probe: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    for tensor in (*probe.parameters(), *probe.buffers()):
        tensor.data.zero_()
    # The mean of the signs is 0, because some norms subtract it.
    signs = torch.tensor([1.0, -1.0]).repeat(width)[:width]
    return float(probe(signs[None]).abs().max() > 0.5)
