"""Batched decoding of the target's answers compared with one prompt at a time: a ratio of tokens/s.

    python -m benchmarks.regenerate [--target NAME] [--dtype auto] [--prompts 32] [--batch-size 32]

Prompts are functions of the standard library in the target's own chat template. Decoding is greedy and
ignores the end token, so both sides write the same number of tokens. Rounds alternate, and the best round of
each side counts. With `--base-url` an OpenAI-compatible server on this machine answers the same prompts too,
as many at once as a batch holds (docs/serving.md has the command for vLLM); there answers end where the model
ends them. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import deque
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.capture import target_directory
from benchmarks.support import command
from dflash_core.config import DataConfig, RegenerateConfig
from dflash_core.data.answers import Generator, Request
from dflash_core.data.chat import ChatEncoder
from dflash_core.data.endpoint import Endpoint
from dflash_core.data.stdlib_corpus import corpus_rows
from dflash_core.decoding.generate import BatchDecoder
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.target import Target


def make_requests(encoder: ChatEncoder, count: int, longest: int) -> list[Request]:
    """Return the first prompts of at most `longest` tokens, taken at a stride through the corpus."""
    requests: list[Request] = []
    for row in itertools.islice(corpus_rows(), 0, None, 17):
        token_ids = encoder.prompt_ids(row["messages"][:1])
        if isinstance(token_ids, list) and len(token_ids) <= longest:
            requests.append(Request(f"{len(requests):032x}", row["messages"][:1], None, token_ids))
        if len(requests) == count:
            break
    return requests


def tokens_per_second(generator: Generator, prompts: list[Request]) -> float:
    started = time.perf_counter()
    tokens = sum(getattr(answer, "num_tokens", 0) for _, answer in generator.answers(deque(prompts)))
    return tokens / (time.perf_counter() - started)


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="alias, directory or hub name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--single", type=int, default=4, help="number of them that are decoded one by one")
    parser.add_argument("--longest", type=int, default=160, help="tokens of a prompt, at most")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--base-url", help="address of a server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="name of the model on that server; default: --target")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    directory: Path = target_directory(args.target)
    target = Target.load(directory, layer_ids=[0], device=args.device, compute_dtype=args.dtype)
    target.eos_ids = ()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = make_requests(ChatEncoder(tokenizer, DataConfig(), None), args.prompts, args.longest)
    spread = prompts[:: max(1, len(prompts) // args.single)][: args.single]
    sides: dict[str, tuple[Generator, list[Request]]] = {}
    for name, size, requests in (("one by one", 1, spread), ("batched", args.batch_size, prompts)):
        config = RegenerateConfig(max_new_tokens=args.new_tokens, batch_size=size)
        sides[name] = BatchDecoder(target, tokenizer, config, {}), requests
    if args.base_url:
        config = RegenerateConfig(
            max_new_tokens=args.new_tokens, base_url=args.base_url, concurrency=args.batch_size
        )
        sides["endpoint"] = Endpoint(config, args.model or args.target), prompts
    best = dict.fromkeys(sides, 0.0)
    for _ in range(args.rounds):
        for name, (generator, requests) in sides.items():
            best[name] = max(best[name], tokens_per_second(generator, requests))
    result = {
        "target": args.target,
        "compute_dtype": dtype_name(target.compute_dtype),
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "batch_size": args.batch_size,
        "new_tokens": args.new_tokens,
        "one_by_one_tokens_per_second": best["one by one"],
        "batched_tokens_per_second": best["batched"],
        "endpoint_tokens_per_second": best.get("endpoint"),
        "ratio": best["batched"] / best["one by one"],
    }
    for name, value in best.items():
        print(f"{name:12} {value:8.1f} tokens/s")
    print(f"{'ratio':12} {result['ratio']:8.2f}")
    command.print_json(result)


if __name__ == "__main__":
    main()
