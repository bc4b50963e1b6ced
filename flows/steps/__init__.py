"""The steps that flows share: each is one stage, or one stage per file or per epoch."""

from flows.steps.batches import (
    cost_model,
    edges,
    forecast,
    load_plan,
    make_plans,
    predict_seconds,
    show_plans,
)
from flows.steps.common import Dataset, check_options, root_of, target_directory
from flows.steps.data import check_drafter, ingest_all, open_store, prepare_target, profile, regenerate_all
from flows.steps.evaluation import drafter_and_prompts, evaluate, serve_check
from flows.steps.training import train_run, write_comparison, write_report

__all__ = [
    "Dataset",
    "check_drafter",
    "check_options",
    "cost_model",
    "drafter_and_prompts",
    "edges",
    "evaluate",
    "forecast",
    "ingest_all",
    "load_plan",
    "make_plans",
    "open_store",
    "predict_seconds",
    "prepare_target",
    "profile",
    "regenerate_all",
    "root_of",
    "serve_check",
    "show_plans",
    "target_directory",
    "train_run",
    "write_comparison",
    "write_report",
]
