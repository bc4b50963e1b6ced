"""The whole pipeline under faults, for ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.flow_runs import ROOT


@pytest.mark.long
def test_the_same_command_repeated_ends_with_the_same_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "10", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["faults"] > 0
