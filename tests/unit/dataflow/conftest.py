"""A small token store and three epochs of plans for the tests of this folder."""

from __future__ import annotations

import pytest

from benchmarks.support.tiny_run import write_shard
from dflash_core.batching.plan import build_plan
from dflash_core.batching.storage import save_plan
from dflash_core.config import BatchingConfig
from dflash_core.data.store import TokenStore
from dflash_core.dataflow.schedule import Schedule


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    shard = write_shard(tmp_path_factory.mktemp("data") / "shard")
    return TokenStore.open([shard], validation_share=0.1, min_validation_samples=4)


@pytest.fixture(scope="module")
def schedule(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    directory = tmp_path_factory.mktemp("plans")
    config = BatchingConfig(strategy="bucketed", token_budget=100, tokens_per_step=300, num_buckets=2)
    for epoch in range(3):
        save_plan(
            build_plan(store.lengths[store.train_indices], config, seed=0, epoch=epoch),
            directory / f"epoch-{epoch}.parquet",
        )
    return Schedule(store, sorted(directory.iterdir()), None)
