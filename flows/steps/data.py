"""From the target and the files to samples and their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from dflash_core.config import RunConfig, to_dict
from dflash_core.drafter.compatibility import check_compatible
from dflash_core.errors import UserError
from flows.runtime.deployments import FlowOptions
from flows.steps.common import Dataset, Pointer, root_of, target_directory
from tasks import ingest, length_profile, regenerate, report, target
from tasks.reporting import prefect_artifacts as artifacts
from tasks.storage.stages import FileDigests


def prepare_target(config: RunConfig, options: FlowOptions) -> Pointer:
    """The target as a local directory."""
    digests = FileDigests(root_of(config))
    pointer = target.prepare_target(
        root_of(config), config.target, digests, refresh="target" in options.refresh
    )
    digests.save()
    return pointer


def check_drafter(config: RunConfig, target_pointer: Pointer) -> None:
    """Check the drafter's settings against the target, before hours of reading data."""
    check_compatible(target_directory(config, target_pointer), config.drafter)


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


def open_store(config: RunConfig, dataset: Dataset) -> Any:
    """The samples."""
    from dflash_core.data.store import TokenStore

    return TokenStore.open(
        dataset.shards,
        validation_share=config.data.validation_share,
        min_validation_samples=config.data.min_validation_samples,
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
