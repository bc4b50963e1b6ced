"""The steps that several flows share, each one stage or one stage a file or an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from dflash_core.batching.cost import CostModel, predict
from dflash_core.config import STRATEGIES, RunConfig, UserError, to_dict
from flows.deployments import FlowOptions, ServeCheckOptions, data_name
from tasks import (
    advice,
    artifacts,
    buckets,
    compare,
    ingest,
    length_profile,
    plans,
    regenerate,
    report,
    runs,
    target,
    train,
)
from tasks import evaluate as evaluation
from tasks import serve_check as checking
from tasks.stages import STAGES, FileDigests

Pointer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The ingested samples: shards with their pointers, and the split."""

    shards: list[str]  # absolute directories, each content once, in the order of their names
    pointers: list[Pointer]
    digest: str  # of the token store: shards in order and the split
    validation_bound: int
    num_repeats: int  # samples that repeat another one, of any file, token by token


def check_options(options: FlowOptions) -> None:
    """Raises UserError for a stage that does not exist."""
    for name in options.refresh:
        if name not in (*STAGES, "train"):
            allowed = ", ".join(sorted((*STAGES, "train")))
            raise UserError(f"refresh: {name!r} is not allowed; allowed: {allowed}")


def root_of(config: RunConfig) -> Path:
    """The storage root, absolute."""
    return Path(config.storage_root).expanduser().resolve()


def target_directory(config: RunConfig, pointer: Pointer) -> Path:
    """Where the materialised target is."""
    return root_of(config) / pointer["path"] / "model"


def prepare_target(config: RunConfig, options: FlowOptions) -> Pointer:
    """The target as a local directory."""
    digests = FileDigests(root_of(config))
    pointer = target.prepare_target(
        root_of(config), config.target, digests, refresh="target" in options.refresh
    )
    digests.save()
    return pointer


def regenerate_all(
    config: RunConfig, options: FlowOptions, target_pointer: Pointer, sources: Sequence[ingest.Source]
) -> list[Pointer]:
    """The target's own answers to the prompts of every file, one file after the other: each one keeps the device
    or the endpoint as busy as the settings allow.
    """
    root, digests = root_of(config), FileDigests(root_of(config))
    directory = target_directory(config, target_pointer)
    with regenerate.target_for_all_files():
        pointers = [
            regenerate.regenerate(
                root,
                label=f"regenerate {source.name}",
                after=[target_pointer],
                refresh="regenerate" in options.refresh,
                **regenerate.regenerate_inputs(config, source, target=target_pointer, digests=digests),
                where=regenerate.where_of(config, source, root, directory),
            )
            for source in sources
        ]
    digests.save()
    for made in pointers:
        get_run_logger().info("regenerated %s: %s", made["source"], regenerate.summary(made))
    return pointers


def ingest_all(config: RunConfig, options: FlowOptions, target_pointer: Pointer) -> Dataset:
    """Every file a shard; files that were ingested before are not read again."""
    root, digests = root_of(config), FileDigests(root_of(config))
    sources = ingest.find_sources(config.data, digests)
    regenerated: list[Pointer] = []
    if config.regenerate.enabled:
        sources = list({(s.name, s.digest): s for s in sources}.values())
        regenerated = regenerate_all(config, options, target_pointer, sources)
        sources = [regenerate.regenerated_source(made, root) for made in regenerated]
        config = replace(config, data=regenerate.regenerated_data(config.data))
    rules = ingest.ingest_rules(config, digests)
    digests.save()
    unique = list({(s.name, s.digest): s for s in sources}.values())
    if len(unique) < len(sources):
        get_run_logger().warning(
            "data.files: %d files repeat another one by name and content; each is read once",
            len(sources) - len(unique),
        )
    calls = [
        {
            "label": f"ingest {source.name}",
            "after": [target_pointer, *regenerated],
            "source_digest": source.digest,
            "source_name": source.name,
            "tokenizer_fingerprint": target_pointer["tokenizer_fingerprint"],
            "rules": rules,
            "path": source.path,
            "data": to_dict(config.data),
            "target_directory": str(target_directory(config, target_pointer)),
            "trust_remote_code": config.target.trust_remote_code,
        }
        for source in unique
    ]
    return _open(config, ingest.ingest.map(root, calls, refresh="ingest" in options.refresh))


