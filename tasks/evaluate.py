"""Stage `evaluate`: real speculative decoding of prompts the drafter has not seen, next to plain decoding.

It reruns when the drafter, the target, a prompt file (or the data set), the chat template or a setting of
`evaluation` changes. Price: every prompt is decoded twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, EvaluationConfig, from_dict, plain_name
from dflash_core.decoding.evaluation_inputs import VALIDATION_SET, EvaluationInputs
from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE
from dflash_core.errors import UserError
from dflash_core.files import content_digest
from tasks.storage.file_digests import FileDigests
from tasks.storage.stages import stage


def prompt_set_digests(
    config: EvaluationConfig, dataset_digest: str | None, digests: FileDigests
) -> list[dict[str, str]]:
    """Return name and digest of each prompt set: of the prompt files, or of the data set if none are named.

    Raises:
        UserError: two files with the same name.
    """
    if not config.prompts:
        assert dataset_digest is not None
        return [{"name": VALIDATION_SET, "digest": dataset_digest}]
    paths = [Path(name).expanduser() for name in config.prompts]
    sets = [{"name": _set_name(path), "digest": digests.of(path)} for path in paths]
    names = [prompt_set["name"] for prompt_set in sets]
    if len(set(names)) != len(names):
        raise UserError(f"evaluation.prompts: {names} is not allowed; allowed: files of different names")
    return sets


@stage(
    "evaluate",
    version=9,
    sources=(
        "dflash_core.decoding.evaluate",
        "dflash_core.decoding.prompt_sets",
        "dflash_core.drafter.export",
    ),
    key_only=("drafter_digest", "target_fingerprint", "prompt_rules"),
    locations=("where",),
    # A measurement: figures that are compared come from the same versions.
    libraries=("torch", "transformers", "tokenizers", "jinja2"),
)
def evaluate_drafter(
    out: Path,
    *,
    prompt_sets: list[dict[str, str]],
    chat_template_digest: str | None,
    num_prompts: int,
    max_new_tokens: int,
    compute_dtype: str,
    drafter_dtype: str,
    temperature: float,
    batch_size: int,
    where: dict[str, Any],
) -> dict[str, Any]:
    """Write evaluation.json, records.jsonl (one record per prompt) and the plot of acceptance by position.

    Args:
        where: `EvaluationInputs` as JSON types.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from dflash_core.data.chat import load_tokenizer
    from dflash_core.decoding.evaluate import decode_all
    from dflash_core.decoding.int8 import as_decoded
    from dflash_core.decoding.prompt_sets import PromptSets
    from dflash_core.decoding.sampling import Sampling
    from dflash_core.drafter.export import load_drafter
    from dflash_core.target.target import Target
    from tasks.reporting import plots

    disable_progress_bar()
    inputs: EvaluationInputs = from_dict(EvaluationInputs, where)
    device = "cuda" if torch.cuda.is_available() and inputs.device != "cpu" else "cpu"
    drafter = load_drafter(inputs.drafter_directory, device=device)
    target = Target.load(
        inputs.target_directory,
        layer_ids=drafter.shape.target_layer_ids,
        device=device,
        compute_dtype=compute_dtype,
        trust_remote_code=inputs.trust_remote_code,
        device_map=inputs.device_map,
    )
    tokenizer = load_tokenizer(inputs.target_directory, trust_remote_code=inputs.trust_remote_code)
    target.end_answers(tokenizer, inputs.data)
    sets = PromptSets([prompt_set["name"] for prompt_set in prompt_sets], num_prompts, inputs)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, batch_size=batch_size)
    result = decode_all(target, as_decoded(drafter, target, drafter_dtype), sets, sampling)
    report = result.report()
    report["prompt_sets"] = prompt_sets
    report["drafter_dtype"] = drafter_dtype if drafter_dtype == "int8" else report["compute_dtype"]
    report["target_mode"] = target.mode.describe()
    # null: the target's own template, without arguments
    report["chat_template_digest"] = chat_template_digest
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    with (out / "records.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in result.records())
    plots.acceptance_by_position(
        out / "acceptance.png",
        {name: figures["acceptance_by_position"] for name, figures in report["sets"].items()},
    )
    return {"evaluation": report}


def evaluation_key_inputs(
    config: EvaluationConfig,
    *,
    drafter_directory: Path,
    target_fingerprint: str,
    sets: list[dict[str, str]],
    data: DataConfig,
    digests: FileDigests,
) -> dict[str, Any]:
    """Return the inputs of the stage that decide its result.

    Args:
        data: the rules by which prompt files are read, and its settings of the chat template, which renders
            prompts and defines where answers end.

    Raises:
        UserError: the directory holds no exported drafter.
    """
    files = [drafter_directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    if not all(path.is_file() for path in files):
        raise UserError(
            f"drafter: {str(drafter_directory)!r} holds no exported drafter; allowed: a run or its drafter/"
        )
    settings = asdict(config)
    del settings["prompts"]
    return {
        "drafter_digest": " ".join(digests.of(path) for path in files),
        "target_fingerprint": target_fingerprint,
        "prompt_sets": sets,
        "chat_template_digest": _template_digest(data, digests),
        "prompt_rules": {"columns": data.columns, "roles": data.roles} if config.prompts else None,
        **settings,
    }


def _template_digest(data: DataConfig, digests: FileDigests) -> str | None:
    """Return the digest of what renders prompts besides the target's own template; None where that is all."""
    own = digests.of(Path(data.chat_template)) if data.chat_template else None
    if not data.template_arguments and data.template_date == DataConfig.template_date:
        return own
    return content_digest([own, data.template_arguments, data.template_date])


def _set_name(path: Path) -> str:
    """Return the name of a prompt set: its file's name up to the first dot."""
    return plain_name(path.name.split(".")[0], "evaluation.prompts")
