"""Locations and devices of an evaluation.

Imports nothing heavy, because a flow builds it before it knows whether anything has to run.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.config import DataConfig, EvaluationConfig

VALIDATION_SET = "validation"  # name of the prompt set that is taken from the validation samples


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs:
    """Locations of the inputs of an evaluation, and its devices; none of them decides the result.

    Between tasks it travels as JSON types: `to_dict(inputs)` and `from_dict(EvaluationInputs, values)`.
    """

    target_directory: str
    # An exported drafter.
    drafter_directory: str
    # Prompt files, in the order of the prompt sets; empty: prompts of the validation samples in `shards`.
    prompt_paths: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    data: DataConfig = DataConfig()
    trust_remote_code: bool = False
    # As in the settings `target.device_map` and `training.device`.
    device_map: str | None = None
    device: str = "auto"
    # As in the setting `evaluation.num_ranks`.
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """An evaluation: what is read, and what decides the result."""

    inputs: EvaluationInputs
    # Name of each prompt set, in the order of `inputs.prompt_paths`.
    set_names: tuple[str, ...]
    settings: EvaluationConfig
