"""Show plain and speculative decoding side by side, with a trained drafter, for any prompt.

    python -m flows.demo quickstart
    python -m flows.demo quickstart --prompt "What does os.path.join do?" --html demo.html

Needs neither a server nor a flow run: it reads a run that has been trained, and writes nothing but the page
that `--html` names. Each side decodes alone; the terminal and the page replay both at their measured pace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.config import RunConfig
from dflash_core.drafter.directory import drafter_directory
from dflash_core.errors import UserError
from flows.runtime import cli, deployments
from tasks.storage import run_directory as runs

if TYPE_CHECKING:
    from dflash_core.decoding.speculate import Prompt
    from tasks.reporting.demo_terminal import Comparison

COMMAND = "python -m flows.demo"
# Prompts of the run's validation samples that a user may choose from.
NUM_EXAMPLES = 3
# Without a run there is no data to take examples from.
EXAMPLES = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "How many prime numbers are there below 30? Think step by step.",
)
# Tokens decoded before the first measurement, which would otherwise include what only a first call costs.
WARM_UP_TOKENS = 8
EXAMPLE_CHARACTERS = 90


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The files of a demo."""

    drafter: Path
    target: Path
    config: RunConfig
    # The run that trained the drafter, or None.
    run: Path | None


def find_inputs(config: RunConfig, drafter_path: str | None) -> Inputs:
    """Find the drafter, its target and the settings of its run.

    Raises:
        UserError: the deployment has no finished run, there is no drafter at the path, or its target is not
            known.
    """
    latest = runs.latest_directory(config)
    if drafter_path is None and not (latest / "drafter").is_dir():
        raise UserError(
            f"{config.deployment}: {latest} holds no drafter; train one with python -m flows.train_dflash "
            f"{config.deployment}, or name one with --drafter"
        )
    path = Path(drafter_path).expanduser() if drafter_path is not None else latest
    drafter = drafter_directory(path, field="--drafter").resolve()
    for run in (drafter.parent, latest):
        if runs.read_run(run) is not None:
            return _inputs_of(run, drafter, config)
    if Path(config.target.name).is_dir():
        return Inputs(drafter=drafter, target=Path(config.target.name), config=config, run=None)
    raise UserError(
        f"--drafter: {str(drafter)!r} belongs to no run, and {config.deployment} has none whose target could "
        "be used; allowed: also --param target.name=DIRECTORY, the directory of its target"
    )


def _inputs_of(run: Path, drafter: Path, config: RunConfig) -> Inputs:
    """Return a run's target and its settings of target and data."""
    from dflash_core.training.run import RunSpec

    spec = RunSpec.load(run.resolve() / "run.json")
    used = replace(config, target=spec.config.target, data=spec.config.data)
    is_its_own = drafter.parent == run.resolve()
    return Inputs(drafter=drafter, target=spec.target, config=used, run=run.resolve() if is_its_own else None)


class Demo:
    """Target and drafter, loaded, and the prompts that they answer."""

    def __init__(self, inputs: Inputs, max_new_tokens: int) -> None:
        import torch
        from transformers.utils.logging import disable_progress_bar

        from dflash_core.data.chat import ChatEncoder, load_tokenizer
        from dflash_core.decoding.sampling import Sampling
        from dflash_core.drafter.export import load_drafter
        from dflash_core.target.compute_dtype import dtype_name
        from dflash_core.target.target import Target

        disable_progress_bar()
        config = inputs.config
        device = "cuda" if torch.cuda.is_available() and config.training.device != "cpu" else "cpu"
        drafter = load_drafter(inputs.drafter, device=device)
        self.target = Target.load(
            inputs.target,
            layer_ids=drafter.shape.target_layer_ids,
            device=device,
            compute_dtype=config.evaluation.compute_dtype,
            trust_remote_code=config.target.trust_remote_code,
            device_map=config.target.device_map,
        )
        self.drafter = drafter.to(self.target.compute_dtype)
        self.tokenizer = load_tokenizer(str(inputs.target), trust_remote_code=config.target.trust_remote_code)
        self.target.end_answers(self.tokenizer, config.data)
        self.encoder = ChatEncoder(self.tokenizer, config.data, None)
        temperature = config.evaluation.temperature
        self.sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, batch_size=1)
        self.inputs = inputs
        size = f"{drafter.num_parameters() / 1e6:.1f} million weights"
        self.about = (
            f"{config.target.name}, drafter of {size}, blocks of {drafter.shape.block_size}, "
            f"{dtype_name(self.target.compute_dtype)} on {device}, "
            + (f"temperature {temperature:g}" if temperature else "greedy")
            + ", one prompt at a time"
        )

    def warm_up(self) -> None:
        """Decode a few tokens with both."""
        from dflash_core.decoding.stream import decode_both

        sampling = replace(self.sampling, max_new_tokens=WARM_UP_TOKENS)
        decode_both(self.target, self.drafter, self.tokenizer, self.encode(EXAMPLES[0]), sampling)

    def encode(self, text: str) -> Prompt:
        """Return a user's turn as a prompt.

        Raises:
            UserError: the template rejects it, or it leaves no room for an answer.
        """
        return self._prompt([{"role": "user", "content": text}], None)

    def _prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Prompt:
        from dflash_core.data.chat import Rejection
        from dflash_core.decoding.speculate import Prompt

        ids = self.encoder.prompt_ids(messages, tools)
        if isinstance(ids, Rejection):
            raise UserError(f"prompt: {ids.reason} ({ids.detail})")
        limit = getattr(self.target.config, "max_position_embeddings", None)
        if limit is not None and len(ids) + self.sampling.max_new_tokens > limit:
            raise UserError(
                f"prompt: {len(ids)} tokens and {self.sampling.max_new_tokens} new ones; allowed: {limit}"
            )
        return Prompt(token_ids=tuple(ids))

    def read(self, path: Path) -> list[tuple[str, Prompt]]:
        """Return the prompts of a file: a prompt set, or for `.txt` and `.md` its text as one prompt."""
        from dflash_core.data.prompts import read_prompts

        if path.suffix in (".txt", ".md"):
            try:
                text = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeError) as error:
                raise UserError(f"--file: {path}: cannot be read ({error})") from error
            return [(text, self.encode(text))]
        chats = read_prompts(path, self.inputs.config.data)
        return [(str(chat.opening[-1]["content"]), self._prompt(chat.opening, chat.tools)) for chat in chats]

    def examples(self) -> list[tuple[str, Prompt]]:
        """Return prompts to choose from: of the run's validation samples, or general ones without a run."""
        from dflash_core.dataflow.schedule import validation_rows
        from dflash_core.decoding.prompt_sets import validation_prompts
        from dflash_core.training.run import RunSpec

        if self.inputs.run is None:
            return [(text, self.encode(text)) for text in EXAMPLES]
        store = RunSpec.load(self.inputs.run / "run.json").open_store()
        rows = validation_rows(store, 50)
        prompts = validation_prompts(store, rows, NUM_EXAMPLES, min_supervised_tokens=16)
        texts = [self.tokenizer.decode(p.token_ids, skip_special_tokens=True).strip() for p in prompts]
        return list(zip(texts, prompts))

    def compare(self, text: str, prompt: Prompt) -> Comparison:
        """Decode a prompt without and with the drafter."""
        from dflash_core.decoding.stream import decode_both
        from tasks.reporting.demo_terminal import Comparison

        plain, speculative = decode_both(self.target, self.drafter, self.tokenizer, prompt, self.sampling)
        block_size = self.drafter.shape.block_size
        return Comparison(prompt=text, plain=plain, speculative=speculative, block_size=block_size)