def open_store(config: RunConfig, dataset: Dataset) -> Any:
    """The samples."""
    from dflash_core.data.store import TokenStore

    return TokenStore.open(
        dataset.shards,
        validation_share=config.data.validation_share,
        min_validation_samples=config.data.min_validation_samples,
    )


def load_plan(config: RunConfig, pointer: Pointer) -> Any:
    """The `BatchPlan` of a pointer."""
    from dflash_core.batching import BatchPlan

    return BatchPlan.load(root_of(config) / pointer["path"] / f"epoch-{pointer['epoch']:03d}.parquet")


def _open(config: RunConfig, pointers: list[Pointer]) -> Dataset:
    from dflash_core.data.store import TokenStore

    logger = get_run_logger()
    with_samples = [pointer for pointer in pointers if pointer["num_samples"]]
    rejected = sum(pointer["num_rejected"] for pointer in pointers)
    if not with_samples:
        raise UserError(
            f"data.files: no usable row in {len(pointers)} files ({rejected} rejected); allowed: at least one"
        )
    shards = [str(root_of(config) / pointer["path"] / "shard") for pointer in with_samples]
    store = TokenStore.open(
        shards,
        validation_share=config.data.validation_share,
        min_validation_samples=config.data.min_validation_samples,
    )
    if len(store.train_indices) == 0:
        raise UserError(f"data.files: {len(store)} samples, none left for training; allowed: more rows")
    logger.info(
        "data: %d samples, %d tokens, %d for validation, %d rows rejected, %d exact repeats kept",
        len(store),
        int(store.lengths.sum()),
        len(store.validation_indices),
        rejected,
        store.num_repeats,
    )
    for kind in ("rejects", "notes"):
        for text, count in list(report.counts_of(pointers, kind).items())[:5]:
            logger.info("data: %d rows %s: %s", count, "rejected" if kind == "rejects" else "kept", text)
    samples = [Path(shard) / "samples.parquet" for shard in shards]
    bound = length_profile.validation_bound(samples, config.data)
    return Dataset(
        shards=shards,
        pointers=pointers,
        digest=store.digest,
        validation_bound=bound,
        num_repeats=store.num_repeats,
    )


def profile(config: RunConfig, options: FlowOptions, dataset: Dataset) -> Pointer:
    """How long the samples are."""
    samples = [Path(shard) / "samples.parquet" for shard in dataset.shards]
    pointer = length_profile.profile_lengths(
        root_of(config),
        label="length profile",
        after=dataset.pointers,
        refresh="profile" in options.refresh,
        length_digest=length_profile.length_digest(samples, dataset.validation_bound),
        sql_digest=length_profile.sql_digest(),
        validation_bound=dataset.validation_bound,
        shards=dataset.shards,
    )
    found = length_profile.read_profile(root_of(config) / pointer["path"])
    artifacts.table(
        "lengths", config.deployment, artifacts.source_rows(found), "lengths of each source in tokens"
    )
    return pointer


def edges(config: RunConfig, options: FlowOptions, profile_pointer: Pointer) -> Pointer:
    """Bucket edges for this histogram, budget and number of buckets."""
    longest = profile_pointer["stats"]["max_length"]
    if longest > config.batching.token_budget:
        raise UserError(
            f"batching.token_budget: {config.batching.token_budget} slots is less than the longest sample's "
            f"{longest} "
            "tokens; allowed: at least that, or a lower data.max_length"
        )
    directory = root_of(config) / profile_pointer["path"]
    pointer = buckets.bucket_edges(
        root_of(config),
        label=f"bucket edges, {config.batching.num_buckets} buckets",
        after=[profile_pointer],
        refresh="edges" in options.refresh,
        **buckets.edges_inputs(profile_pointer, config.batching),
        profile_directory=str(directory),
    )
    found, expected = length_profile.read_profile(directory), pointer["expected_efficiency"]
    artifacts.table(
        "edges",
        config.deployment,
        artifacts.bucket_rows(found["lengths"], found["counts"], pointer["edges"]),
        "training samples in each bucket"
        + (f"; expected padding efficiency {expected:.4f}" if expected is not None else "")
        + f"; more than {pointer['knee']} buckets gain little",
    )
    return pointer


