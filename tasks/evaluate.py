"""Stage `evaluate`: real speculative decoding of prompts the drafter has not seen, next to plain decoding.

It reruns when the drafter, the target, a prompt file (or the data set), the chat template or a setting of
`evaluation` changes. Price: every prompt is decoded twice.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import DataConfig, EvaluationConfig, RunConfig, from_dict, plain_name, to_dict
from dflash_core.decoding.evaluation_inputs import VALIDATION_SET, EvaluationInputs, EvaluationJob
from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE
from dflash_core.errors import UserError
from dflash_core.files import content_digest, write_json
from dflash_core.launch.module_ranks import run_ranks
from dflash_core.redaction import redacted_exceptions
from dflash_core.serving.engine import engine_version
from tasks.engine_speed import FIELD, engine_speeds
from tasks.reporting import evaluation_tables, mlflow_client
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting.tables import show
from tasks.storage.file_digests import FileDigests
from tasks.storage.pointers import EvaluationPointer, root_of
from tasks.storage.stages import PUBLISH_SECONDS, RETRY_IO, stage

RECORDS, PAGE = "records.jsonl", "evaluation.md"
# Settings of `evaluation` whose content is part of other inputs, or that decide speed alone.
ELSEWHERE = ("prompts", "columns", "num_ranks", "engine_python")


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
    version=10,
    sources=(
        "dflash_core.decoding.evaluation_run",
        "dflash_core.decoding.prompt_sets",
        "dflash_core.drafter.export",
    ),
    key_only=("drafter_digest", "target_fingerprint", "prompt_rules", "engine_version"),
    locations=("where", "engine_python"),
    # A measurement: figures that are compared come from the same versions.
    libraries=("torch", "transformers", "tokenizers", "jinja2"),
)
def evaluate_drafter(
    out: Path,
    *,
    prompt_sets: list[dict[str, str]],
    chat_template_digest: str | None,
    settings: dict[str, Any],
    engine_python: str,
    where: dict[str, Any],
) -> dict[str, Any]:
    """Write evaluation.json, evaluation.md with its plot, and records.jsonl, one record per prompt.

    Args:
        settings: fields of `EvaluationConfig` that decide the result.
        where: `EvaluationInputs` as JSON types.
    """
    from tasks.reporting import plots

    job = EvaluationJob(
        inputs=from_dict(EvaluationInputs, where),
        set_names=tuple(prompt_set["name"] for prompt_set in prompt_sets),
        settings=from_dict(EvaluationConfig, {**settings, "engine_python": engine_python}),
    )
    result = run_job(job)
    report = result["report"]
    report["engine"] = None
    if job.settings.engine == "vllm":
        logs = out / "engine"
        logs.mkdir()
        report["engine"] = engine_speeds(job, logs)
    report["prompt_sets"] = prompt_sets
    # null: the target's own template, without arguments
    report["chat_template_digest"] = chat_template_digest
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    with (out / RECORDS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in result["records"])
    plots.acceptance_by_position(
        out / "acceptance.png",
        {name: figures["acceptance_by_position"] for name, figures in report["sets"].items()},
    )
    text = f"{evaluation_tables.to_markdown(report, '# Evaluation')}\n\n![acceptance](acceptance.png)\n"
    (out / PAGE).write_text(text, encoding="utf-8")
    print(f"evaluation: {evaluation_tables.headline(report)}", flush=True)
    return {"evaluation": report}


def run_job(job: EvaluationJob) -> dict[str, Any]:
    """Evaluate in this process, or on the ranks that `evaluation.num_ranks` asks for.

    Raises:
        UserError: a user's mistake, found here or on a rank.
        RuntimeError: a rank ended otherwise; its output has the reason.
    """
    from dflash_core.decoding import evaluation_run

    num_ranks = job.inputs.num_ranks
    if num_ranks == 1:
        return evaluation_run.run_evaluation(job)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as directory:
        path = Path(directory) / "job.json"
        write_json(path, to_dict(job))
        code = run_ranks(evaluation_run.__name__, [str(path)], num_ranks)
        result, error = (path.with_name(name) for name in (evaluation_run.RESULT, evaluation_run.ERROR))
        if code == 0:
            return dict(json.loads(result.read_text(encoding="utf-8")))
        if error.exists():
            raise UserError(error.read_text(encoding="utf-8"))
        raise RuntimeError(f"evaluation: a rank ended with code {code}; its output above has the reason")


@task(
    name="publish-evaluation",
    task_run_name="publish-evaluation",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=PUBLISH_SECONDS,
    **RETRY_IO,
)
@redacted_exceptions()
def publish_evaluation(config: RunConfig, evaluated: EvaluationPointer, drafter: str) -> None:
    """Send an evaluation that is not part of a training to Prefect, and to a run of its own in MLflow."""
    directory = root_of(config) / evaluated["path"]
    page, figures = directory / PAGE, evaluated["evaluation"]
    artifacts.page(
        "evaluation",
        config.deployment,
        page.read_text(encoding="utf-8"),
        directory,
        "evaluation of a drafter",
    )
    mlflow_client.log_summary(
        config,
        mlflow_client.run_of_directory(config, directory, f"evaluate {config.deployment}"),
        metrics={
            "final/acceptance_length": figures["acceptance_length"],
            **evaluation_tables.mlflow_metrics(figures),
        },
        tags={"deployment": config.deployment, "drafter": drafter, "lossless": show(figures["lossless"])},
        artifacts=[(directory / name, None) for name in (PAGE, "evaluation.json", "acceptance.png")],
    )


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
        UserError: the directory holds no exported drafter, or there is no engine that is to be measured.
    """
    files = [drafter_directory / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    if not all(path.is_file() for path in files):
        raise UserError(
            f"drafter: {str(drafter_directory)!r} holds no exported drafter; allowed: a run or its drafter/"
        )
    settings = to_dict(config)
    for name in ELSEWHERE:
        del settings[name]
    return {
        "drafter_digest": " ".join(digests.of(path) for path in files),
        "target_fingerprint": target_fingerprint,
        "prompt_sets": sets,
        "chat_template_digest": _template_digest(data, digests),
        "prompt_rules": {"columns": data.columns, "roles": data.roles} if config.prompts else None,
        "settings": settings,
        "engine_version": _engine_version(config),
        "engine_python": config.engine_python,
    }


def _engine_version(config: EvaluationConfig) -> str | None:
    """Return the version of the engine that is to be measured; None without one."""
    if config.engine == "own":
        return None
    return engine_version(Path(config.engine_python).absolute(), field=FIELD)


def _template_digest(data: DataConfig, digests: FileDigests) -> str | None:
    """Return the digest of what renders prompts besides the target's own template; None where that is all."""
    own = digests.of(Path(data.chat_template)) if data.chat_template else None
    if not data.template_arguments and data.template_date == DataConfig.template_date:
        return own
    return content_digest([own, data.template_arguments, data.template_date])


def _set_name(path: Path) -> str:
    """Return the name of a prompt set: its file's name up to the first dot."""
    return plain_name(path.name.split(".")[0], "evaluation.prompts")
