"""Task `serve-check`: a drafter inside a real serving engine (vLLM), compared with our evaluator.

`flows/serve_check.py` describes the check. Price: the engine decodes all prompts twice and a quarter of them
a third time; our evaluator then replays its output.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from dflash_core.config import EvaluationConfig, RunConfig, from_dict
from dflash_core.decoding.evaluation_inputs import EvaluationInputs
from dflash_core.files import write_json
from dflash_core.redaction import redacted_exceptions
from dflash_core.serving.check import check_result
from dflash_core.serving.engine import SCRIPT, engine_version, run_engine, shifted_copy
from tasks import report
from tasks.reporting import mlflow_client, serve_check_tables
from tasks.reporting import prefect_artifacts as artifacts

if TYPE_CHECKING:
    from dflash_core.drafter.drafter import DFlashDrafter

RESULT = "serve_check.json"
# The control decodes one prompt in so many: it is so far off that a part shows it.
CONTROL_SHARE = 4


class ServeCheckFailed(Exception):  # noqa: N818 (an outcome, not a programming error)
    """Engine and evaluator disagree, or a control that has to fail did not."""


@task(name="serve-check", task_run_name="serve-check", cache_policy=NO_CACHE, persist_result=False)
@redacted_exceptions()
def check_engine(
    config: dict[str, Any],
    *,
    inputs: dict[str, Any],
    out: str,
    run_directory: str | None,
    identity: dict[str, str],
    prompt_set_names: list[str],
    python: str,
    dtype: str,
    max_num_seqs: int,
    control: bool,
) -> dict[str, Any]:
    """Run the engine, replay its output and compare; write serve_check.json and serve_check.md into `out`.

    Args:
        inputs: `EvaluationInputs` as JSON types.
        run_directory: of the drafter's run, whose report gets the result; None for a drafter without a run.
        identity: digests of drafter and target, because their paths do not identify them.

    Raises:
        UserError: no engine, or it failed.
        ServeCheckFailed: after everything is written.
    """
    from dflash_core.data.chat import load_tokenizer
    from dflash_core.decoding.prompt_sets import PromptSets
    from dflash_core.drafter.export import load_drafter
    from dflash_core.target.compute_dtype import dtype_name, resolve_dtype
    from dflash_core.target.end_ids import ends_unknown_to_engines

    settings: RunConfig = from_dict(RunConfig, config)
    places: EvaluationInputs = from_dict(EvaluationInputs, inputs)
    evaluation, environment = settings.evaluation, Path(python).absolute()
    version = engine_version(environment)
    drafter = load_drafter(places.drafter_directory)
    sets = PromptSets(prompt_set_names, evaluation.num_prompts, places)
    prompts = [list(prompt.token_ids) for prompt in sets.first()[1]]
    tokenizer = load_tokenizer(places.target_directory, trust_remote_code=places.trust_remote_code)
    request = {
        "target": places.target_directory,
        "drafter": None,
        "block_size": drafter.shape.block_size,
        "dtype": dtype_name(resolve_dtype(dtype)),
        "prompts": prompts,
        "max_new_tokens": evaluation.max_new_tokens,
        "max_num_seqs": max_num_seqs,
        "stop_token_ids": list(ends_unknown_to_engines(places.target_directory, tokenizer, places.data)[0]),
        "identity": {**identity, "engine": version, "script": SCRIPT.read_text(encoding="utf-8")},
    }
    drafter_directory = Path(places.drafter_directory)
    answers = _run_engine(environment, request, drafter_directory, Path(out), control=control)
    comparisons, divergences = _compare(drafter, prompts, answers, places, evaluation)
    result = check_result(
        answers, comparisons, divergences, request, evaluator_dtype=evaluation.compute_dtype
    )
    _publish(result, settings, Path(out), run_directory)
    if not result["passed"]:
        raise ServeCheckFailed(f"{'; '.join(result['failures'])}: see {Path(out) / 'serve_check.md'}")
    return result


def _run_engine(
    python: Path, request: dict[str, Any], drafter: Path, out: Path, *, control: bool
) -> dict[str, dict[str, Any]]:
    """Return the engine's answers without the drafter, with it and, where wanted, with its layers one off."""
    directory = out / "serve_check"
    directory.mkdir(parents=True, exist_ok=True)
    prompts = request["prompts"]
    requests = {"plain": request, "speculative": {**request, "drafter": str(drafter)}}
    if control:
        requests["control"] = {
            **request,
            "drafter": str(shifted_copy(drafter, directory / "shifted-drafter")),
            "prompts": prompts[: max(1, len(prompts) // CONTROL_SHARE)],
        }
    answers = {}
    for name, asked in requests.items():
        get_run_logger().info(
            "engine, %s: %d prompts, log %s", name, len(asked["prompts"]), directory / f"{name}.log"
        )
        answers[name] = run_engine(python, asked, directory, name)
    return answers


def _compare(
    drafter: DFlashDrafter,
    prompts: list[list[int]],
    answers: dict[str, dict[str, Any]],
    places: EvaluationInputs,
    evaluation: EvaluationConfig,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the comparison of each answer with its replay, and the divergences of the greedy outputs."""
    from dflash_core.serving.replay import compare_with_replay, engine_divergences
    from dflash_core.target.target import Target

    target = Target.load(
        places.target_directory,
        layer_ids=drafter.shape.target_layer_ids,
        compute_dtype=evaluation.compute_dtype,
        trust_remote_code=places.trust_remote_code,
    )
    drafter.to(target.compute_dtype)
    comparisons = {}
    for name, answer in answers.items():
        if name != "plain":
            started = time.perf_counter()
            comparisons[name] = compare_with_replay(
                target, drafter, prompts, answer, batch_size=evaluation.batch_size
            )
            get_run_logger().info("replay, %s: %.0f s", name, time.perf_counter() - started)
    return comparisons, engine_divergences(target, prompts, answers["plain"], answers["speculative"])


def _publish(result: dict[str, Any], config: RunConfig, out: Path, run_directory: str | None) -> None:
    """Write the result into the directory, the run's report, MLflow and Prefect."""
    text = serve_check_tables.to_markdown(result)
    write_json(out / RESULT, result)
    (out / "serve_check.md").write_text(text, encoding="utf-8")
    create_markdown_artifact(
        text, key=f"serve-check-{artifacts.slug(config.deployment)}", description="engine against evaluator"
    )
    if run_directory is not None:
        report.add_serve_check(Path(run_directory), result)
    mlflow_client.log_summary(
        config,
        mlflow_client.run_of_directory(config, out, f"serve-check {config.deployment}"),
        metrics=serve_check_tables.mlflow_metrics(result),
        tags={"serve_check": "passed" if result["passed"] else "failed"},
        artifacts=[(out / RESULT, None), (out / "serve_check.md", None)],
    )
