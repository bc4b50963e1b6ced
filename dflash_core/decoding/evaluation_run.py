"""One evaluation, from its inputs to its report: all turns of all prompts, in batches and one at a time.

A rank of several is started by torchrun as `python -m dflash_core.decoding.evaluation_run job.json`; rank 0
writes `result.json` next to the job, and a rank that a user's mistake ends writes `error.txt`.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from dflash_core.config import from_dict
from dflash_core.data.chat import load_tokenizer
from dflash_core.decoding.evaluate import Evaluation, Progress, evaluate, has_room
from dflash_core.decoding.evaluation_inputs import EvaluationJob
from dflash_core.decoding.generate import answer_text
from dflash_core.decoding.int8 import as_decoded
from dflash_core.decoding.prompt_sets import PromptSets, spread
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.shares import ALONE, Share
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import load_drafter
from dflash_core.errors import UserError
from dflash_core.files import write_json
from dflash_core.launch.stop_signal import end_with_parent
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.target import Target

RESULT, ERROR = "result.json", "error.txt"
# Figures of the report that differ between one prompt at a time and batches.
SPEED = (
    *("plain_tokens_per_second", "speculative_tokens_per_second", "speedup", "speedup_interval"),
    *("plain_tokens", "plain_seconds", "speculative_tokens", "speculative_seconds"),
)
PASS = (
    *("batch_size", "prompts", "steps", "tokens"),
    *("acceptance_length", "acceptance_interval", "acceptance_by_position"),
    *("lossless", "prompts_equal", "near_ties"),
)


def run_evaluation(job: EvaluationJob, share: Share = ALONE) -> dict[str, Any]:
    """Return `report` and `records` (one per prompt) as JSON types.

    Raises:
        UserError: target, drafter or prompts cannot be used, or do not fit each other.
    """
    disable_progress_bar()
    inputs, settings = job.inputs, job.settings
    device = _device(inputs.device, share)
    drafter = load_drafter(inputs.drafter_directory, device=device)
    target = Target.load(
        inputs.target_directory,
        layer_ids=drafter.shape.target_layer_ids,
        device=device,
        compute_dtype=settings.compute_dtype,
        trust_remote_code=inputs.trust_remote_code,
        device_map=inputs.device_map,
    )
    tokenizer = load_tokenizer(inputs.target_directory, trust_remote_code=inputs.trust_remote_code)
    target.end_answers(tokenizer, inputs.data)
    sets = PromptSets(list(job.set_names), settings.num_prompts, inputs)
    sampling = Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        batch_size=settings.batch_size,
    )
    drafter = as_decoded(drafter, target, settings.drafter_dtype)
    evaluation, num_without_room = decode_all(target, drafter, sets, sampling, share)
    single = decode_singly(target, drafter, evaluation, settings.num_single_prompts, share)
    report = full_report(evaluation, single)
    report["turns_without_room"] = num_without_room
    report["target_mode"] = target.mode.describe()
    report["protocol"] |= {
        "template_arguments": inputs.data.template_arguments,
        "drafter_dtype": "int8" if settings.drafter_dtype == "int8" else dtype_name(target.compute_dtype),
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "ranks": share.size,
    }
    return {"report": report, "records": full_records(evaluation, single)}


def decode_all(
    target: Target, drafter: DFlashDrafter, sets: PromptSets, sampling: Sampling, share: Share = ALONE
) -> tuple[Evaluation, int]:
    """Evaluate every turn of every prompt; later turns follow the target's own answers.

    Returns:
        The evaluation, and the number of later turns for which the target has no positions left. These are
            not decoded, and neither are the turns after them.
    """
    rows, prompts = sets.first()
    turn, num_without_room = 1, 0
    total: Evaluation | None = None
    answers: dict[int, list[str]] = {}
    while prompts:
        first = len(total.prompts) if total else 0
        numbers = range(first, first + len(prompts))
        progress = _progress(f"turn {turn}: " if turn > 1 else "", share)
        result = evaluate(target, drafter, prompts, sampling, numbers=numbers, share=share, progress=progress)
        total = result if total is None else total + result
        if sets.encoder is None:
            break
        for row, answer in zip(rows, result.plain.generations, strict=True):
            answers.setdefault(row, []).append(answer_text(sets.tokenizer, answer))
        rows, prompts = sets.following({row: answers[row] for row in rows})
        fitting = [i for i, prompt in enumerate(prompts) if has_room(target, prompt, sampling)]
        num_without_room += len(prompts) - len(fitting)
        rows, prompts = [rows[i] for i in fitting], [prompts[i] for i in fitting]
        turn += 1
    if total is None:
        raise UserError("evaluation.prompts: no prompt; allowed: at least one")
    return total, num_without_room


@dataclass(frozen=True)
class SingleEvaluation:
    """Prompts of an evaluation, given by their numbers in it, that were decoded one at a time."""

    numbers: list[int]
    evaluation: Evaluation


def decode_singly(
    target: Target, drafter: DFlashDrafter, done: Evaluation, num_prompts: int, share: Share = ALONE
) -> SingleEvaluation:
    """Decode up to `num_prompts` prompts of each set one at a time; all, where that has been done already."""
    everyone = list(range(len(done.prompts)))
    if done.sampling.batch_size == 1:
        return SingleEvaluation(everyone, done)
    by_set: dict[str, list[int]] = {}
    for i in everyone:
        by_set.setdefault(done.prompts[i].prompt_set, []).append(i)
    numbers = [members[i] for members in by_set.values() for i in spread(len(members), num_prompts)]
    prompts, sampling = [done.prompts[i] for i in numbers], replace(done.sampling, batch_size=1)
    progress = _progress("one at a time: ", share)
    single = evaluate(target, drafter, prompts, sampling, numbers=numbers, share=share, progress=progress)
    return SingleEvaluation(numbers, single)


def full_report(done: Evaluation, single: SingleEvaluation) -> dict[str, Any]:
    """Return the figures of an evaluation; speeds are in `one_at_a_time` and `batched`, by set too.

    `batched` is None where every batch has one prompt.
    """
    report, of_single = done.report(), single.evaluation.report()
    is_batched = done.sampling.batch_size > 1
    passes = {"one_at_a_time": of_single, "batched": report if is_batched else None}
    found: dict[str, Any] = {
        name: figures and {key: figures[key] for key in (*SPEED, *PASS)} for name, figures in passes.items()
    }
    for name, of_set in report["sets"].items():
        for kind, figures in passes.items():
            speeds = figures and figures["sets"].get(name)
            of_set[kind] = speeds and {key: speeds[key] for key in SPEED}
    for figures in (report, *report["sets"].values()):
        for key in SPEED:
            del figures[key]
    protocol = ("temperature", "max_new_tokens", "batch_size", "compute_dtype", "block_size")
    report["protocol"] = {"engine": "train-dflash", **{key: report.pop(key) for key in protocol}}
    report["block_size"] = done.block_size
    if report["lossless"] is not None:
        report["lossless"] = report["lossless"] and of_single["lossless"]
    return report | found


def full_records(done: Evaluation, single: SingleEvaluation) -> list[dict[str, Any]]:
    """Return one record per prompt, with tokens and seconds of those that were decoded one at a time."""
    records = done.records()
    for timing in single.evaluation.timings:
        records[single.numbers[timing.prompts[0]]]["one_at_a_time"] = list(timing.sums())
    return records


def _device(device: str, share: Share) -> str:
    """Return this rank's device.

    Raises:
        UserError: there are more ranks than GPUs.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    num_devices = torch.cuda.device_count()
    if share.size > num_devices:
        raise UserError(
            f"evaluation.num_ranks: {share.size} is not allowed; allowed: at most the {num_devices} GPUs of "
            "this machine, or training.device cpu"
        )
    return f"cuda:{share.rank}" if share.size > 1 else "cuda"


