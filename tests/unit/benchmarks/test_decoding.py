"""The benchmark of decoding steps, rehearsed with a tiny target."""

import json

import pytest
import torch

from benchmarks import decoding


def test_a_rehearsal_prints_both_sides_and_their_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    options = "--tiny --dtypes float32 --threads 1 --batches 2 --block-sizes 4 --steps 2 --repeats 2"
    monkeypatch.setattr("sys.argv", ["decoding", *options.split()])
    decoding.main()
    *_, line, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    [found] = figures["rows"]
    assert figures["clock"] == "wall"
    assert (found["dtype"], found["threads"], found["batch"]) == ("float32", 1, 2)
    assert found["generate_setting"].startswith("generate ")
    assert found["memory"] > 0
    assert line.split()[:3] == ["float32", "1", "2"]
    assert f"{found['plain'] / found['generate']:.2f}" in line
    assert f"{found['speculative 4'] / found['plain']:.2f}" in line
    assert torch.get_num_threads() == threads
