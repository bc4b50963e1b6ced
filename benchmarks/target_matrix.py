"""Which targets run here, and how: tiny random checkpoints of every family, checked and decoded.

    python -m benchmarks.target_matrix                       # all families; minutes
    python -m benchmarks.target_matrix --only qwen3.5 lfm2
    python -m benchmarks.target_matrix --write docs/targets.md

For each family: the mode that `check_target` finds, and then greedy answers of that mode compared with those
of transformers alone (eager attention, whole forwards without a cache), once decoded plainly and once with a
drafter. `silent` counts families whose answers differ although no check has rejected them; it has to be 0.
Prints one line per family, then one line of JSON.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.support import command
from benchmarks.support.target_families import FAMILIES, PACKED, PADDED, SLOW, VOCABULARY, make_family
from dflash_core.config import DrafterConfig
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_decode, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.shape import drafter_shape
from dflash_core.errors import UserError
from dflash_core.target.check import TargetCheck, check_target
from dflash_core.target.shape import TargetShape
from dflash_core.target.target import Target

PROMPTS = [(5, 17, 90, 33, 21), (7, 8, 64, 101, 12, 40, 9, 77, 31)]
NEW_TOKENS = 8
TITLE = "# Targets"
INTRO = """One tiny random checkpoint per family of targets (`benchmarks/support/target_families.py`), written
by `python -m benchmarks.target_matrix --write docs/targets.md`. The stage `check-target` makes the same
comparison with your target at the start of every run, so a family that is missing here is found out in
seconds.

- **packed**: samples lie one after another without padding; decoding keeps keys and values.
- **padded**: layers other than attention mix tokens, so samples run in padded rows, and decoding reads each
  row again at every step: exact, and slow for long answers.
- **slow**: attention has terms that only the model's own code computes; padded rows, decoding as above.
- **rejected**: with the message that a run gives within the check.

Sizes, sliding windows and the choice of keys are small here; quantised checkpoints are not part of it.
"""
HEAD = "| family | published targets | runs | note |\n| --- | --- | --- | --- |"


class Outcome(NamedTuple):
    """How one family runs."""

    runs: str
    note: str
    is_silent: bool = False


def main() -> int:
    """Print the matrix; return 1 where an answer differs in silence or a family does not run as stated."""
    parser = command.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES), help="names of families")
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    _quiet()
    outcomes = {}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as directory:
            outcomes[name] = try_family(Path(directory), name)
        print(f"{name:20} {outcomes[name].runs:9} {outcomes[name].note}", flush=True)
    kinds = [outcome.runs for outcome in outcomes.values()]
    counts = {kind: kinds.count(kind) for kind in (PACKED, PADDED, SLOW, "rejected")}
    other = [name for name, outcome in outcomes.items() if not is_as_stated(name, outcome)]
    silent = [name for name, outcome in outcomes.items() if outcome.is_silent]
    if arguments.write:
        arguments.write.write_text(table(outcomes), encoding="utf-8")
    command.print_json({"families": len(outcomes), **counts, "silent": len(silent), "otherwise": other})
    return 1 if silent or other else 0


def try_family(directory: Path, name: str) -> Outcome:
    """Check a tiny checkpoint and compare its answers with those of transformers."""
    try:
        make_family(directory, name)
        check = check_target(directory)
        answers = decoded(directory, check)
    except UserError as error:
        return Outcome("rejected", str(error))
    mode = check.mode
    runs = SLOW if mode.eager else PACKED if mode.can_pack and mode.can_cache else PADDED
    expected = [own_answer(directory, prompt) for prompt in PROMPTS]
    if any(answer != expected for answer in answers):
        return Outcome(runs, f"SILENT: {answers}, transformers: {expected}", True)
    largest = max(d for path, d in check.differences.items() if d is not None and path not in check.reasons)
    return Outcome(runs, f"differs by {largest:.0e} at most")


def decoded(directory: Path, check: TargetCheck) -> list[list[list[int]]]:
    """Return the answers to all prompts, decoded plainly and with an untrained drafter."""
    target = Target.load(directory, layer_ids=[0, 1], compute_dtype="float32", mode=check.mode)
    target.eos_ids = ()
    shape = TargetShape(**check.shape)
    config = DrafterConfig(num_layers=1, block_size=4, mask_token_id=3)
    drafter = DFlashDrafter(drafter_shape(shape, config, target.layer_ids))
    prompts = [Prompt(token_ids=prompt) for prompt in PROMPTS]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, batch_size=2)
    both = plain_decode(target, prompts, sampling), speculative_decode(target, drafter, prompts, sampling)
    return [[list(generation.token_ids) for generation in one.generations] for one in both]


@torch.inference_mode()
def own_answer(directory: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return the greedy answer of transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def is_as_stated(name: str, outcome: Outcome) -> bool:
    """Return True where a family runs as its row says."""
    stated = FAMILIES[name].runs
    return outcome.runs == stated or (outcome.runs == "rejected" and stated in outcome.note)


def table(outcomes: dict[str, Outcome]) -> str:
    """Return the matrix as a page."""
    lines = [
        f"{TITLE}\n\n{INTRO}",
        "| family | published targets | runs | note |",
        "| --- | --- | --- | --- |",
    ]
    for name, outcome in outcomes.items():
        note = outcome.note.replace("|", "\\|")
        lines.append(f"| {name} | {FAMILIES[name].models} | {outcome.runs} | {note} |")
    return "\n".join(lines) + "\n"


def _quiet() -> None:
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    assert all(token < VOCABULARY for prompt in PROMPTS for token in prompt)
    sys.exit(main())
