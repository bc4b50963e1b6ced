"""Evaluations of a random drafter on two rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash_core.config import EvaluationConfig
from dflash_core.decoding.evaluation_inputs import EvaluationInputs, EvaluationJob
from dflash_core.drafter.export import save_drafter
from dflash_core.target.target import Target
from tests.support.decoding_cases import make_drafter


def evaluation_job(directory: Path, target_dir: Path, target: Target, **settings: Any) -> EvaluationJob:
    """Return an evaluation of two rows, one with two turns, and of a random drafter."""
    rows = '{"prompt": ["What is a list?", "And a tuple?"]}\n{"problem": "What is 2 + 2?"}\n'
    (directory / "chat.jsonl").write_text(rows)
    torch.manual_seed(0)
    save_drafter(make_drafter(target), directory / "drafter")
    return EvaluationJob(
        inputs=EvaluationInputs(
            target_directory=str(target_dir),
            drafter_directory=str(directory / "drafter"),
            prompt_paths=(str(directory / "chat.jsonl"),),
            device="cpu",
        ),
        set_names=("chat",),
        settings=EvaluationConfig(max_new_tokens=6, **settings),
    )
