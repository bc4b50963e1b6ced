"""Push a trained drafter to a repository on the Hugging Face Hub.

    python -m flows.publish quickstart --repo OWNER/NAME --dry-run
    python -m flows.publish quickstart --repo OWNER/NAME

Only the files that a drafter consists of are pushed. A repository that does not exist is created, private
unless `--public` is given. The token is that of the environment (HF_TOKEN, or a login of huggingface_hub), or
of the variable that `--token env:NAME` names; it is written nowhere. The run's MLflow model version gets the
tag `published`, the address of the commit.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE, drafter_directory
from dflash_core.errors import UserError
from dflash_core.redaction import redact
from dflash_core.references import secret_value
from flows.runtime import cli, deployments
from tasks.model_card import CARD_FILE
from tasks.storage import run_directory as runs

COMMAND = "python -m flows.publish"
FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)


def token_of(reference: str | None) -> str | None:
    """Return the token that `env:NAME` refers to; None leaves the choice to huggingface_hub.

    Raises:
        UserError: not such a reference, or the variable is not set.
    """
    if reference is None:
        return None
    if not re.fullmatch(r"env:[A-Za-z_]\w*", reference):
        # The value itself may be the token.
        raise UserError("--token: the value is not allowed; allowed: env:NAME, the variable that holds it")
    return secret_value(reference, "--token")


def push(api: Any, drafter: Path, repo: str, *, private: bool) -> str:
    """Create the repository if there is none, push the drafter's files in one commit; return its address.

    Raises:
        UserError: the Hub refuses, or does not answer.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            repo_type="model",
            folder_path=str(drafter),
            allow_patterns=list(FILES),
            commit_message="DFlash drafter",
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(redact(str(error)).split())
        raise UserError(
            f"--repo: {repo!r} cannot be written: {reason}; allowed: a repository that the token may write"
        ) from None
    return str(commit.commit_url)


def run(arguments: argparse.Namespace) -> int:
    """Push, or print what would be pushed, and return the exit code.

    Raises:
        UserError: there is no drafter, a wrong name or token, or the Hub refuses.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", arguments.repo):
        raise UserError(f"--repo: {arguments.repo!r} is not allowed; allowed: OWNER/NAME")
    config, _ = deployments.resolve("train-dflash", arguments.name, cli.parse_params(arguments.param))
    path = Path(arguments.drafter).expanduser() if arguments.drafter else runs.latest_directory(config)
    drafter = drafter_directory(path, field="--drafter" if arguments.drafter else arguments.name).resolve()
    token = token_of(arguments.token)
    files = [drafter / name for name in FILES if (drafter / name).is_file()]
    for file in files:
        print(f"{file.name}  {file.stat().st_size:,} bytes")
    kind = "public" if arguments.public else "private"
    if arguments.dry_run:
        print(f"would be pushed to {arguments.repo} ({kind} if it is created)")
        return 0
    from huggingface_hub import HfApi

    address = push(HfApi(token=token), drafter, arguments.repo, private=not arguments.public)
    print(f"published: {address}")
    if (drafter.parent / "mlflow.json").is_file():
        cli.set_environment(config.storage_root)
        from tasks.reporting.mlflow_client import tag_drafter

        run_id = runs.read_json(drafter.parent / "mlflow.json")["run_id"]
        tag_drafter(config, run_id, f"dflash-{config.deployment}", {"published": address})
    return 0


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=command, description=__doc__.partition("\n\n")[0], allow_abbrev=False
    )
    result.add_argument("name", help="a deployment whose latest run has a drafter, such as quickstart")
    result.add_argument("--repo", required=True, metavar="OWNER/NAME", help="the repository on the Hub")
    result.add_argument("--drafter", metavar="DIRECTORY", help="another run, or an exported drafter")
    result.add_argument("--public", action="store_true", help="a repository that is created is public")
    result.add_argument("--token", metavar="env:NAME", help="the variable that holds the token (HF_TOKEN)")
    result.add_argument("--dry-run", action="store_true", help="print what would be pushed, and exit")
    result.add_argument("--param", "-p", action="append", default=[], metavar="KEY=JSON")
    return result


def main(argv: list[str] | None = None, *, command: str = COMMAND) -> int:
    """Run the command line and return its exit code; `argv` None: the arguments of this process."""
    try:
        return run(parser(command).parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.EXIT_USER_ERROR
    except KeyboardInterrupt:
        return cli.EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
