"""Predict the cost of each batching strategy on this data, before training."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("advise"))

from datetime import timedelta

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import AdviseOptions
from flows.runtime.entry import run_flow
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting import tables
from tasks.storage.pointers import root_of


@run_flow("advise")
def advise(config: RunConfig, options: AdviseOptions) -> dict[str, object]:
    """Return the predicted figures of each strategy and the recommendation."""
    from dflash_core.batching import advice

    steps.check_options(options)
    target = steps.prepare_target(config, options)
    dataset = steps.ingest_all(config, options, target)
    profile = steps.profile(config, options, dataset)
    edges = steps.edges(config, options, profile)
    model, basis = steps.cost_model(config, options, target, dataset, measure=options.measure)
    forecasts = steps.forecast(config, dataset, edges, model)
    strategy, reason = advice.recommend(forecasts)
    own = next(f for f in forecasts if f.strategy == config.batching.strategy).prediction
    split = advice.split_devices(
        max(2, config.training.num_drafter_ranks),
        capture_rate=own.num_tokens / own.capture_seconds,
        train_rate=own.num_tokens / own.train_seconds,
    )[0]
    rows = [
        (
            f.strategy,
            f"{f.tokens_per_second:,.0f} real tokens/s, {timedelta(seconds=round(3600 * f.hours))} for "
            f"{config.training.epochs} epochs, padding efficiency {f.metrics['padding_efficiency']:.4f}, "
            f"mixing {f.metrics['mixing_step']:.2f}, {f.metrics['num_shapes']:.0f} shapes",
        )
        for f in forecasts
    ]
    num_buckets = len(edges["edges"]) - 1
    plot = f"{edges['path']}/efficiency.png"
    devices = f"{split.num_target} for the target, {split.num_drafter} for the drafter"
    rows += [
        ("buckets: chosen, knee", f"{num_buckets}, {edges['knee']} (see {plot})"),
        ("split of devices", f"{devices}; bound by the {split.bound_by}"),
        ("recommendation", f"{strategy} ({STRATEGIES[strategy].summary}): {reason}"),
    ]
    tables.print_table(f"{config.deployment}: predicted, {basis}", rows)
    text = tables.markdown_table(["", f"predicted, {basis}"], [list(row) for row in rows])
    artifacts.page("advice", config.deployment, text, root_of(config), "predicted costs")
    figures = {f.strategy: {"tokens_per_second": f.tokens_per_second, **f.metrics} for f in forecasts}
    return {
        "strategies": figures,
        "knee": edges["knee"],
        "recommendation": strategy,
        "reason": reason,
    }
