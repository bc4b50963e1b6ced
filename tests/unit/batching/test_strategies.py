"""The table of strategies is what settings, forms and keys read."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from dflash_core import config
from dflash_core.batching.strategies import STRATEGIES


def test_the_table_is_keyed_by_name():
    assert [strategy.name for strategy in STRATEGIES.values()] == list(STRATEGIES)


def test_forms_show_every_strategy():
    hints = typing.get_type_hints(config.BatchingConfig)
    assert typing.get_args(hints["strategy"]) == tuple(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_settings_are_fields_of_the_configuration(strategy):
    fields = {field.name for field in dataclasses.fields(config.BatchingConfig)}
    assert set(strategy.settings) <= fields
