"""Copies of the variables that turn telemetry off."""

from __future__ import annotations

import re

import yaml

from dflash_core.telemetry import NO_TELEMETRY
from tests.support.record_stage_digests import ROOT


def test_prefect_yaml_and_the_makefile_repeat_the_variables() -> None:
    environment = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["environment"]
    assert {name: environment.get(name) for name in NO_TELEMETRY} == NO_TELEMETRY
    lines = re.search(r"^PRIVACY := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert lines is not None
    assert dict(pair.split("=") for pair in lines[1].replace("\\\n", " ").split()) == NO_TELEMETRY
