"""A decoding step on a CPU, plain and speculative, against transformers' `generate` and the speed of memory.

    python -m benchmarks.decoding                                      # about 15 minutes on two cores
    python -m benchmarks.decoding --dtypes bfloat16 --batches 1        # 3 minutes
    python -m benchmarks.decoding --tiny                               # a rehearsal: seconds

SmolLM2-135M with prompts of 64 random tokens. Sides, in turns in one process, each the best of `--repeats`:

* ours, plain: `plain_decode`, milliseconds per token;
* ours, speculative: `speculative_decode` with a drafter of one layer (`--drafter`: a directory of an exported
  one), milliseconds per step of drafting and verifying, whatever is accepted;
* generate: the fastest of its settings here (`GENERATE`), milliseconds per token;
* memory: reading the weights of the layers and of lm_head once, at the speed at which this process reads
  256 MB with the same number of threads.

Differences of two lengths of answers, so the prompts' own pass is not in them. Compare ratios of one run; on
a busy machine those of `--cpu`, CPU seconds with one thread. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import command
from benchmarks.support.tiny_target import MASK_TOKEN_ID, make_tiny_target
from dflash_core.config import DrafterConfig
from dflash_core.decoding.int8 import as_decoded
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_decode, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import load_drafter
from dflash_core.drafter.shape import drafter_shape
from dflash_core.target.captured_layers import captured_layers
from dflash_core.target.materialise import materialise
from dflash_core.target.shape import read_shape
from dflash_core.target.target import Target

PROMPT_TOKENS = 64
READ_BYTES = 256 << 20
# Settings of `generate`: attention and cache.
GENERATE = [("sdpa", "dynamic"), ("eager", "dynamic"), ("sdpa", "static")]
Side = Callable[[int], int]


@dataclass
class Bench:
    """A target, its drafters and transformers' own model, in one dtype."""

    target: Target
    drafters: dict[int, DFlashDrafter]
    model: Any

    def weight_bytes(self) -> int:
        """Return the size of what one token has to read: all layers and lm_head."""
        weights = [*self.target.layers.parameters(), self.target.head_weight]
        return sum(w.numel() * w.element_size() for w in weights)


def load(
    directory: Path, dtype: str, block_sizes: list[int], drafter: Path | None, drafter_dtype: str
) -> Bench:
    """Load all sides; drafters are random unless one is given, which then sets layers and block size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = read_shape(AutoConfig.from_pretrained(directory))
    settings = DrafterConfig(num_captured_layers=min(5, max(1, shape.num_layers - 3)))
    given = None if drafter is None else load_drafter(drafter)
    layer_ids = given.shape.target_layer_ids if given else captured_layers(settings, shape.num_layers)
    target = Target.load(directory, layer_ids=layer_ids, compute_dtype=dtype)
    # Answers end at their length alone.
    target.eos_ids = ()
    drafters = [given] if given else [random_drafter(target, size) for size in block_sizes]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    decoded = {d.shape.block_size: as_decoded(d, target, drafter_dtype) for d in drafters}
    return Bench(target, decoded, model)


def random_drafter(target: Target, block_size: int) -> DFlashDrafter:
    config = DrafterConfig(num_layers=1, block_size=block_size, mask_token_id=MASK_TOKEN_ID)
    return DFlashDrafter(drafter_shape(read_shape(target.config), config, target.layer_ids))


def sides(bench: Bench, batch: int) -> dict[str, Side]:
    """Return each side as a function of the number of new tokens that returns its number of steps."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = bench.target.embed_weight.shape[0]
    ids = torch.randint(4, vocabulary, (batch, PROMPT_TOKENS), generator=generator)
    prompts = [Prompt(token_ids=tuple(row)) for row in ids.tolist()]

    def plain(num_new: int) -> int:
        plain_decode(bench.target, prompts, Sampling(max_new_tokens=num_new, batch_size=batch))
        return num_new - 1

    def speculative(block_size: int, num_new: int) -> int:
        sampling = Sampling(max_new_tokens=num_new, batch_size=batch)
        decoded = speculative_decode(bench.target, bench.drafters[block_size], prompts, sampling)
        return max(len(answer.emitted) for answer in decoded.generations)

    def generate(attention: str, cache: str, num_new: int) -> int:
        bench.model.set_attn_implementation(attention)
        bench.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
            disable_compile=True,
        )
        return num_new - 1

    return {
        "plain": plain,
        **{f"speculative {size}": partial(speculative, size) for size in bench.drafters},
        **{f"generate {name} {cache}": partial(generate, name, cache) for name, cache in GENERATE},
    }


