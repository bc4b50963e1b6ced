"""A tool that takes the pictures in docs/: MLflow and Prefect pages of real runs.

    python -m benchmarks.screenshots --deployment quickstart      # after compare-strategies/quickstart

Needs Chromium (Debian: apt-get install chromium) and the package websockets, which Prefect brings. Starts
both servers on loopback over the storage root, opens each page in headless Chromium, waits until every
strategy and every other name that it must show is in it, and writes docs/*.png (charts are cropped by hand).
Prints one line of JSON.
"""

from __future__ import annotations

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

from benchmarks.support import command
from dflash_core.telemetry import NO_TELEMETRY

# Limit for a page to show the names that it must.
PAGE_SECONDS = 90.0
# Charts are drawn after that.
SETTLE_SECONDS = 3.0
WIDTH = 1600
CHARTS = (
    "final/(tokens_per_second|padding|mixing_step|throughput|loss_last|validation)|train/loss|perf/tokens"
)
MLFLOW_PORT, PREFECT_PORT = "5011", "4211"


@contextmanager
def server(arguments: list[str], url: str, environment: dict[str, str]) -> Iterator[None]:
    """Run `python -m ARGUMENTS` as long as the body runs, which starts once `url` answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(url, timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        else:
            sys.exit(f"{arguments[0]} did not answer at {url}")
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


class Browser:
    """A page of headless Chromium, controlled through the DevTools protocol."""

    def __init__(self, stack: ExitStack) -> None:
        from websockets.sync.client import connect

        names = ("chromium", "chromium-browser", "google-chrome")
        executable = next(filter(None, map(shutil.which, names)), None)
        if executable is None:
            sys.exit("Chromium is not installed; on Debian: apt-get install chromium")
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        arguments = [executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
        while not port_file.exists() or "\n" not in port_file.read_text():
            if time.monotonic() > deadline:
                sys.exit("Chromium did not start")
            time.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
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
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def wait_for(self, wanted: Sequence[str]) -> None:
        """Return once the page contains every wanted text; exit when one does not appear in time."""
        deadline, missing = time.monotonic() + PAGE_SECONDS, list(wanted)
        while missing:
            page = self.evaluate("document.body ? document.body.textContent : ''") or ""
            missing = [text for text in wanted if text not in page]
            if missing and time.monotonic() > deadline:
                address = self.evaluate("location.href")
                sys.exit(f"{address}: not in the page: {', '.join(missing)}; it contains: {page[:2000]}")
            time.sleep(0.5)

    def open(self, url: str, *, wanted: Sequence[str], height: int = 1000) -> None:
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        # An address that differs only after # would not be loaded.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_for(wanted)

    def sign_in(self, prefect_url: str, auth: str) -> None:
        """Keep Prefect's authentication string where its login page keeps it."""
        self.call("Page.navigate", url=f"{prefect_url}/robots.txt")
        self.wait_for(["User-agent"])
        password = json.dumps(base64.b64encode(auth.encode()).decode())
        self.evaluate(f"localStorage.setItem('prefect-password', {password})")

    def close_assistant(self) -> None:
        """Close the panel that MLflow opens on the right; its cross is the button in the corner."""
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
    """Take the table that compares the runs of one comparison, and their charts."""
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
    """Take the flow run's page with its tasks, and its table of plans."""
    browser.open(f"{url}/runs/flow-run/{flow_run.id}", wanted=[flow_run.name, *report["strategies"]])
    browser.picture(out / "prefect-run.png")
    browser.open(f"{url}/artifacts/artifact/{plans}", wanted=list(report["strategies"]))
    browser.picture(out / "prefect-artifacts.png")


def environment_of(root: Path) -> dict[str, str]:
    """Return the environment of both servers."""
    environment = {
        **os.environ,
        "PREFECT_HOME": str(root / "prefect"),
        **NO_TELEMETRY,
    }
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        environment.pop(name, None)
    return environment


def newest_comparison() -> tuple[Any, str]:
    """Return the newest flow run of compare-strategies, and the id of its table of plans."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort

    with get_client(sync_client=True) as prefect:
        flows = FlowFilter(name=FlowFilterName(any_=["compare-strategies"]))
        [flow_run, *_] = prefect.read_flow_runs(flow_filter=flows, sort=FlowRunSort.START_TIME_DESC, limit=1)
        key = f"plans-compare-{flow_run.parameters['deployment']}"
        tables = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        [plans, *_] = prefect.read_artifacts(artifact_filter=tables, sort=ArtifactSort.CREATED_DESC, limit=1)
    return flow_run, str(plans.id)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--deployment", default="quickstart", help="shows its latest comparison")
    parser.add_argument("--storage-root", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    root = args.storage_root.resolve()
    report = json.loads((root / f"compare-{args.deployment}" / "latest" / "report.json").read_text())
    environment = environment_of(root)
    mlflow_url, prefect_url = f"http://127.0.0.1:{MLFLOW_PORT}", f"http://127.0.0.1:{PREFECT_PORT}"
    os.environ |= {"PREFECT_API_URL": f"{prefect_url}/api", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with ExitStack() as stack:
        over_root = ["--storage-root", str(root)]
        arguments = ["flows.runtime.mlflow_server", "--port", MLFLOW_PORT, "--workers", "1", *over_root]
        stack.enter_context(server(arguments, f"{mlflow_url}/health", environment))
        arguments = ["flows.runtime.server", "--port", PREFECT_PORT, *over_root]
        stack.enter_context(server(arguments, f"{prefect_url}/api/health", environment))
        auth = (root / "prefect" / "auth-string").read_text().strip()
        os.environ["PREFECT_API_AUTH_STRING"] = auth
        import mlflow

        browser = Browser(stack)
        browser.sign_in(prefect_url, auth)
        client = mlflow.MlflowClient(f"sqlite:///{root}/mlflow.db")
        mlflow_pictures(browser, mlflow_url, client, report, args.out)
        flow_run, plans = newest_comparison()
        prefect_pictures(browser, prefect_url, flow_run, plans, report, args.out)
    pictures = sorted(str(path) for path in args.out.glob("*.png"))
    strategies = list(report["strategies"])
    command.print_json({"runs": report["runs"], "strategies": strategies, "pictures": pictures})


if __name__ == "__main__":
    main()
