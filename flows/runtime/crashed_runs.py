"""Flow runs whose process died without reporting it: a machine crash, or a worker killed with its children.

    python -m flows.runtime.crashed_runs

Prefect still counts such a run as running, and the run keeps its slot in the work pool. `make worker`
runs this command before it starts the workers: runs of this machine without a process are marked Crashed and
their MLflow runs are closed. Training resumes from its last checkpoint when the deployment is started again.

While a flow run lasts, PREFECT_HOME holds a note about its process; a note without a process is a crash.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_HOME
from prefect.states import Crashed

from dflash_core.processes import is_gone, this_process
from tasks.reporting.mlflow_run import close_runs_of_flow


def _notes() -> Path:
    return Path(PREFECT_HOME.value()) / "flow-runs"


@contextlib.contextmanager
def process_note(flow_run_id: str) -> Iterator[None]:
    """Keep a note about this process while the body runs."""
    note = _notes() / f"{flow_run_id}.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(this_process()), encoding="utf-8")
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def close_crashed_runs() -> list[str]:
    """Mark this machine's runs without a process as Crashed, and return their names."""
    names = []
    for note in sorted(_notes().glob("*.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            if is_gone(json.loads(note.read_text(encoding="utf-8"))):
                names += _close(note)
    return names


def _close(note: Path) -> list[str]:
    with get_client(sync_client=True) as client:
        try:
            flow_run = client.read_flow_run(note.stem)
        except ObjectNotFound:  # another server, or a deleted run
            note.unlink(missing_ok=True)
            return []
        state = Crashed(message="The process of this run has died; start the deployment again to resume.")
        is_open = flow_run.state is not None and not flow_run.state.is_final()
        if is_open:
            client.set_flow_run_state(flow_run.id, state, force=True)
    close_runs_of_flow(None, flow_run, state)
    note.unlink(missing_ok=True)
    return [flow_run.name] if is_open else []


def report_crashed_runs() -> None:
    """Mark crashed runs and print one line for each."""
    for name in close_crashed_runs():
        print(f"flow run {name}: its process has died, marked as crashed", flush=True)


if __name__ == "__main__":
    report_crashed_runs()
