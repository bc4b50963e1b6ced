"""The target's embedding and lm_head by the model's own rules: scales, biases and soft caps.

Policy: no rule is known by name alone, since one name means a factor in one family and a divisor in another.
The model's own code is run on a few made-up final states, and the rule is the one that gives its logits:

    logits = cap * tanh(scale * (W h + bias) / cap), or scale * (W h + bias) without a cap.

A model whose logits follow no such rule is rejected. A drafter shares the embedding as the model's module
computes it and the bare weight W, without bias, scale and cap: that is how z-lab's code, vLLM and SGLang run
a drafter, and its own logits need no other scale than the one it learns.

Shape letters: R rows, D width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_core.errors import UserError

# For so few rows, head @ rows.T is up to 4 times faster than rows @ head.T on a CPU.
MAX_TRANSPOSED_ROWS = 256
# Largest logits of the made-up states: with the smaller ones no cap shows, with the larger ones only the cap.
PROBED_LOGITS = (1.0, 30.0, 300.0)
# Parts of the names of settings that may hold a factor or a divisor of the logits.
SCALE_NAMES = ("logit", "lm_head", "output_multiplier")


@dataclass(frozen=True)
class Head:
    """lm_head of the target, frozen, and what the model does to its outputs."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def raw(self, hidden: Tensor) -> Tensor:
        """Return W h for states [..., D]: the logits of a drafter, [..., V]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if hidden.device.type == "cpu" and len(rows) <= MAX_TRANSPOSED_ROWS:
            return (self.weight_VD @ rows.T).T.reshape(*hidden.shape[:-1], -1)
        return torch.nn.functional.linear(hidden, self.weight_VD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's own logits [..., V] of its states after the final norm [..., D]."""
        return self.finish(self.raw(hidden))

    def finish(self, logits: Tensor) -> Tensor:
        """Return what the model makes of W h."""
        if self.bias_V is not None:
            logits = logits + self.bias_V
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def read_head(model: Any, device: torch.device) -> Head:
    """Return the head of a loaded model, on a device.

    Raises:
        UserError: the model's logits do not follow the rule of this module, or cannot be asked for.
    """
    linear = model.get_output_embeddings()
    weight = linear.weight.detach()
    bias = None if getattr(linear, "bias", None) is None else linear.bias.detach()
    states, own = _probe(model, weight)
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.03
    candidates = [
        Head(weight, bias, scale, cap) for cap in _caps(model.config) for scale in _scales(model.config)
    ]
    errors = [_error(head.logits(states), own) for head in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if not errors[best] <= tolerance:
        raise UserError(
            f"target.name: logits of {model.config.model_type} are no scaled and capped product of lm_head "
            f"(off by {errors[best]:.2g} of the largest); allowed: targets with a plain lm_head"
        )
    found = candidates[best]
    moved = None if bias is None else bias.to(device)
    return Head(weight.to(device), moved, found.scale, found.cap)


def embedding_with(module: torch.nn.Embedding, weight: Tensor) -> torch.nn.Embedding:
    """Return a module without weights, as made on the meta device, with a weight.

    Raises:
        UserError: the module computes with other tensors too, whose values are not known.
    """
    filled = copy.deepcopy(module)
    filled.weight = torch.nn.Parameter(weight, requires_grad=False)
    for name, buffer in module.named_buffers():
        # transformers keeps the number behind a scale of an embedding under this name.
        value = getattr(module, f"scalar_{name}", None)
        if value is None or buffer.dim():
            raise UserError(
                f"training.topology: 'split' is not allowed, the embedding of class {type(module).__name__} "
                "is not known without the rest of its model; allowed: colocated"
            )
        setattr(filled, name, torch.tensor(value, device=weight.device))
    return filled


def embedding_table(module: torch.nn.Embedding) -> Tensor:
    """Return what an embedding module gives for every token, [V, D]: the weight where it is the same."""
    weight = module.weight.detach()
    if type(module) is torch.nn.Embedding:
        return weight
    with torch.no_grad():
        table: Tensor = module(torch.arange(len(weight), device=weight.device))
    return weight if torch.equal(table, weight) else table


def _probe(model: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return made-up final states [R, D], and the model's own logits of them [R, V]."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(len(PROBED_LOGITS), weight.shape[1], generator=generator).to(weight)
    largest = (states @ weight.T).abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)
    states = states * (torch.tensor(PROBED_LOGITS)[:, None].to(weight) / largest)
    ids = torch.zeros(1, len(states), dtype=torch.int64, device=weight.device)
    try:
        with torch.no_grad(), _final_states(model, states[None]):
            own: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"target.name: logits of {model.config.model_type} cannot be checked ({error}); allowed: causal "
            "language models whose head reads the last hidden state of their decoder"
        ) from error
    return states, own


@contextmanager
def _final_states(model: Any, states: Tensor) -> Iterator[None]:
    """Let the model's decoder answer with the given final states [1, R, D]."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        """The states; every other output that a head may look at is None."""

        def __getattr__(self, name: str) -> None:
            return None

    class Decoder(torch.nn.Module):
        """A decoder without layers."""

        def forward(self, *args: Any, **kwargs: Any) -> Output:
            return Output(last_hidden_state=states)

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    prefix = next(name for name in (model.base_model_prefix, "model") if name in model._modules)
    original = model._modules[prefix]
    model._modules[prefix] = Decoder()
    try:
        yield
    finally:
        model._modules[prefix] = original


def _scales(config: Any) -> list[float]:
    """Return 1, and every factor that a setting may stand for, as itself and as a divisor."""
    scales = {1.0: None}
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if _is_positive(value) and any(word in name for word in SCALE_NAMES):
                scales |= {float(value): None, 1.0 / value: None}
    return list(scales)


def _caps(config: Any) -> list[float | None]:
    """Return None, and every number that may be a soft cap of the logits."""
    settings = vars(config.get_text_config()).items()
    numbers = [value for name, value in settings if "cap" in name and _is_positive(value)]
    return [None, *dict.fromkeys(float(value) for value in numbers)]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _error(logits: Tensor, own: Tensor) -> float:
    """Return the largest difference of a row's logits as a share of the row's largest."""
    if logits.shape != own.shape:
        return float("inf")
    difference = (logits.double() - own.double()).abs().amax(dim=-1)
    return float((difference / own.double().abs().amax(dim=-1)).max())