def describe_device(device: str) -> str:
    """Return the name of a GPU, or the instruction set that torch uses on this CPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def _progress(title: str, share: Share) -> Progress | None:
    """Return a function that prints the progress of rank 0, with the time left at the pace so far."""

    def show(done: int, total: int, length: float, seconds: float) -> None:
        left = seconds / done * (total - done)
        rest = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        ranks = f" of rank 0 of {share.size}" if share.size > 1 else ""
        print(
            f"evaluation: {title}{done}/{total} prompts{ranks}, acceptance length {length:.3f}, {rest} left",
            flush=True,
        )

    return show if share.rank == 0 else None


def main(path: Path) -> int:
    """Run this process's rank of the evaluation that a file describes; return the exit code."""
    share = Share(rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]))
    # A rank waits for the batches of the others; the stage has the time limit.
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=1))
    try:
        result = run_evaluation(from_dict(EvaluationJob, json.loads(path.read_text(encoding="utf-8"))), share)
        if share.rank == 0:
            write_json(path.with_name(RESULT), result)
        torch.distributed.destroy_process_group()
    except UserError as error:
        path.with_name(ERROR).write_text(str(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    end_with_parent(0.0)
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    # A peer that failed leaves collectives behind, which would block the usual exit.
    os._exit(code)