def make_plans(
    config: RunConfig,
    options: FlowOptions,
    dataset: Dataset,
    edges_pointer: Pointer,
    strategies: Sequence[str] = STRATEGIES,
    all_epochs: bool = False,
) -> dict[str, list[Pointer]]:
    """Plans of each strategy, one task an epoch: all epochs of the run's own, two of the others.

    Args:
        all_epochs: all epochs of every strategy, to train each.
    """
    lengths = plans.lengths_of(config, dataset.shards)
    arguments = {
        "shards": dataset.shards,
        "validation_share": config.data.validation_share,
        "min_validation": config.data.min_validation_samples,
        "num_anchors": config.objective.num_anchors,
        "block_size": config.drafter.block_size,
    }
    calls, strategy_of_call = [], []
    for strategy in strategies:
        batching = replace(config.batching, strategy=strategy)  # type: ignore[arg-type]
        settings = plans.plan_settings(batching, edges_pointer["edges"])
        own = all_epochs or strategy == config.batching.strategy
        num_epochs = max(config.training.epochs if own else 0, plans.COMPARED_EPOCHS)
        strategy_of_call += [strategy] * num_epochs
        calls += [
            {
                "label": f"plan {strategy} epoch {epoch}",
                "after": [edges_pointer] if strategy == "bucketed" else dataset.pointers[:1],
                "lengths_digest": lengths.digest,
                "settings": settings,
                "seed": config.training.seed,
                "epoch": epoch,
                "arguments": arguments,
            }
            for epoch in range(num_epochs)
        ]
    made: dict[str, list[Pointer]] = {strategy: [] for strategy in strategies}
    found = plans.build_epoch.map(root_of(config), calls, refresh="plan" in options.refresh)
    for strategy, pointer in zip(strategy_of_call, found):
        made[strategy].append(pointer)
    artifacts.table(
        "plans",
        config.deployment,
        artifacts.plan_rows(report.plan_figures(made), report.PLAN_FIGURES),
        f"batch plans of each strategy, seed {config.training.seed}; mixing 1 is as good as random samples",
    )
    return made


def show_plans(
    config: RunConfig, dataset: Dataset, profile_pointer: Pointer, edges_pointer: Pointer, made: Pointer
) -> None:
    """Data and plans in the terminal."""
    figures = report.plan_figures(made)
    stats = report.dataset_figures(
        profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
    )
    report.print_table(
        f"{config.deployment}: data and plans",
        [
            ("samples, tokens", f"{stats['num_samples']:,}, {stats['num_tokens']:,}"),
            ("rows rejected", f"{stats['num_rejected']:,}"),
            (
                "lengths: median, 99%, longest",
                f"{stats['median_length']}, {stats['p99_length']}, {stats['max_length']}",
            ),
            ("bucket edges", ", ".join(map(str, edges_pointer["edges"]))),
            *(
                (
                    f"{strategy}: efficiency, mixing in a step",
                    f"{f['padding_efficiency']:.4f}, {f['mixing_step']:.2f}",
                )
                for strategy, f in figures.items()
            ),
        ],
    )


def train_run(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: Pointer,
    dataset: Dataset,
    profile_pointer: Pointer,
    epochs: Sequence[Pointer],
    label: str | None = None,
) -> Pointer:
    """Trains to the end, resumes, or skips what is finished; `epochs` are the plans, one an epoch."""
    root, used = root_of(config), epochs[: config.training.epochs]
    num_steps = sum(int(pointer["metrics"]["num_steps"]) for pointer in used)
    return train.train(
        to_dict(config),
        {
            "shards": dataset.shards,
            "plans": [
                str(root / pointer["path"] / f"epoch-{pointer['epoch']:03d}.parquet") for pointer in used
            ],
            "target": str(target_directory(config, target_pointer)),
            "dataset_digest": dataset.digest,
            "plan_digests": [pointer["plan_digest"] for pointer in used],
            "target_fingerprint": target_pointer["fingerprint"],
            "total_steps": min(num_steps, config.training.max_steps or num_steps),
            "dataset": {
                "name": data_name(config.data.files),
                "files": sorted(pointer["source"] for pointer in dataset.pointers),
                "profile": report.dataset_figures(
                    profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
                ),
            },
        },
        label=label or f"train {config.batching.strategy}",
        refresh="train" in options.refresh,
        after=[target_pointer, *used],
    )


