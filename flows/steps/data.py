"""Steps from the target and the files to samples and their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect import get_run_logger

from dflash_core.config import RunConfig, regenerated_data, to_dict
from dflash_core.drafter.compatibility import check_compatible, check_run
from dflash_core.errors import UserError
from dflash_core.target.mode import TargetMode
from dflash_core.target.shape import TargetShape
from flows.runtime.deployments import FlowOptions
from flows.steps.common import sample_tables
from tasks import ingest, length_profile, regenerate, report, target
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting import report_tables
from tasks.storage.file_digests import FileDigests
from tasks.storage.pointers import (
    CheckedTargetPointer,
    Dataset,
    ProfilePointer,
    RegeneratedPointer,
    ShardPointer,
    TargetPointer,
    root_of,
    target_directory,
)

if TYPE_CHECKING:
    from dflash_core.data.store import TokenStore


def prepare_target(config: RunConfig, options: FlowOptions) -> TargetPointer:
    """Materialise the target as a local directory."""
    digests = FileDigests(root_of(config))
    pointer = target.target_pointer(
        root_of(config), config.target, digests, refresh="target" in options.refresh
    )
    digests.save()
    return pointer


def check_target(
    config: RunConfig, options: FlowOptions, target_pointer: TargetPointer
) -> CheckedTargetPointer:
    """Find out how the target computes right, and check the settings against it before anything else runs.

    Raises:
        UserError: no way is right, or the settings do not fit the target.
    """
    check_compatible(target_directory(config, target_pointer), config.drafter)
    checked = target.checked_target(
        root_of(config), config, target_pointer, refresh="check-target" in options.refresh
    )
    check = checked["check"]
    mode, rows = TargetMode(**check["mode"]), report_tables.target_check_rows(check)
    get_run_logger().info("target: %s", mode.describe())
    artifacts.table("target-check", config.deployment, rows, "paths of the target, compared with it alone")
    check_run(config, mode, TargetShape(**check["shape"]), max_tokens=check["max_tokens"])
    return checked


def regenerate_all(
    config: RunConfig, options: FlowOptions, target_pointer: TargetPointer, sources: Sequence[ingest.Source]
) -> list[RegeneratedPointer]:
    """Let the target answer the prompts of every file.

    One file follows the other, since each keeps the device or the endpoint as busy as the settings allow.
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
    for pointer in pointers:
        get_run_logger().info("regenerated %s: %s", pointer["source"], regenerate.summary_line(pointer))
    return pointers


def ingest_all(config: RunConfig, options: FlowOptions, target_pointer: TargetPointer) -> Dataset:
    """Ingest every file into a shard; files that were ingested before are not read again."""
    root, digests = root_of(config), FileDigests(root_of(config))
    sources = ingest.find_sources(config.data, digests, get_run_logger().info)
    regenerated: list[RegeneratedPointer] = []
    if config.regenerate.enabled:
        regenerated = regenerate_all(config, options, target_pointer, _unique(sources))
        sources = [regenerate.regenerated_source(pointer, root) for pointer in regenerated]
        config = replace(config, data=regenerated_data(config.data))
    rules = ingest.ingest_rules(config, digests)
    digests.save()
    unique = _unique(sources)
    if len(unique) < len(sources):
        get_run_logger().warning(
            "data.files: %d files repeat another one by name and content; each is read once",
            len(sources) - len(unique),
        )
    # The names of all files decide nothing here, and a copy per call would grow with their square.
    data = to_dict(replace(config.data, files=()))
    answered_by = {regenerate.regenerated_source(pointer, root).path: pointer for pointer in regenerated}
    calls = [
        {
            "label": f"ingest {source.name}",
            "after": [target_pointer, *(p for p in [answered_by.get(source.path)] if p)],
            "source_digest": source.digest,
            "source_name": source.name,
            "tokenizer_fingerprint": target_pointer["tokenizer_fingerprint"],
            "rules": rules,
            "path": source.path,
            "data": data,
            "target_directory": str(target_directory(config, target_pointer)),
            "trust_remote_code": config.target.trust_remote_code,
        }
        for source in unique
    ]
    return _open_dataset(config, ingest.ingest.map(root, calls, refresh="ingest" in options.refresh))


def _unique(sources: Sequence[ingest.Source]) -> list[ingest.Source]:
    """Return the sources without those that repeat another one by name and content."""
    return list({(source.name, source.digest): source for source in sources}.values())


def _open_dataset(config: RunConfig, pointers: list[ShardPointer]) -> Dataset:
    """Return the data set of some shards, and log its figures.

    Raises:
        UserError: no sample is left for training.
    """
    from dflash_core.data import store as token_store

    logger = get_run_logger()
    with_samples = [pointer for pointer in pointers if pointer["num_samples"]]
    rejected = sum(pointer["num_rejected"] for pointer in pointers)
    if not with_samples:
        raise UserError(
            f"data.files: no usable row in {len(pointers)} files ({rejected} rejected); allowed: at least one"
        )
    shards = [str(root_of(config) / pointer["path"] / "shard") for pointer in with_samples]
    store = token_store.open_store(shards, config.data)
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
    return Dataset(
        shards=shards,
        pointers=pointers,
        digest=store.digest,
        validation_bound=length_profile.validation_bound(sample_tables(shards), config.data),
        num_repeats=store.num_repeats,
    )


def open_store(config: RunConfig, dataset: Dataset) -> TokenStore:
    """Open the token store of a data set."""
    from dflash_core.data import store

    return store.open_store(dataset.shards, config.data)


def profile(config: RunConfig, options: FlowOptions, dataset: Dataset) -> ProfilePointer:
    """Profile the sequence lengths of the samples."""
    pointer = length_profile.profile_lengths(
        root_of(config),
        label="length profile",
        after=dataset.pointers,
        refresh="profile" in options.refresh,
        length_digest=length_profile.length_digest(sample_tables(dataset.shards), dataset.validation_bound),
        sql_digest=length_profile.sql_digest(),
        validation_bound=dataset.validation_bound,
        shards=dataset.shards,
    )
    rows = report_tables.source_rows(length_profile.read_profile(root_of(config) / pointer["path"]))
    artifacts.table("lengths", config.deployment, rows, "lengths of each source in tokens")
    return pointer