def choose(demo: Demo) -> Iterator[tuple[str, Prompt]]:
    """Ask for prompts until the user enters none; without a terminal, yield one example."""
    from dflash_core.decoding.stream import printable

    examples = demo.examples()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield from examples[:1]
        return
    while True:
        for number, (text, _) in enumerate(examples, 1):
            print(f"  {number}  {printable(' '.join(text.split()))[-EXAMPLE_CHARACTERS:]}")
        try:
            answer = input(f"prompt, or 1 to {len(examples)} (empty: end)> ").strip()
        except EOFError:
            return
        if not answer:
            return
        if answer.isdecimal() and 1 <= int(answer) <= len(examples):
            yield examples[int(answer) - 1]
            continue
        try:
            yield answer, demo.encode(answer)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit code.

    Raises:
        UserError: see `find_inputs`; or a prompt or a file cannot be used.
    """
    config, _ = deployments.resolve("train-dflash", arguments.name, cli.parse_params(arguments.param))
    if arguments.tokens < 1:
        raise UserError(f"--tokens: {arguments.tokens} is not allowed; allowed: >= 1")
    inputs = find_inputs(config, arguments.drafter)
    page = Path(arguments.html).expanduser() if arguments.html else None
    if page is not None and not page.absolute().parent.is_dir():
        raise UserError(f"--html: {str(page)!r} is not allowed; allowed: a file in a directory that exists")
    from rich.console import Console

    from tasks.reporting import demo_page, demo_terminal

    console = Console(highlight=False)
    print(f"loading {inputs.target.name} and {inputs.drafter}", file=sys.stderr, flush=True)
    demo = Demo(inputs, arguments.tokens)
    demo.warm_up()
    console.print(demo.about, markup=False)
    if arguments.prompt is not None:
        prompts = iter([(arguments.prompt, demo.encode(arguments.prompt))])
    elif arguments.file is not None:
        prompts = iter(demo.read(Path(arguments.file).expanduser()))
    else:
        prompts = choose(demo)
    comparisons = []
    for text, prompt in prompts:
        comparison = demo.compare(text, prompt)
        demo_terminal.show(comparison, console, text_of_prompt=arguments.prompt is None)
        comparisons.append(comparison)
        if page is not None:
            title = f"{config.deployment}: plain and speculative decoding"
            demo_page.write_page(page, comparisons, title=title, about=demo.about)
    if page is not None and comparisons:
        print(f"page: {page}")
    return 0


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=command, description=__doc__.partition("\n\n")[0], allow_abbrev=False
    )
    result.add_argument("name", help="a deployment whose latest run has a drafter, such as quickstart")
    result.add_argument("--drafter", metavar="DIRECTORY", help="another run, or an exported drafter")
    given = result.add_mutually_exclusive_group()
    given.add_argument("--prompt", metavar="TEXT", help="a user's turn; without it, you are asked")
    given.add_argument("--file", metavar="FILE", help="a prompt set (JSONL), or one prompt as .txt or .md")
    result.add_argument("--tokens", type=int, default=128, metavar="N", help="of an answer at most (128)")
    result.add_argument("--html", metavar="FILE", help="also write a page that replays the comparison")
    changes = "change one setting: evaluation.compute_dtype=bfloat16, evaluation.temperature=0.7, ..."
    result.add_argument("--param", "-p", action="append", default=[], metavar="KEY=JSON", help=changes)
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