def drafter_directory(config: RunConfig, drafter_path: str | None) -> Path:
    """The exported drafter at a path, a run's directory or the drafter itself; None: of the latest run.

    Raises:
        UserError: there is none.
    """
    place = Path(drafter_path).expanduser() if drafter_path else runs.latest_directory(config)
    directory = place / "drafter" if (place / "drafter").is_dir() else place
    if not (directory / "config.json").is_file():
        raise UserError(
            f"drafter_path: {str(place)!r} holds no drafter; allowed: a run's directory or its drafter/"
        )
    return directory.resolve()


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


def write_report(
    config: RunConfig,
    dataset: Dataset,
    profile_pointer: Pointer,
    edges_pointer: Pointer,
    made: dict[str, list[Pointer]],
    trained: Pointer,
    evaluated: Pointer,
) -> Pointer:
    """report.json, report.md and plots in the run's directory, a table in the terminal."""
    written = report.write_report(
        to_dict(config),
        dataset=report.dataset_figures(
            profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
        ),
        edges=edges_pointer,
        plans=made,
        trained=trained,
        evaluated=evaluated,
        edges_directory=str(root_of(config) / edges_pointer["path"]),
    )
    title = f"{config.deployment}, run {Path(trained['run_dir']).name} ({trained['status']})"
    report.print_table(title, [*report.summary_rows(written), ("report", f"{trained['run_dir']}/report.md")])
    return written


def write_comparison(
    config: RunConfig, dataset: Dataset, edges_pointer: Pointer, results: list[compare.Result]
) -> Pointer:
    """The comparison's report, a table in the terminal, the recommendation."""
    lengths = plans.lengths_of(config, dataset.shards)
    metrics = [
        compare.read_metrics(
            result,
            [load_plan(config, pointer) for pointer in result.plans[: config.training.epochs]],
            lengths,
        )
        for result in results
    ]
    found = compare.write_comparison(to_dict(config), results, metrics, edges_pointer["edges"])
    for title, columns in (("throughput and batches", compare.SHOWN), ("training", compare.TRAINED)):
        report.print_wide_table(f"{config.deployment}: {title}", *compare.table(found, columns))
    report.print_table(
        "recommendation", [("", found["recommendation"]), ("report", f"{found['directory']}/report.md")]
    )
    return found


def cost_model(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: Pointer,
    dataset: Dataset,
    *,
    measure: bool = True,
) -> tuple[CostModel, str]:
    """What a microbatch costs, and where the constants come from."""
    directory = target_directory(config, target_pointer)
    if not measure:
        return advice.shape_model(directory, config), "from shapes and an assumed speed of the device"
    pointer = advice.calibrate(
        root_of(config),
        label="calibrate",
        after=[target_pointer, *dataset.pointers],
        refresh="calibrate" in options.refresh,
        **advice.calibration_inputs(
            config,
            target_fingerprint=target_pointer["fingerprint"],
            dataset_digest=dataset.digest,
            target=directory,
            shards=dataset.shards,
        ),
    )
    basis = f"calibrated on {pointer['num_microbatches']} microbatches measured here"
    return CostModel(**pointer["constants"]), basis


def predict_seconds(config: RunConfig, epochs: Sequence[Pointer], model: CostModel) -> float | None:
    """Seconds of capture and drafter that the epochs of a run should take on one process; None for a run that
    captures once and trains often, or ends early.
    """
    if config.target.cache != "none" or config.training.max_steps is not None:
        return None
    used = [load_plan(config, pointer) for pointer in epochs[: config.training.epochs]]
    return sum(predict(plan.work, model).seconds for plan in used)


def forecast(config: RunConfig, dataset: Dataset, edges_pointer: Pointer, model: CostModel) -> list[Any]:
    """Each strategy on these lengths, fastest first."""
    from dflash_core.batching.advice import forecast_strategies

    lengths = plans.lengths_of(config, dataset.shards)
    return forecast_strategies(
        lengths.lengths,
        replace(config.batching, edges=tuple(edges_pointer["edges"])),
        draft_slots=lengths.draft_slots,
        source_id=lengths.source_id,
        model=model,
        epochs=config.training.epochs,
        num_devices=config.training.num_drafter_ranks,
        seed=config.training.seed,
    )
