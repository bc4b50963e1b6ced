"""Flows over exported drafters, with real decoding by a tiny target, against a temporary Prefect server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dflash_core.drafter.export import save_drafter
from dflash_core.target.target import Target
from tests.support.decoding_cases import make_drafter


def test_drafters_are_compared_on_the_same_prompts(settings: dict[str, Any], tmp_path: Path) -> None:
    import mlflow

    from flows.compare_drafters import compare_drafters
    from flows.evaluate_drafter import evaluate_drafter

    target = Target.load(Path(settings["target"]["name"]), layer_ids=[0, 2], compute_dtype="float32")
    for name, num_layers in (("one", 1), ("two", 2)):
        torch.manual_seed(num_layers)
        save_drafter(make_drafter(target, num_layers=num_layers), tmp_path / name)
    rows = [{"instruction": f"Add {i} and {i}.", "input": "Briefly."} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {"num_prompts": 3, "max_new_tokens": 8, "batch_size": 2, "num_single_prompts": 2}
    settings |= {"evaluation": {**evaluation, "prompts": [str(tmp_path / "sums.jsonl")]}}
    paths = [str(tmp_path / name) for name in ("one", "two")]
    comparison = compare_drafters(**settings, drafter_paths=paths)
    assert [one["name"] for one in comparison["drafters"]] == ["one", "two"]
    [pair] = comparison["differences"]
    assert pair["sets"]["sums"]["acceptance_length"]["prompts"] == 3
    assert pair["sets"]["all"]["speedup"]["prompts"] == 2
    directory = Path(comparison["directory"])
    assert directory.parent.name == "compare-drafters-default"
    assert json.loads((directory / "report.json").read_text())["drafters"] == comparison["drafters"]
    assert (directory / "plots" / "acceptance.png").is_file()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    [experiment] = client.search_experiments(filter_string="name = 'train-dflash'")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"one", "two"}
    assert all(run.data.metrics["single/speedup"] > 0 for run in runs)
    # The evaluation is the one that the comparison made; it is published under its own name.
    figures = evaluate_drafter(**settings, drafter_path=paths[0])
    assert figures == comparison["drafters"][0]["evaluation"]
    assert figures["one_at_a_time"]["lossless"] is True
    assert figures["batched"]["lossless"] is True
    names = {run.info.run_name for run in client.search_runs([experiment.experiment_id])}
    assert names == {"one", "two", "evaluate default"}
