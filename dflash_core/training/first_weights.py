"""First weights of a drafter that are the target's own: it starts where the captured states end.

The drafter reads states of the target's layers and answers through the target's lm_head; what the target itself puts
between the two are its layers behind the last captured one and its final norm. So `fc` starts as "the last captured
state", `hidden_norm` as the norm in front of the next layer, the drafter's layers as the layers behind it (the last
ones, where the drafter has more), `norm` as the final norm: values of the context are then the target's own, and keys
but for the head norm that a drafter adds. What has another shape, or no counterpart, keeps its random weights. What it
gives: docs/experiments.md. Other first weights: `setup.build_drafter`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dflash_core.config import UserError
from dflash_core.model.drafter import DFlashDrafter


def empty_model(target_config: Any, *, trust_remote_code: bool) -> Any:
    """The target's modules without a weight: names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(target_config, trust_remote_code=trust_remote_code)


def stored_tensors(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the names that the checkpoint has; nothing else of it is read."""
    wanted, found = set(names), {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in wanted & set(tensors.keys())}
    return found


@torch.no_grad()
def start_from_target(drafter: DFlashDrafter, directory: Path, model: Any) -> None:
    """Copy from the checkpoint in `directory`; every rank reads the same files, whether it holds the target or not.

    Args:
        model: of `empty_model`.

    Raises:
        UserError: no query projection of the drafter's shape, the sign that heads differ.
    """
    pairs = counterparts(drafter, model)
    names = {id(p): name for name, p in model.named_parameters()}
    stored = stored_tensors(directory, (names[id(theirs)] for _, theirs, _ in pairs))
    queries = drafter.layers[0].self_attn.q_proj.weight
    copied = set()
    for ours, theirs, offset in pairs:
        if names[id(theirs)] in stored:
            ours.copy_(stored[names[id(theirs)]] + offset)
            copied.add(id(ours))
    if id(queries) not in copied:
        raise UserError(
            f"training.first_weights: 'target' is not allowed, {directory} has no q_proj of {list(queries.shape)}; "
            "allowed: random, or a drafter of the target's own heads"
        )
    width = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:].fill_diagonal_(1.0)


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
    found = []
    for ours, theirs in modules:
        if theirs is None:
            continue
        parts = dict(theirs.named_modules())
        for name, parameter in ours.named_parameters():
            module, _, leaf = name.rpartition(".")
            other = getattr(parts.get(module), leaf, None)
            if isinstance(other, nn.Parameter) and other.shape == parameter.shape:
                found.append((parameter, other, offset_of(parts[module])))
    return found


def offset_of(module: nn.Module) -> float:
    """What a norm adds to its stored weight: 1 in Gemma's, 0 in all others and in linear maps."""
    weight = module.weight
    if weight.dim() != 1:
        return 0.0
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    probe.weight.data.zero_()
    return float(probe(torch.ones(1, len(weight))).abs().max() > 0.5)
