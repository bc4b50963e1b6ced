"""Stage `evaluate`: real speculative decoding of prompts that the drafter never saw, against the target's
own.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_core.config import EvaluationConfig
from dflash_core.errors import UserError
from tasks.storage.file_digests import FileDigests
from tasks.storage.stages import stage

VALIDATION_SET = "validation"


def prompt_sets(
    config: EvaluationConfig, dataset_digest: str | None, digests: FileDigests
) -> list[dict[str, str]]:
    """Name and digest of each prompt set: the files that are named, else the prompts of the validation
    samples of the data set.

    Raises:
        UserError: two files of one name.
    """
    if not config.prompts:
        assert dataset_digest is not None
        return [{"name": VALIDATION_SET, "digest": dataset_digest}]
    found = []
    for name in config.prompts:
        path = Path(name).expanduser()
        found.append({"name": path.name.split(".")[0], "digest": digests.of(path)})
    names = [prompt_set["name"] for prompt_set in found]
    if len(set(names)) != len(names):
        raise UserError(f"evaluation.prompts: {names} is not allowed; allowed: files of different names")
    return found


@stage(
    "evaluate",
    version=7,
    sources=("dflash_core.decoding.evaluate", "dflash_core.drafter.export", "dflash_core.data.prompts"),
    locations=("where",),
)
def evaluate_drafter(
    out: Path,
    *,
    drafter_digest: str,
    target_fingerprint: str,
    prompt_sets: list[dict[str, str]],
    chat_template_digest: str | None,
    num_prompts: int,
    max_new_tokens: int,
    compute_dtype: str,
    temperature: float,
    batch_size: int,
    where: dict[str, Any],
) -> dict[str, Any]:
    """Writes evaluation.json, one record a prompt into records.jsonl, and the plot of acceptance by
    position.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from dflash_core.decoding.speculate import Sampling
    from dflash_core.drafter.export import load_drafter
    from dflash_core.target.target import Target
    from tasks.decoding import PromptSets, decode_all
    from tasks.reporting import plots

    del drafter_digest, target_fingerprint  # the key
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() and where["device"] != "cpu" else "cpu"
    drafter = load_drafter(where["drafter_directory"], device=device)
    target = Target.load(
        where["target_directory"],
        layer_ids=drafter.shape.target_layer_ids,
        device=device,
        compute_dtype=compute_dtype,
        trust_remote_code=where["trust_remote_code"],
        device_map=where["device_map"],
    )
    sets = PromptSets(prompt_sets, num_prompts, where)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, batch_size=batch_size)
    result = decode_all(target, drafter.to(target.compute_dtype), sets, sampling)
    report = result.report()
    report["prompt_sets"] = prompt_sets
    report["chat_template_digest"] = chat_template_digest  # null: the target's own
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    with (out / "records.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in result.records())
    plots.acceptance_by_position(
        out / "acceptance.png",
        {name: found["acceptance_by_position"] for name, found in report["sets"].items()},
    )
    return {"evaluation": report}


def evaluation_inputs(
    config: EvaluationConfig,
    *,
    drafter_directory: Path,
    target_fingerprint: str,
    sets: list[dict[str, str]],
    chat_template: str | None,
    digests: FileDigests,
) -> dict[str, Any]:
    """What decides the evaluation; `chat_template` is `data.chat_template`, which renders prompt files.

    Raises:
        UserError: the directory holds no exported drafter.
    """
    files = [drafter_directory / name for name in ("config.json", "model.safetensors")]
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
        "chat_template_digest": digests.of(Path(chat_template)) if chat_template and config.prompts else None,
        **settings,
    }
