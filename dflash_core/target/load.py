"""Loading the target's model from its local directory, frozen and with our attention.

Policy: nothing is fetched (`local_files_only`), every failure of transformers becomes one message that names
the setting, and the model never builds an attention mask (see `attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_core.errors import UserError, one_line
from dflash_core.target import attention


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    trust_remote_code: bool,
    device_map: str | None,
    devices: Sequence[int],
    eager: bool = False,
) -> Any:
    """Load a causal language model, frozen and in evaluation mode; most arguments as in `Target.load`.

    Args:
        directory, dtype, device, trust_remote_code, device_map, devices: as there.
        eager: keep the model's own attention.

    Raises:
        UserError: transformers cannot load it, a package is missing, or the checkpoint lacks tensors: they
            would be random numbers, other ones in each process.
    """
    attention.register()
    placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
    if device_map and devices:
        placement["max_memory"] = {i: torch.cuda.mem_get_info(i)[0] for i in devices}
    kind = auto_class(load_config(directory, trust_remote_code=trust_remote_code))
    try:
        model, info = kind.from_pretrained(
            str(directory),
            dtype=dtype,
            attn_implementation="eager" if eager else attention.ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **placement,
        )
    except ImportError as error:
        raise UserError(
            f"target.name: {str(directory)!r} needs a package that is missing: {error}"
        ) from error
    except Exception as error:
        # A size that does not fit, a damaged file: each part of transformers raises its own kinds.
        raise UserError(
            f"target.name: {str(directory)!r} does not load as a causal language model: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"target.name: {str(directory)!r} holds no tensor {missing[0]} ({len(missing)} are missing); "
            "allowed: a complete checkpoint"
        )
    if device_map is None:
        model.to(device=torch.device(device))
    model.eval().requires_grad_(False)
    return model


def load_config(directory: str | Path, *, trust_remote_code: bool) -> Any:
    """Load the transformers configuration of a target from its local directory.

    Raises:
        UserError: transformers rejects it, or it needs code that may not run.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # Each part of transformers raises its own kinds.
        raise UserError(f"target.name: {directory}/config.json does not load: {one_line(error)}") from error


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a target of this configuration as a language model.

    A model that also reads images is loaded whole and used as the language model that it contains.

    Raises:
        UserError: transformers has no class for it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        has_own_code = kind.__name__ in (getattr(config, "auto_map", None) or {})
        if has_own_code or type(config) in kind._model_mapping:
            return kind
    raise UserError(
        f"target.name: transformers has no language model for the type {config.model_type!r}; allowed: "
        "causal language models, alone or with an image encoder"
    )


def decoder_of(model: Any) -> Any:
    """Return the decoder of a loaded model: the module with the list of layers.

    Raises:
        UserError: there is none under the usual names.
    """
    base = getattr(model, "model", model.base_model)
    for decoder in (model.get_decoder(), base, getattr(base, "language_model", None)):
        if isinstance(getattr(decoder, "layers", None), torch.nn.ModuleList):
            return decoder
    raise UserError(
        f"target.name: the decoder of {model.config.model_type} has no list of layers; allowed: decoders of "
        "layers that each give one hidden state"
    )
