"""The verdict of the serve check: requirements on the engine's answers and our evaluator's. Needs no torch.

`agreement.py` defines what has to hold for acceptance. In addition, wherever the engine's greedy output with
the drafter differs from that without, the target's two best logits have to be a near tie, and the control (a
drafter whose layer ids are one off) has to fail the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.serving import agreement
from dflash_core.serving.agreement import StepCounts

Answer = dict[str, Any]  # of the engine, see `vllm_engine.py`


def engine_counts(answer: Answer) -> StepCounts:
    """Return the counts in the engine's own metrics."""
    metrics = answer["metrics"]
    return StepCounts(steps=int(metrics["steps"]), accepted=tuple(map(int, metrics["accepted_by_position"])))


def check_trace(answer: Answer) -> None:
    """Check that the engine returned one output per step.

    Their number and, except for each last step, their lengths have to match the engine's metrics.
    """
    steps = [emitted[1:] for emitted in answer["emitted"]]
    metrics, num_outputs = answer["metrics"], sum(map(len, steps))
    accepted = sum(sum(emitted) - len(emitted) for emitted in steps)
    # Drafts of last steps that lie past the end of the answer.
    beyond = metrics["accepted"] - accepted
    per_step = metrics["drafted"] / max(1, metrics["steps"])
    assert num_outputs == metrics["steps"], (
        f"{num_outputs} outputs, {metrics['steps']} steps in the engine's metrics"
    )
    assert 0 <= beyond <= per_step * len(steps), (
        f"{metrics['accepted']} accepted drafts in the engine's metrics, {accepted} in its outputs"
    )


def check_result(
    answers: Mapping[str, Answer],
    comparisons: Mapping[str, dict[str, Any]],
    divergences: Sequence[dict[str, Any]],
    request: Mapping[str, Any],
    *,
    evaluator_dtype: str,
) -> dict[str, Any]:
    """Return the verdict and all figures, the contents of serve_check.json.

    Args:
        answers: of `plain`, `speculative` and, where it ran, `control`.
        comparisons: of `speculative` and, where it ran, `control`.
    """
    speeds = {
        name: sum(map(len, answer["token_ids"])) / answer["seconds"] for name, answer in answers.items()
    }
    far = sum(not divergence["near_tie"] for divergence in divergences)
    failures = _failures(comparisons["speculative"], comparisons.get("control"), far)
    return {
        "passed": not failures,
        "failures": failures,
        "engine": "vLLM",
        "engine_version": answers["plain"]["version"],
        "engine_dtype": request["dtype"],
        "evaluator_dtype": evaluator_dtype,
        "prompts": len(request["prompts"]),
        "max_new_tokens": request["max_new_tokens"],
        "max_num_seqs": request["max_num_seqs"],
        "plain_tokens_per_second": speeds["plain"],
        "speculative_tokens_per_second": speeds["speculative"],
        "speedup": speeds["speculative"] / speeds["plain"],
        "comparison": comparisons["speculative"],
        "greedy": {
            "prompts_equal": len(request["prompts"]) - len(divergences),
            "near_ties": len(divergences) - far,
            "not_near_ties": far,
            "differences": list(divergences),
        },
        "control": comparisons.get("control"),
    }


def _failures(compared: Mapping[str, Any], control: Mapping[str, Any] | None, num_far: int) -> list[str]:
    """Return one sentence per requirement that does not hold."""
    failures = []
    if not compared["enough_steps"]:
        steps = min(compared["engine_steps"], compared["evaluator_steps"])
        failures.append(
            f"{steps} verification steps; {agreement.MIN_STEPS} are needed: raise evaluation.num_prompts or "
            "evaluation.max_new_tokens"
        )
    failures += [
        f"position {p['position']}: the engine accepts {p['engine_rate']:.4f}, the evaluator "
        f"{p['evaluator_rate']:.4f}"
        for p in compared["positions"]
        if not p["agrees"]
    ]
    if not compared["length_agrees"]:
        lengths = compared["engine_acceptance_length"], compared["evaluator_acceptance_length"]
        failures.append(f"acceptance length {lengths[0]:.4f} in the engine, {lengths[1]:.4f} here")
    if not compared["steps_agree"]:
        failures.append(f"steps from the same token: {describe_steps(compared)}")
    if num_far:
        failures.append(f"{num_far} greedy outputs differ with the drafter where the target is sure")
    if control is not None and not control_caught(control):
        failures.append("a drafter with its layers one off passes too, so this check proves nothing")
    return failures


def describe_steps(compared: Mapping[str, Any]) -> str:
    """Return the counts of `agreement.compare_steps` in words."""
    counts = compared["steps_from_the_same_token"]
    return (
        f"{counts['equal']} accept the same number of drafts, in {counts['engine_more']} the engine accepts "
        f"more, in {counts['evaluator_more']} the evaluator; in {counts['accepting']} a side accepts a draft"
    )


def control_caught(control: Mapping[str, Any]) -> bool:
    """Return True when the wrong drafter fails the comparison, by its rates or step by step."""
    return not (control["rates_agree"] and control["steps_agree"])
