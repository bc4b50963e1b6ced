"""First weights of a drafter that are the target's own: it starts where the captured states end.

The drafter reads states of the target's layers and answers through the target's lm_head; what the target itself puts
between the two are its layers behind the last captured one and its final norm. So `fc` starts as "the last captured
state", `hidden_norm` as the norm in front of the next layer, the drafter's layers as the layers behind it (the last
ones, where the drafter has more), `norm` as the final norm. In the layer right behind the capture, values of the
context are then the target's own, and keys but for the head norm that a drafter adds. What has another shape, or no
counterpart (biases), keeps its random weights; a target that rotates neighbouring channels is a worse start, no
error. What it gives: docs/experiments.md. Other first weights: `setup.build_drafter`.
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


def empty_model(target_config: Any, *, trust_remote_code: bool) -> Any:
    """The target's modules without a weight: names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(target_config, trust_remote_code=trust_remote_code)


def stored_tensors(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the names that the checkpoint has, with or without their first part (a checkpoint of the model below the
    head says `layers.0` for `model.layers.0`); nothing else of it is read."""
    wanted = set(names)
    known = {name.partition(".")[2]: name for name in wanted} | {name: name for name in wanted}
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {known[key]: tensors.get_tensor(key) for key in tensors.keys() if key in known}  # noqa: SIM118
    return found


PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # not what a quantised checkpoint stores


@torch.no_grad()
def start_from_target(drafter: DFlashDrafter, directory: Path, model: Any) -> None:
    """Copy from the checkpoint in `directory`; every rank reads the same files, whether it holds the target or not.

    Args:
        model: of `empty_model`.

    Raises:
        UserError: the drafter has other heads than the target, its layers have one projection for all of q, k and v,
            or the checkpoint lacks a tensor or is quantised.
    """
    check_heads(drafter, model)
    pairs = counterparts(drafter, model)
    names = {id(p): name for name, p in model.named_parameters()}
    stored = stored_tensors(directory, (names[id(theirs)] for _, theirs, _ in pairs))
    for ours, theirs, offset in pairs:
        name = names[id(theirs)]
        if name not in stored or stored[name].dtype not in PLAIN:
            kind = str(stored[name].dtype).removeprefix("torch.") if name in stored else "not there"
            raise UserError(
                f"training.first_weights: 'target' is not allowed, {name} in {directory} is {kind}; "
                f"allowed: random, or a checkpoint with {', '.join(str(d).removeprefix('torch.') for d in PLAIN)}"
            )
        ours.copy_(stored[name].float() + offset)
    width = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:].fill_diagonal_(1.0)


def check_heads(drafter: DFlashDrafter, model: Any) -> None:
    """Weights of attention mean something only for heads of the same number and width."""
    config, shape = model.config.get_text_config(), drafter.shape
    target = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }
    for name, theirs in target.items():
        if getattr(shape, name) != theirs:
            raise UserError(
                f"training.first_weights: 'target' is not allowed with drafter.{name} {getattr(shape, name)}, the "
                f"target has {theirs}; allowed: random, or a drafter of the target's own heads"
            )


def counterparts(drafter: DFlashDrafter, model: Any) -> list[tuple[Tensor, Tensor, float]]:
    """(ours, the target's, what to add to it) of the same shape.

    30 target layers of which 27 is the last captured: one drafter layer starts as layer 28, two as 28 and 29, five as
    25 to 29.
    """
    decoder, behind = model.get_decoder(), drafter.shape.target_layer_ids[-1] + 1
    first = max(0, min(behind, len(decoder.layers) - len(drafter.layers)))
    modules = [*zip(drafter.layers, decoder.layers[first:])]
    modules.append((drafter.norm, getattr(decoder, "norm", None)))
    if behind < len(decoder.layers):
        modules.append((drafter.hidden_norm, getattr(decoder.layers[behind], "input_layernorm", None)))
    found: list[tuple[Tensor, Tensor, float]] = []
    for ours, theirs in modules:
        if theirs is None:
            continue
        parts = dict(theirs.named_modules())
        for name, parameter in ours.named_parameters():
            module, _, leaf = name.rpartition(".")
            if module == "post_attention_layernorm" and hasattr(theirs, "post_feedforward_layernorm"):
                continue  # there it norms what attention gives, not what the MLP gets
            other = getattr(parts.get(module), leaf, None)
            if isinstance(other, nn.Parameter) and other.shape == parameter.shape:
                found.append((parameter, other, offset_of(parts[module])))
    if not any(ours is drafter.get_parameter("layers.0.self_attn.q_proj.weight") for ours, _, _ in found):
        raise UserError(
            f"training.first_weights: 'target' is not allowed, layers of {model.config.model_type} have no q_proj of "
            "their own; allowed: random"
        )
    return found


def offset_of(module: nn.Module) -> float:
    """What a norm adds to its stored weight: 1 in Gemma's, 0 in all others and in linear maps."""
    width = module.get_parameter("weight").numel()
    if module.get_parameter("weight").dim() != 1:
        return 0.0
    probe: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    for tensor in (*probe.parameters(), *probe.buffers()):
        tensor.data.zero_()
    signs = torch.tensor([1.0, -1.0]).repeat(width)[:width]  # their mean is 0: some norms subtract it
    return float(probe(signs[None]).abs().max() > 0.5)
