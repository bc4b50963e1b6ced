"""Speed of a drafter in a serving engine (vLLM), for an evaluation with `evaluation.engine: vllm`.

The engine is that of the serve check, in its own environment. It decodes the prompts of the evaluation's
first turns greedily, without and with the drafter, one at a time and in batches: four starts of the engine.
Steps and acceptance stay those of our evaluator; `serve-check` compares the two.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from dflash_core.decoding.evaluation_inputs import EvaluationJob
from dflash_core.serving.check import engine_counts
from dflash_core.serving.engine import run_engine

FIELD = "evaluation.engine_python"


def engine_speeds(job: EvaluationJob, directory: Path) -> dict[str, Any]:
    """Return version, speeds and differences of the engine's outputs, as JSON types.

    Args:
        directory: for requests, answers and logs of the engine.

    Raises:
        UserError: there is no engine, or it failed.
    """
    import torch

    from dflash_core.data.chat import load_tokenizer
    from dflash_core.decoding.prompt_sets import PromptSets, spread
    from dflash_core.drafter.export import load_drafter
    from dflash_core.target.compute_dtype import dtype_name, resolve_dtype
    from dflash_core.target.end_ids import ends_unknown_to_engines
    from dflash_core.target.target import Target

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    inputs, settings = job.inputs, job.settings
    python = Path(settings.engine_python).absolute()
    drafter = load_drafter(inputs.drafter_directory)
    sets = PromptSets(list(job.set_names), settings.num_prompts, inputs)
    prompts = [list(prompt.token_ids) for prompt in sets.first()[1]]
    tokenizer = load_tokenizer(inputs.target_directory, trust_remote_code=inputs.trust_remote_code)
    dtype = dtype_name(resolve_dtype(settings.compute_dtype))
    request = {
        "target": inputs.target_directory,
        "drafter": inputs.drafter_directory,
        "block_size": drafter.shape.block_size,
        "dtype": dtype,
        "max_new_tokens": settings.max_new_tokens,
        "stop_token_ids": list(ends_unknown_to_engines(inputs.target_directory, tokenizer, inputs.data)[0]),
    }
    few = [prompts[i] for i in spread(len(prompts), settings.num_single_prompts)]
    passes = {"one_at_a_time": (few, 1)}
    if settings.batch_size > 1:
        passes["batched"] = (prompts, settings.batch_size)
    answers = {name: _answers(python, request, *asked, directory, name) for name, asked in passes.items()}
    # Only now, so that on a GPU it does not take the engine's memory.
    target = Target.load(
        inputs.target_directory,
        layer_ids=drafter.shape.target_layer_ids,
        compute_dtype=settings.compute_dtype,
        trust_remote_code=inputs.trust_remote_code,
    )
    return {
        "name": "vLLM",
        "version": answers["one_at_a_time"]["plain"]["version"],
        "dtype": dtype,
        **{
            name: pass_figures(target, asked, answers[name], num_rows)
            for name, (asked, num_rows) in passes.items()
        },
    }


def _answers(
    python: Path,
    request: dict[str, Any],
    prompts: list[list[int]],
    num_rows: int,
    directory: Path,
    name: str,
) -> dict[str, dict[str, Any]]:
    """Return the engine's answers without and with the drafter."""
    requests = {"plain": {**request, "drafter": None}, "speculative": request}
    answers = {}
    for kind, asked in requests.items():
        print(f"evaluation: vLLM, {name}, {kind}: {len(prompts)} prompts", flush=True)
        asked = {**asked, "prompts": prompts, "max_num_seqs": num_rows}
        answers[kind] = run_engine(python, asked, directory, f"{name}-{kind}", field=FIELD)
    return answers


def pass_figures(
    target: Any, prompts: list[list[int]], answers: dict[str, dict[str, Any]], num_rows: int
) -> dict[str, Any]:
    """Return the speeds of one pass, its acceptance by the engine's metrics, and whether output is equal."""
    from dflash_core.serving.replay import engine_divergences

    divergences = engine_divergences(target, prompts, answers["plain"], answers["speculative"])
    tokens = {kind: sum(map(len, answer["token_ids"])) for kind, answer in answers.items()}
    speeds = {kind: tokens[kind] / answers[kind]["seconds"] for kind in answers}
    return {
        "batch_size": num_rows,
        "prompts": len(prompts),
        "prompts_equal": len(prompts) - len(divergences),
        "near_ties": sum(divergence["near_tie"] for divergence in divergences),
        "lossless": all(divergence["near_tie"] for divergence in divergences),
        "acceptance_length": engine_counts(answers["speculative"]).engine_acceptance_length,
        "speedup": speeds["speculative"] / speeds["plain"],
        # Each side has a process of its own: nothing is in turns.
        "speedup_interval": None,
        **{f"{kind}_tokens_per_second": speed for kind, speed in speeds.items()},
        **{f"{kind}_tokens": count for kind, count in tokens.items()},
        **{f"{kind}_seconds": answers[kind]["seconds"] for kind in answers},
    }
