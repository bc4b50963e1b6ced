"""What an exported drafter is worth, in our decoder and in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig, to_dict
from dflash_core.drafter.directory import drafter_directory
from flows.runtime.deployments import EvaluateOptions, FlowOptions, ServeCheckOptions
from flows.steps.common import Dataset, Pointer, check_options, root_of, target_directory
from flows.steps.data import ingest_all, prepare_target
from tasks import evaluate as evaluation
from tasks import serve_check as checking
from tasks.storage import run_directory as runs
from tasks.storage.file_digests import FileDigests


def drafter_and_prompts(config: RunConfig, options: EvaluateOptions) -> tuple[Path, Pointer, Dataset | None]:
    """Return the drafter that the options name, its target, and the data where no prompt files are named.

    Without `drafter_path` it is the drafter of the latest run.

    Raises:
        UserError: there is none.
    """
    check_options(options)
    path = Path(options.drafter_path).expanduser() if options.drafter_path else runs.latest_directory(config)
    directory = drafter_directory(path, field="drafter_path").resolve()
    target_pointer = prepare_target(config, options)
    dataset = None if config.evaluation.prompts else ingest_all(config, options, target_pointer)
    return directory, target_pointer, dataset


def _where(
    config: RunConfig, target_pointer: Pointer, dataset: Dataset | None, drafter_directory: Path
) -> dict[str, Any]:
    """Where an evaluation finds what it reads, and how it computes."""
    return {
        "drafter_directory": str(drafter_directory),
        "target_directory": str(target_directory(config, target_pointer)),
        "trust_remote_code": config.target.trust_remote_code,
        "device_map": config.target.device_map,
        "device": config.training.device,
        "prompt_paths": [str(Path(path).expanduser()) for path in config.evaluation.prompts],
        "shards": dataset.shards if dataset else [],
        "data": to_dict(config.data),
    }


def evaluate(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: Pointer,
    dataset: Dataset | None,
    drafter_directory: Path,
    label: str = "evaluate",
) -> Pointer:
    """Speculative decoding with an exported drafter; the data set may be None where prompt files are named."""
    root, digests = root_of(config), FileDigests(root_of(config))
    inputs = evaluation.evaluation_inputs(
        config.evaluation,
        drafter_directory=drafter_directory,
        target_fingerprint=target_pointer["fingerprint"],
        sets=evaluation.prompt_sets(config.evaluation, dataset.digest if dataset else None, digests),
        chat_template=config.data.chat_template,
        digests=digests,
    )
    digests.save()
    return evaluation.evaluate_drafter(
        root,
        label=label,
        after=[target_pointer],
        refresh="evaluate" in options.refresh,
        **inputs,
        where=_where(config, target_pointer, dataset, drafter_directory),
    )


def serve_check(
    config: RunConfig,
    options: ServeCheckOptions,
    target_pointer: Pointer,
    dataset: Dataset | None,
    drafter_directory: Path,
) -> dict[str, Any]:
    """The drafter in vLLM against our evaluator. Results go into the drafter's run, or beside other drafters'."""
    root, digests = root_of(config), FileDigests(root_of(config))
    sets = evaluation.prompt_sets(config.evaluation, dataset.digest if dataset else None, digests)
    weights, shape = (digests.of(drafter_directory / name) for name in ("model.safetensors", "config.json"))
    digests.save()
    run = drafter_directory.parent
    is_run = runs.read_run(run) is not None
    out = run if is_run else root / "serve-check" / weights[: runs.KEY_CHARACTERS]
    return checking.serve_check(
        to_dict(config),
        where={
            **_where(config, target_pointer, dataset, drafter_directory),
            "out": str(out),
            "run_directory": str(run) if is_run else None,
        },
        identity={"drafter": f"{shape} {weights}", "target": target_pointer["fingerprint"]},
        prompt_sets=sets,
        python=options.python,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        control=options.control,
    )