def measure(bench: Bench, batch: int, args: Namespace) -> dict[str, Any]:
    """Return milliseconds per step of each side, and of reading the weights once."""
    clock = time.process_time if args.cpu else time.perf_counter
    read = torch.ones(READ_BYTES // 4)
    # (side, new tokens) -> seconds, the best of all repeats; short and long answers have their own best.
    best: dict[tuple[str, int], float] = {}
    steps: dict[tuple[str, int], int] = {}
    lengths = (2, 2 + args.steps)
    all_sides = sides(bench, batch)
    read_seconds = math.inf
    for _ in range(args.repeats):
        for name, num_new in itertools.product(all_sides, lengths):
            started = clock()
            steps[name, num_new] = all_sides[name](num_new)
            best[name, num_new] = min(best.get((name, num_new), math.inf), clock() - started)
        started = clock()
        read.sum()
        read_seconds = min(read_seconds, clock() - started)

    def per_step(name: str) -> float:
        short, long = lengths
        more_steps = steps[name, long] - steps[name, short]
        return 1e3 * (best[name, long] - best[name, short]) / max(more_steps, 1)

    figures = {name: per_step(name) for name in all_sides}
    generates = {name: figures.pop(name) for name in all_sides if name.startswith("generate")}
    setting = min(generates, key=generates.__getitem__)
    memory = 1e3 * read_seconds * bench.weight_bytes() / READ_BYTES
    speed = READ_BYTES / 1e9 / read_seconds
    return {
        **figures,
        "generate": generates[setting],
        "generate_setting": setting,
        "memory": memory,
        "gigabytes_per_second": speed,
    }


def configurations(args: Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of each dtype, number of threads and batch size."""
    before = torch.get_num_threads()
    try:
        for dtype in args.dtypes:
            bench = load(directory, dtype, args.block_sizes, args.drafter, args.drafter_dtype)
            for threads, batch in itertools.product(args.threads, args.batches):
                torch.set_num_threads(threads)
                found = measure(bench, batch, args)
                yield {"dtype": dtype, "threads": threads, "batch": batch, **found}
    finally:
        torch.set_num_threads(before)


def row(figures: dict[str, Any]) -> str:
    """Return a line of the table: milliseconds, and the ratios that matter."""
    plain = figures["plain"]
    steps = [value for name, value in figures.items() if name.startswith("speculative")]
    return (
        f"{figures['dtype']:<9} {figures['threads']:>7} {figures['batch']:>5} {figures['memory']:>7.1f} "
        f"{figures['generate']:>9.1f} {plain:>7.1f} {plain / figures['generate']:>9.2f} "
        f"{plain / figures['memory']:>7.2f}  "
        + "  ".join(f"{step:>7.1f} {step / plain:>5.2f}" for step in steps)
    )


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--target", type=Path, default=Path("runs/benchmark-target"))
    parser.add_argument("--drafter", type=Path, help="directory of an exported drafter")
    parser.add_argument("--drafter-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=16, help="steps behind each figure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of wall time; one thread")
    parser.add_argument("--tiny", action="store_true", help="a tiny random target")
    args = parser.parse_args()
    if args.cpu:
        args.threads = [1]
    with tempfile.TemporaryDirectory() as temporary:
        directory = make_tiny_target(Path(temporary) / "tiny") if args.tiny else args.target
        if not directory.exists():
            materialise("smollm2-135m-instruct", directory)
        names = [f"block {size}" for size in args.block_sizes] if args.drafter is None else ["drafter"]
        print("milliseconds per step; ratios of plain to generate and to memory, of speculative to plain")
        print(f"{'dtype':<9} threads batch  memory  generate   plain /generate /memory  ", end="")
        print("  ".join(f"{name:>7} ratio" for name in names), flush=True)
        rows = []
        for figures in configurations(args, directory):
            rows.append(figures)
            print(row(figures), flush=True)
    command.print_json({"clock": "cpu" if args.cpu else "wall", "rows": rows})


if __name__ == "__main__":
    main()
