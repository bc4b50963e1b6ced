"""Pictures of the MLflow and Prefect pages of real runs, for the README; checks that every strategy is on them.

    python -m benchmarks.screenshots --deployment quickstart      # after compare-strategies/quickstart

Needs Chromium (Debian: apt-get install chromium). Starts both servers on loopback over the storage root, opens each
page in headless Chromium, waits until the names it must show are in it, and writes docs/*.png. Prints one line of JSON.

The pictures in docs/ are from it (the charts cut out by hand).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

PAGE_SECONDS = 90.0  # for a page to show what it must
SETTLE_SECONDS = 3.0  # for charts to be drawn after that
WIDTH = 1600
CHARTS = (
    "final/(tokens_per_second|padding|mixing_step|throughput|loss_last|validation)|train/loss|perf/tokens"
)


@contextmanager
def server(command: list[str], url: str, environment: dict[str, str]) -> Iterator[None]:
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
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


class Browser:
    """One page of headless Chromium, by the DevTools protocol."""

    def __init__(self, stack: ExitStack) -> None:
        from websockets.sync.client import connect

        found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if found is None:
            sys.exit("Chromium is not installed; on Debian: apt-get install chromium")
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        command = [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        where, give_up = profile / "DevToolsActivePort", time.monotonic() + 60
        while not where.exists() or "\n" not in where.read_text():
            if time.monotonic() > give_up:
                sys.exit("Chromium did not start")
            time.sleep(0.1)
        port = where.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            [page] = [page for page in json.load(answer) if page["type"] == "page"]
        self._socket = stack.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
        self._calls = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == self._calls:
                return dict(answer["result"])

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def wait_for(self, wanted: Sequence[str]) -> None:
        """Exits when a wanted text does not come up in the page."""
        give_up, missing = time.monotonic() + PAGE_SECONDS, list(wanted)
        while missing:
            page = self.evaluate("document.body ? document.body.textContent : ''") or ""
            missing = [text for text in wanted if text not in page]
            if missing and time.monotonic() > give_up:
                address = self.evaluate("location.href")
                sys.exit(f"{address}: not in the page: {', '.join(missing)}; it says: {page[:2000]}")
            time.sleep(0.5)

    def open(self, url: str, *, wanted: Sequence[str], height: int = 1000) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTH,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url="about:blank")  # a new address after # alone loads nothing
        self.call("Page.navigate", url=url)
        self.wait_for(wanted)

    def close_assistant(self) -> None:
        """MLflow opens a panel at the right; its cross is the button in the corner."""
        self.evaluate(
            "[...document.querySelectorAll('button')].filter(b => { const r = b.getBoundingClientRect();"
            " return r.width && r.top < 70 && r.right > innerWidth - 50; }).forEach(b => b.click())"
        )

    def type_into(self, placeholder: str, text: str) -> None:
        self.evaluate(f"document.querySelector('input[placeholder={json.dumps(placeholder)}]').focus()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        time.sleep(SETTLE_SECONDS)
        path.parent.mkdir(exist_ok=True)
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


def mlflow_pictures(browser: Browser, url: str, client: Any, report: dict[str, Any], out: Path) -> None:
    """The table that compares the runs of one comparison, and their charts."""
    runs = [client.get_run(run_id) for run_id in report["runs"].values()]
    experiment = runs[0].info.experiment_id
    ids = quote(json.dumps([run.info.run_id for run in runs]))
    compare = f"{url}/#/compare-runs?runs={ids}&experiments={quote(json.dumps([experiment]))}"
    browser.open(compare, wanted=[*report["strategies"], "accept/position_1"], height=1300)
    browser.close_assistant()
    browser.picture(out / "mlflow-compare.png")
    search = quote(f"tags.experiment_group = '{runs[0].data.tags['experiment_group']}'")
    charts = f"{url}/#/experiments/{experiment}/runs?searchFilter={search}&compareRunsMode=CHART"
    browser.open(charts, wanted=[*(str(run.info.run_name) for run in runs), "Add chart"], height=1700)
    browser.type_into("Search metric charts", CHARTS)
    browser.wait_for(["final/padding_efficiency"])
    browser.picture(out / "mlflow-charts.png")


def prefect_pictures(
    browser: Browser, url: str, flow_run: Any, plans: str, report: dict[str, Any], out: Path
) -> None:
    """The flow run's page with its tasks, and its table of plans."""
    browser.open(f"{url}/runs/flow-run/{flow_run.id}", wanted=[flow_run.name, *report["strategies"]])
    browser.picture(out / "prefect-run.png")
    browser.open(f"{url}/artifacts/artifact/{plans}", wanted=list(report["strategies"]))
    browser.picture(out / "prefect-artifacts.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployment", default="quickstart", help="whose latest comparison is shown")
    parser.add_argument("--storage-root", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    root = args.storage_root.resolve()
    report = json.loads((root / f"compare-{args.deployment}" / "latest" / "report.json").read_text())
    environment = {
        **os.environ,
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_UI_API_URL": "http://127.0.0.1:4211/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    environment.pop("PREFECT_API_URL", None)
    mlflow_url, prefect_url = "http://127.0.0.1:5011", "http://127.0.0.1:4211"
    os.environ |= {"PREFECT_API_URL": f"{prefect_url}/api", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with ExitStack() as stack:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "5011"]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{root}/mlflow.db"]
        stack.enter_context(server(command, f"{mlflow_url}/health", environment))
        command = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            "4211",
        ]
        stack.enter_context(server(command, f"{prefect_url}/api/health", environment))
        import mlflow
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import (
            ArtifactFilter,
            ArtifactFilterKey,
            FlowFilter,
            FlowFilterName,
        )
        from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort

        browser = Browser(stack)
        client = mlflow.MlflowClient(f"sqlite:///{root}/mlflow.db")
        mlflow_pictures(browser, mlflow_url, client, report, args.out)
        with get_client(sync_client=True) as prefect:
            [flow_run, *_] = prefect.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=["compare-strategies"])),
                sort=FlowRunSort.START_TIME_DESC,
                limit=1,
            )
            key = f"plans-compare-{flow_run.parameters['deployment']}"
            [plans, *_] = prefect.read_artifacts(
                artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
                sort=ArtifactSort.CREATED_DESC,
                limit=1,
            )
        prefect_pictures(browser, prefect_url, flow_run, str(plans.id), report, args.out)
    pictures = sorted(str(path) for path in args.out.glob("*.png"))
    print(
        json.dumps({"runs": report["runs"], "strategies": list(report["strategies"]), "pictures": pictures})
    )


if __name__ == "__main__":
    main()
