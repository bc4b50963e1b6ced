"""Stage `regenerate`, one task per file, off by default: the target rewrites the assistant turns of the data.

Answers are kept in one database under the storage root as they are made, so a stage that was interrupted
continues where it stopped, and equal prompts are answered once.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, RegenerateConfig, RunConfig, decisive, from_dict, to_dict
from dflash_core.references import secret_value
from tasks.ingest import Source
from tasks.storage.file_digests import FileDigests
from tasks.storage.pointers import RegeneratedPointer, TargetPointer
from tasks.storage.stages import RETRY_IO, stage

# The target, kept from one file to the next inside `target_for_all_files`.
_loaded: dict[tuple[str, ...], Any] = {}


@stage(
    "regenerate",
    version=6,
    sources=(
        "dflash_core.data.regenerate",
        "dflash_core.data.endpoint",
        "dflash_core.decoding.generate",
        "dflash_core.target.end_ids",
    ),
    key_only=("rules", "sampling"),
    locations=("where",),
    libraries=("torch", "transformers", "tokenizers", "jinja2"),
    is_costly=True,
    # A large file takes days; requests have limits, and answers are kept.
    timeout_seconds=None,
    **RETRY_IO,
)
def regenerate(
    out: Path,
    *,
    source_digest: str,
    source_name: str,
    model: dict[str, str],
    where: dict[str, Any],
) -> dict[str, Any]:
    """Write the file's conversations with the target's answers into `out`, as JSONL of the same name."""
    from dflash_core.data.answers import AnswerCache
    from dflash_core.data.chat import ChatEncoder, load_tokenizer
    from dflash_core.data.regenerate import Progress, regenerate_file

    data: DataConfig = from_dict(DataConfig, where["data"])
    settings: RegenerateConfig = from_dict(RegenerateConfig, where["regenerate"])
    tokenizer = load_tokenizer(where["target_directory"], trust_remote_code=where["trust_remote_code"])
    name = f"{source_name.split('.')[0] or source_name}.jsonl"
    cache = AnswerCache(Path(where["cache"]))
    try:
        counts = regenerate_file(
            where["path"],
            out / name,
            data,
            ChatEncoder(tokenizer, data, None),
            _generator(settings, data, model, tokenizer, where),
            cache,
            cut_turns=settings.cut_turns,
            digest=source_digest,
            progress=Progress(source_name),
        )
    finally:
        cache.close()
    return {"source": source_name, "file": name, **counts}


def _generator(
    config: RegenerateConfig, data: DataConfig, model: dict[str, str], tokenizer: Any, where: dict[str, Any]
) -> Any:
    """Return the generator of answers: the endpoint where one is named, else the target in this process."""
    if config.base_url is not None:
        from dflash_core.data.endpoint import Endpoint
        from dflash_core.target.end_ids import ends_unknown_to_engines

        stop_token_ids, remark = ends_unknown_to_engines(where["target_directory"], tokenizer, data)
        if remark:
            print(f"{remark}; the endpoint is asked to stop there (stop_token_ids)", flush=True)
        return Endpoint(
            config,
            model["model"],
            api_key=_api_key(config),
            stop_token_ids=stop_token_ids,
            template_arguments=data.template_arguments,
        )
    from dflash_core.decoding.generate import BatchDecoder

    target = _target(where)
    target.end_answers(tokenizer, data)
    return BatchDecoder(target, tokenizer, config, model)


def _target(where: dict[str, Any]) -> Any:
    import torch

    from dflash_core.target.target import Target

    device = "cuda" if torch.cuda.is_available() and where["device"] != "cpu" else "cpu"
    key = (where["target_directory"], where["compute_dtype"], device)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = Target.load(
            where["target_directory"],
            # Decoding needs no captured layers.
            layer_ids=[0],
            device=device,
            compute_dtype=where["compute_dtype"],
            trust_remote_code=where["trust_remote_code"],
            device_map=where["device_map"],
        )
    return _loaded[key]


@contextmanager
def target_for_all_files() -> Iterator[None]:
    """Keep the target loaded from one file to the next; afterwards its memory is free for training."""
    try:
        yield
    finally:
        if _loaded:
            _loaded.clear()
            gc.collect()
            import torch

            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def regenerate_inputs(
    config: RunConfig, source: Source, *, target: TargetPointer, digests: FileDigests
) -> dict[str, Any]:
    """Return the inputs that decide the answers of one file.

    They are its bytes, the model that answers, the rules by which rows are read, and the sampling.
    """
    settings = config.regenerate
    name = Path(config.target.name).name
    if settings.base_url is None:
        model = {"model": name, "fingerprint": target["fingerprint"]}
    else:
        model = {"model": settings.model or config.target.name, "base_url": settings.base_url}
    reading = ["format", "limit", "columns", "roles", "reasoning", "max_length"]
    reading += ["template_arguments", "template_date", "rewritten_history"]
    rules = {key: value for key, value in decisive(config.data).items() if key in reading}
    # The tokenizer comes with the chat template that makes the prompts.
    rules["tokenizer"] = target["tokenizer_fingerprint"]
    if config.data.chat_template is not None:
        rules["chat_template"] = digests.of(Path(config.data.chat_template))
    sampling = ("temperature", "seed", "max_new_tokens", "cut_turns")
    return {
        "source_digest": source.digest,
        "source_name": source.name,
        "model": model,
        "rules": rules,
        "sampling": {key: getattr(settings, key) for key in sampling},
    }


def summary_line(pointer: RegeneratedPointer) -> str:
    """Return the counts of a file's rows and answers in one line."""
    answers = f"{pointer['num_answers']} answers in {pointer['num_rows']} rows"
    turns = f"{pointer['num_cut']} cut at the limit, {pointer['num_kept_turns']} turns kept"
    line = f"{answers}, {turns}, {pointer['num_refused']} rows rejected"
    if pointer["num_rows_of_ids"]:
        line += f", {pointer['num_rows_of_ids']} rows kept as the target's own ids"
    if pointer["num_other_ids"]:
        line += f", {pointer['num_other_ids']} answers whose text encodes to another number of ids"
    return line


def regenerated_source(pointer: RegeneratedPointer, storage_root: Path) -> Source:
    """Return the file that ingest reads in place of the raw one."""
    return Source(str(storage_root / pointer["path"] / pointer["file"]), pointer["digest"])


def cache_path(storage_root: Path) -> Path:
    """Return the database of all answers; `prune` keeps it, for answers are the cost of regeneration."""
    return storage_root / "store" / "answers.sqlite"


def where_of(config: RunConfig, source: Source, storage_root: Path, target_directory: Path) -> dict[str, Any]:
    """Return paths and execution settings of one file's task: the input `where`."""
    return {
        "path": source.path,
        "cache": str(cache_path(storage_root)),
        "data": to_dict(config.data),
        "regenerate": to_dict(config.regenerate),
        "target_directory": str(target_directory),
        "trust_remote_code": config.target.trust_remote_code,
        "compute_dtype": config.target.compute_dtype,
        "device_map": config.target.device_map,
        "device": config.training.device,
    }


def _api_key(config: RegenerateConfig) -> str | None:
    """Return the endpoint's key, or None: endpoints on the own machine need none."""
    name = config.api_key_env
    return secret_value(f"env:{name}", "regenerate.api_key_env") if os.environ.get(name) else None
