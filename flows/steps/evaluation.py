"""Evaluation of an exported drafter: real decoding here, and the check against vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, RunConfig, to_dict
from dflash_core.decoding.evaluation_inputs import EvaluationInputs
from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE, drafter_directory
from dflash_core.errors import UserError
from flows.runtime.deployments import (
    CompareDraftersOptions,
    EvaluateOptions,
    FlowOptions,
    ServeCheckOptions,
)
from flows.steps.common import check_options
from flows.steps.data import check_target, ingest_all, prepare_target
from tasks import evaluate as evaluation
from tasks import serve_check
from tasks.storage import run_directory as runs
from tasks.storage.file_digests import FileDigests
from tasks.storage.finished_runs import check_drafter
from tasks.storage.live_runs import mark_used
from tasks.storage.pointers import Dataset, EvaluationPointer, TargetPointer, root_of, target_directory


def drafter_and_prompts(
    config: RunConfig, options: EvaluateOptions
) -> tuple[Path, TargetPointer, Dataset | None]:
    """Return the drafter that the options name, its target, and the data set if prompts come from it.

    Without `drafter_path` it is the drafter of the latest run.

    Raises:
        UserError: there is no drafter, or it is not what its run has exported.
    """
    check_options(options)
    path = Path(options.drafter_path).expanduser() if options.drafter_path else runs.latest_directory(config)
    directory = _drafter(config, path, "drafter_path")
    return directory, *_target_and_prompts(config, options)


def drafters_and_prompts(
    config: RunConfig, options: CompareDraftersOptions
) -> tuple[list[Path], TargetPointer, Dataset | None]:
    """Return the drafters to compare, their target, and the data set if prompts come from it.

    Raises:
        UserError: there are fewer than two, or one is named twice.
    """
    check_options(options)
    paths = [Path(path).expanduser() for path in options.drafter_paths]
    if not paths:
        raise UserError(
            "drafter_paths: none is not allowed; allowed: two or more directories of runs or exported "
            "drafters, or one to compare with the latest run"
        )
    if len(paths) == 1:
        paths.insert(0, runs.latest_directory(config))
    directories = [_drafter(config, path, "drafter_paths") for path in paths]
    if len(set(directories)) < len(directories):
        twice = next(directory for directory in directories if directories.count(directory) > 1)
        raise UserError(f"drafter_paths: {str(twice)!r} is named twice; allowed: each drafter once")
    return directories, *_target_and_prompts(config, options)


def for_comparison(config: RunConfig) -> RunConfig:
    """Return the settings under which drafters are compared: results in `compare-drafters-<deployment>`."""
    name = f"compare-drafters-{config.deployment}"
    tracking = replace(config.tracking, group=config.tracking.group or name)
    return replace(config, deployment=name, tracking=tracking)


def _drafter(config: RunConfig, path: Path, field: str) -> Path:
    """Return the directory of a drafter, compared with what its run wrote, in use until the flow ends."""
    directory = drafter_directory(path, field=field).resolve()
    # A run, as a rule, which `prune` leaves alone meanwhile.
    mark_used(directory.parent)
    digests = FileDigests(root_of(config))
    check_drafter(directory, digests)
    digests.save()
    return directory


def _target_and_prompts(config: RunConfig, options: FlowOptions) -> tuple[TargetPointer, Dataset | None]:
    target_pointer = check_target(config, options, prepare_target(config, options))
    return target_pointer, None if config.evaluation.prompts else ingest_all(config, options, target_pointer)


def _inputs(
    config: RunConfig, target_pointer: TargetPointer, dataset: Dataset | None, drafter: Path
) -> EvaluationInputs:
    return EvaluationInputs(
        target_directory=str(target_directory(config, target_pointer)),
        drafter_directory=str(drafter),
        prompt_paths=tuple(str(Path(path).expanduser()) for path in config.evaluation.prompts),
        shards=tuple(dataset.shards) if dataset else (),
        data=prompt_rules(config),
        trust_remote_code=config.target.trust_remote_code,
        device_map=config.target.device_map,
        device=config.training.device,
        num_ranks=config.evaluation.num_ranks,
    )


def prompt_rules(config: RunConfig) -> DataConfig:
    """Return the rules by which prompts are read: those of the data, with the columns of the prompt sets."""
    return replace(config.data, columns={**config.data.columns, **config.evaluation.columns})


def _prompt_sets(config: RunConfig, dataset: Dataset | None, digests: FileDigests) -> list[dict[str, str]]:
    return evaluation.prompt_set_digests(config.evaluation, dataset.digest if dataset else None, digests)


def evaluate(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: TargetPointer,
    dataset: Dataset | None,
    drafter: Path,
    label: str = "evaluate",
) -> EvaluationPointer:
    """Evaluate an exported drafter; `dataset` may be None where prompt files are named."""
    root, digests = root_of(config), FileDigests(root_of(config))
    key_inputs = evaluation.evaluation_key_inputs(
        config.evaluation,
        drafter_directory=drafter,
        target_fingerprint=target_pointer["fingerprint"],
        sets=_prompt_sets(config, dataset, digests),
        data=prompt_rules(config),
        digests=digests,
    )
    digests.save()
    return evaluation.evaluate_drafter(
        root,
        label=label,
        after=[target_pointer],
        refresh="evaluate" in options.refresh,
        **key_inputs,
        where=to_dict(_inputs(config, target_pointer, dataset, drafter)),
    )


def check_serving(
    config: RunConfig,
    options: ServeCheckOptions,
    target_pointer: TargetPointer,
    dataset: Dataset | None,
    drafter: Path,
) -> dict[str, Any]:
    """Compare the drafter in vLLM with our evaluator.

    Results go into the drafter's run, or for a drafter without a run into `serve-check/` under the storage
    root.
    """
    root, digests = root_of(config), FileDigests(root_of(config))
    sets = _prompt_sets(config, dataset, digests)
    weights, shape = (digests.of(drafter / name) for name in (WEIGHTS_FILE, CONFIG_FILE))
    digests.save()
    run = drafter.parent
    is_run = runs.read_run(run) is not None
    out = run if is_run else root / "serve-check" / weights[: runs.KEY_CHARACTERS]
    return serve_check.check_engine(
        to_dict(config),
        inputs=to_dict(_inputs(config, target_pointer, dataset, drafter)),
        out=str(out),
        run_directory=str(run) if is_run else None,
        identity={"drafter": f"{shape} {weights}", "target": target_pointer["fingerprint"]},
        prompt_set_names=[prompt_set["name"] for prompt_set in sets],
        python=options.python,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        control=options.control,
    )
