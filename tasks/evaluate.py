"""Stage `evaluate`: real speculative decoding of prompts that the drafter never saw, against the target's
own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, EvaluationConfig, UserError
from tasks.stages import FileDigests, stage

VALIDATION_SET = "validation"


def prompt_sets(config: EvaluationConfig, dataset_digest: str, digests: FileDigests) -> list[dict[str, str]]:
    """Name and digest of each prompt set: the files that are named, else the prompts of the validation
    samples.

    Raises:
        UserError: two files of one name.
    """
    if not config.prompts:
        return [{"name": VALIDATION_SET, "digest": dataset_digest}]
    found = []
    for name in config.prompts:
        path = Path(name).expanduser()
        found.append({"name": path.name.split(".")[0], "digest": digests.of(path)})
    names = [prompt_set["name"] for prompt_set in found]
    if len(set(names)) != len(names):
        raise UserError(f"evaluation.prompts: {names} is not allowed; allowed: files of different names")
    return found


def read_messages(row: Any, where: str) -> list[dict[str, Any]]:
    """The conversation that a prompt row asks the model to continue.

    A row holds `messages` (an answer at the end is left off), `turns` (the first is asked), `prompt` or
    `question`.
    """
    if isinstance(row, dict):
        messages = row.get("messages")
        if isinstance(messages, list) and messages:
            while messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]
            if messages:
                return messages
        turns = row.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else row.get("prompt") or row.get("question")
        if isinstance(text, str) and text.strip():
            return [{"role": "user", "content": text}]
    raise UserError(f"{where}: no prompt; allowed: messages, turns, prompt or question")


def read_prompt_file(path: Path, limit: int) -> Iterator[tuple[list[dict[str, Any]], str | None]]:
    """Conversations and categories of the first `limit` rows of a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        count = 0
        for number, line in enumerate(lines, start=1):
            if count == limit:
                return
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"evaluation.prompts: {path} line {number}: not JSON ({error.msg})"
                ) from error
            category = row.get("category") if isinstance(row, dict) else None
            yield read_messages(row, f"evaluation.prompts: {path} line {number}"), category
            count += 1
    if count == 0:
        raise UserError(f"evaluation.prompts: {path} holds no prompt; allowed: at least one line")


def validation_prompts(shards: list[str], data: DataConfig, limit: int) -> list[tuple[int, ...]]:
    """Tokens before the first supervised one of the first `limit` validation samples by content digest."""
    from dflash_core.data.store import TokenStore

    store = TokenStore.open(
        shards, validation_share=data.validation_share, min_validation_samples=data.min_validation_samples
    )
    ordered = sorted((store.sample_id(int(row)), int(row)) for row in store.validation_indices)
    prompts = []
    for _, row in ordered:
        first = int(store.loss_mask(row).argmax())
        if first > 0:
            prompts.append(tuple(store.token_ids(row)[:first].tolist()))
        if len(prompts) == limit:
            break
    if not prompts:
        raise UserError(
            "evaluation.prompts: there are no validation samples to take prompts from; allowed: prompt "
            f"files, or a data.validation_share above {data.validation_share}"
        )
    return prompts


def _read_prompts(prompt_sets: list[dict[str, str]], num_prompts: int, where: dict[str, Any]) -> list[Any]:
    from dflash_core.model.speculate import Prompt

    if prompt_sets[0]["name"] == VALIDATION_SET and not where["prompt_paths"]:
        from dflash_core.config import from_dict

        found = validation_prompts(where["shards"], from_dict(DataConfig, where["data"]), num_prompts)
        return [Prompt(token_ids=ids, prompt_set=VALIDATION_SET) for ids in found]
    from tasks.ingest import load_tokenizer

    tokenizer = load_tokenizer(where["target_directory"], where["trust_remote_code"])
    prompts = []
    for prompt_set, path in zip(prompt_sets, where["prompt_paths"], strict=True):
        for messages, category in read_prompt_file(Path(path), num_prompts):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.append(Prompt(token_ids=tuple(ids), prompt_set=prompt_set["name"], category=category))
    return prompts


@stage(
    "evaluate",
    version=1,
    sources=("dflash_core.model.evaluate", "dflash_core.model.export"),
    locations=("where",),
)
def evaluate_drafter(
    out: Path,
    *,
    drafter_digest: str,
    target_fingerprint: str,
    prompt_sets: list[dict[str, str]],
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

    from dflash_core.model.evaluate import evaluate
    from dflash_core.model.export import load_drafter
    from dflash_core.model.speculate import Sampling
    from dflash_core.model.target import Target
    from tasks import plots

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
    prompts = _read_prompts(prompt_sets, num_prompts, where)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, batch_size=batch_size)
    result = evaluate(target, drafter.to(target.compute_dtype), prompts, sampling)
    report = result.report()
    report["prompt_sets"] = prompt_sets
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
    digests: FileDigests,
) -> dict[str, Any]:
    """What decides the evaluation.

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
        **settings,
    }
