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
) -> Any:
    """Load a causal language model, frozen and in evaluation mode; arguments as in `Target.load`.

    Raises:
        UserError: transformers cannot load it, or a package that `device_map` needs is missing.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
    if device_map and devices:
        placement["max_memory"] = {i: torch.cuda.mem_get_info(i)[0] for i in devices}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            **placement,
        )
    except ImportError as error:
        raise UserError(
            f"target.device_map: {device_map!r} needs a package that is missing: {error}"
        ) from error
    except Exception as error:
        # A size that does not fit, a damaged file: each part of transformers raises its own kinds.
        raise UserError(
            f"target.name: {str(directory)!r} does not load as a causal language model: {one_line(error)}"
        ) from error
    if device_map is None:
        model.to(device=torch.device(device))
    model.eval().requires_grad_(False)
    return model
