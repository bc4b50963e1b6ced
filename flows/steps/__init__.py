"""The steps that flows share: each is one stage, or one stage per file or per epoch."""

from flows.steps.batches import (
    check_ranks,
    cost_model,
    edges,
    forecast,
    make_plans,
    predict_seconds,
    show_plans,
)
from flows.steps.common import check_options
from flows.steps.data import check_target, ingest_all, open_store, prepare_target, profile, regenerate_all
from flows.steps.evaluation import (
    check_serving,
    drafter_and_prompts,
    drafters_and_prompts,
    evaluate,
    for_comparison,
)

__all__ = [
    "check_ranks",
    "check_target",
    "check_options",
    "check_serving",
    "cost_model",
    "drafter_and_prompts",
    "drafters_and_prompts",
    "edges",
    "evaluate",
    "for_comparison",
    "forecast",
    "ingest_all",
    "make_plans",
    "open_store",
    "predict_seconds",
    "prepare_target",
    "profile",
    "regenerate_all",
    "show_plans",
]
