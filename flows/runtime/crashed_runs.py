"""Flow runs whose process is gone without a word: the machine went down, or somebody killed the worker and all it had
started. Prefect believes that such a run is Running, and it holds its place in the pool for ever.

    python -m flows.runtime.crashed_runs

runs before a worker starts (make worker) and marks the runs of this machine Crashed.

Every flow run leaves a note with its process under PREFECT_HOME while it runs. The MLflow run of an abandoned flow run
is closed as well; training resumes from its last checkpoint when the deployment is asked for again.
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

from tasks.reporting.mlflow_run import close_runs_of_flow
from tasks.storage.process_notes import is_gone, this_process


def _notes() -> Path:
    return Path(PREFECT_HOME.value()) / "flow-runs"


@contextlib.contextmanager
def noted(flow_run_id: str) -> Iterator[None]:
    """Leaves the note while inside."""
    note = _notes() / f"{flow_run_id}.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(this_process()), encoding="utf-8")
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def close_abandoned() -> list[str]:
    """Marks this machine's runs without a process as Crashed; returns their names."""
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
        except ObjectNotFound:  # of a server that was removed
            note.unlink(missing_ok=True)
            return []
        state = Crashed(message="The process of this run is gone; ask for the deployment again to resume.")
        left = flow_run.state is not None and not flow_run.state.is_final()
        if left:
            client.set_flow_run_state(flow_run.id, state, force=True)
    close_runs_of_flow(None, flow_run, state)
    note.unlink(missing_ok=True)
    return [flow_run.name] if left else []


if __name__ == "__main__":
    for name in close_abandoned():
        print(f"flow run {name}: its process is gone, marked as crashed")
