"""The console command of the installed package.

train-dflash FLOW NAME [--param KEY=JSON ...]        # as python -m flows.<flow> NAME, from any directory
train-dflash demo NAME                               # as python -m flows.demo NAME
train-dflash publish NAME --repo OWNER/NAME          # as python -m flows.publish NAME ...
train-dflash serve                                   # as python -m flows.runtime.worker
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import textwrap

from dflash_core.errors import UserError
from flows.runtime import cli, deployments, worker

COMMAND = "train-dflash"
# Commands that are no flows, with their summaries; each is a module of `flows` with a function `main`.
TOOLS = {
    "demo": "plain and speculative decoding side by side, with a trained drafter",
    "publish": "push a drafter to the Hugging Face Hub",
}


def _help() -> str:
    """Return the help text: usage, flows with their deployments, examples."""
    width = max(map(len, deployments.FLOWS)) + 4
    flows = []
    for flow_name, info in deployments.FLOWS.items():
        names = ", ".join(deployments.deployments(flow_name)) or "none"
        flows += [f"  {flow_name}".ljust(width) + info.summary]
        flows += [textwrap.indent(textwrap.fill(f"deployments: {names}", 100 - width), " " * width)]
    return "\n".join(
        [
            f"usage: {COMMAND} FLOW NAME [--param KEY=JSON ...] [--show]",
            f"       {COMMAND} FLOW --help",
            *(f"       {COMMAND} {name} NAME [...]  ({summary})" for name, summary in TOOLS.items()),
            f"       {COMMAND} serve [--port PORT] [--storage-root DIRECTORY]",
            f"       {COMMAND} --help | --version",
            "",
            "Run a flow with the parameters of its deployment NAME, or serve all deployments with a UI.",
            "",
            f"flows, with their deployments in {deployments.prefect_yaml()}:",
            *flows,
            "",
            "examples:",
            f"  {COMMAND} train-dflash quickstart",
            f"  {COMMAND} rebucket quickstart --param 'data=[\"chats.jsonl\"]'",
        ]
    )


def _run(arguments: list[str]) -> int:
    match arguments:
        case []:
            print(_help(), file=sys.stderr)
            return cli.EXIT_USER_ERROR
        case ["--help" | "-h"]:
            return cli.print_text(_help())
        case ["--version"]:
            return cli.print_text(f"{COMMAND} {importlib.metadata.version('train-dflash')}")
        case [tool, *rest] if tool in TOOLS:
            module = importlib.import_module(f"flows.{tool}")
            return int(module.main(rest, command=f"{COMMAND} {tool}"))
        case ["serve", *rest]:
            return worker.main(rest, command=f"{COMMAND} serve")
        case [flow_name, *rest] if flow_name in deployments.FLOWS:
            return cli.main(flow_name, rest, command=f"{COMMAND} {flow_name}")
    allowed = ", ".join([*deployments.FLOWS, *TOOLS, "serve", "--help", "--version"])
    example = f"{COMMAND} train-dflash quickstart"
    raise UserError(f"FLOW: {arguments[0]!r} is not allowed; allowed: {allowed}; example: {example}")


def main(argv: list[str] | None = None) -> int:
    """Run the console command and return the exit code; `argv` None: the arguments of this process."""
    # The user's directory may hold packages with the names of ours, such as flows or tasks. Neither this
    # process nor the Python processes that it starts import from there.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.EXIT_USER_ERROR
