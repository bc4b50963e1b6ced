"""Pictures of the MLflow and Prefect pages of real runs, for the README; checks that every strategy is on them.

    python -m benchmarks.screenshots --deployment compare-quickstart      # after compare-strategies/quickstart

Needs Chromium (Debian: apt-get install chromium). Starts both servers on loopback over the storage root, opens each
page in headless Chromium until its scripts have drawn it, fails when a strategy's name is not in the page, and writes
docs/*.png. Prints one line of JSON.

Written, and not run so far.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

DRAWN_MILLISECONDS = 30_000  # of virtual time for a page's scripts
SIZE = "1600,1000"


@contextmanager
def server(command: list[str], url: str, environment: dict[str, str]) -> Any:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(url, timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        else:
            sys.exit(f"{command[2]} did not answer at {url}")
        yield
    finally:
        process.terminate()
        process.wait(30)


class Browser:
    def __init__(self) -> None:
        found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if found is None:
            sys.exit("Chromium is not installed; on Debian: apt-get install chromium")
        self.command = [
            *(found, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--window-size={SIZE}", f"--virtual-time-budget={DRAWN_MILLISECONDS}"),
        ]

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, timeout=180)
        return done.stdout

    def picture(self, url: str, path: Path, *, wanted: list[str]) -> None:
        """Exits when a wanted text is not in the page."""
        page = self._run("--dump-dom", url)
        missing = [text for text in wanted if text not in page]
        if missing:
            sys.exit(f"{url}: not in the page: {', '.join(missing)}")
        path.parent.mkdir(exist_ok=True)
        self._run(f"--screenshot={path.resolve()}", url)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployment", default="compare-quickstart", help="whose latest comparison is shown")
    parser.add_argument("--storage-root", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    root = args.storage_root.resolve()
    report = json.loads((root / args.deployment / "latest" / "report.json").read_text())
    runs, strategies = report["runs"], list(report["strategies"])
    browser = Browser()
    environment = {
        **os.environ,
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    mlflow_url, prefect_url = "http://127.0.0.1:5011", "http://127.0.0.1:4211"
    os.environ.pop("PREFECT_API_URL", None)
    with ExitStack() as stack:
        store = ["--backend-store-uri", f"sqlite:///{root}/mlflow.db"]
        mlflow_command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            "5011",
            *store,
        ]
        stack.enter_context(server(mlflow_command, f"{mlflow_url}/health", environment))
        prefect_command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        stack.enter_context(
            server([*prefect_command, "--port", "4211"], f"{prefect_url}/api/health", environment)
        )
        import mlflow
        from prefect.client.orchestration import get_client

        client = mlflow.MlflowClient(f"sqlite:///{root}/mlflow.db")
        first = client.get_run(next(iter(runs.values())))
        experiment = first.info.experiment_id
        group = first.data.tags["experiment_group"]
        search = quote(f"tags.experiment_group = '{group}'")
        ids = quote(json.dumps(list(runs.values())))
        compare = f"{mlflow_url}/#/compare-runs?runs={ids}&experiments={quote(json.dumps([experiment]))}"
        charts = f"{mlflow_url}/#/experiments/{experiment}/runs?searchFilter={search}&compareRunsMode=CHART"
        names = [client.get_run(run).info.run_name for run in runs.values()]
        browser.picture(compare, args.out / "mlflow-compare.png", wanted=strategies)
        browser.picture(charts, args.out / "mlflow-charts.png", wanted=names)
        os.environ["PREFECT_API_URL"] = f"{prefect_url}/api"
        with get_client(sync_client=True) as prefect:
            flow_run = first.data.tags["prefect.flow_run_id"]
            name = prefect.read_flow_run(flow_run).name
        browser.picture(
            f"{prefect_url}/runs/flow-run/{flow_run}", args.out / "prefect-run.png", wanted=[name]
        )
    pictures = sorted(str(path) for path in args.out.glob("*.png"))
    print(json.dumps({"runs": runs, "strategies": strategies, "pictures": pictures}))


if __name__ == "__main__":
    main()
