"""Stage `regenerate`, one task a file, off by default: the target writes the assistant turns of the data anew."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, RegenerateConfig, RunConfig, decisive, from_dict, to_dict
from tasks.ingest import Source, load_tokenizer
from tasks.storage.file_digests import FileDigests
from tasks.storage.stages import RETRY_IO, stage

_loaded: dict[tuple[str, ...], Any] = {}  # the target between one file and the next, see `release_target`


@stage(
    "regenerate",
    version=3,
    sources=("dflash_core.data.regenerate", "dflash_core.data.endpoint", "dflash_core.decoding.generate"),
    key_only=("source_digest", "rules", "sampling"),
    locations=("where",),
    timeout_seconds=None,  # a large file takes days; requests have limits, and answers are kept
    **RETRY_IO,
)
def regenerate(
    out: Path,
    *,
    source_name: str,
    model: dict[str, str],
    where: dict[str, Any],
) -> dict[str, Any]:
    """Writes the file's conversations with the target's answers into `out`, as JSONL of the same name."""
    from dflash_core.data.answers import AnswerCache
    from dflash_core.data.chat import ChatEncoder
    from dflash_core.data.regenerate import Progress, regenerate_file

    data: DataConfig = from_dict(DataConfig, where["data"])
    settings: RegenerateConfig = from_dict(RegenerateConfig, where["regenerate"])
    tokenizer = load_tokenizer(where["target_directory"], where["trust_remote_code"])
    name = f"{source_name.split('.')[0] or source_name}.jsonl"
    cache = AnswerCache(Path(where["cache"]))
    try:
        counts = regenerate_file(
            where["path"],
            out / name,
            data,
            ChatEncoder(tokenizer, data, None),
            _generator(settings, model, tokenizer, where),
            cache,
            cut_turns=settings.cut_turns,
            progress=Progress(source_name),
        )
    finally:
        cache.close()
    return {"source": source_name, "file": name, **counts}


def _generator(config: RegenerateConfig, model: dict[str, str], tokenizer: Any, where: dict[str, Any]) -> Any:
    if config.base_url is not None:
        from dflash_core.data.endpoint import Endpoint

        return Endpoint(config, model["model"], api_key=os.environ.get(config.api_key_env))
    from dflash_core.decoding.generate import BatchDecoder

    return BatchDecoder(_target(where), tokenizer, config, model)


def _target(where: dict[str, Any]) -> Any:
    import torch

    from dflash_core.target.target import Target

    device = "cuda" if torch.cuda.is_available() and where["device"] != "cpu" else "cpu"
    key = (where["target_directory"], where["compute_dtype"], device)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = Target.load(
            where["target_directory"],
            layer_ids=[0],  # decoding alone: what is captured is not read
            device=device,
            compute_dtype=where["compute_dtype"],
            trust_remote_code=where["trust_remote_code"],
            device_map=where["device_map"],
        )
    return _loaded[key]


@contextmanager
def target_for_all_files() -> Iterator[None]:
    """Inside, the target stays loaded from one file to the next; afterwards its memory is free for training."""
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
    config: RunConfig, source: Source, *, target: dict[str, Any], digests: FileDigests
) -> dict[str, Any]:
    """What decides the answers of one file: its bytes, who answers, how rows are read, the sampling."""
    settings = config.regenerate
    name = Path(config.target.name).name
    if settings.base_url is None:
        model = {"model": name, "fingerprint": target["fingerprint"]}
    else:
        model = {"model": settings.model or config.target.name, "base_url": settings.base_url}
    read = ("format", "limit", "columns", "roles", "reasoning", "max_length")
    rules = {key: value for key, value in decisive(config.data).items() if key in read}
    rules["tokenizer"] = target["tokenizer_fingerprint"]  # with its template, by which prompts are made
    if config.data.chat_template is not None:
        rules["chat_template"] = digests.of(Path(config.data.chat_template))
    decides = ("temperature", "seed", "max_new_tokens", "cut_turns")
    return {
        "source_digest": source.digest,
        "source_name": source.name,
        "model": model,
        "rules": rules,
        "sampling": {key: getattr(settings, key) for key in decides},
    }


def summary(pointer: dict[str, Any]) -> str:
    """What became of the rows of a file, in a line."""
    return (
        f"{pointer['num_answers']} answers in {pointer['num_rows']} rows, {pointer['num_cut']} cut at the limit, "
        f"{pointer['num_kept_turns']} turns kept, {pointer['num_refused']} rows refused"
    )


def regenerated_source(pointer: dict[str, Any], storage_root: Path) -> Source:
    """What ingest reads in place of the raw file."""
    return Source(str(storage_root / pointer["path"] / pointer["file"]), pointer["digest"])


def regenerated_data(data: DataConfig) -> DataConfig:
    """The rules by which ingest reads regenerated files: they are `messages`, whatever the raw files were."""
    return replace(data, format="messages", columns={}, roles={})


def cache_path(storage_root: Path) -> Path:
    """Where all answers are kept; `prune` leaves them, since they are what regeneration costs."""
    return storage_root / "store" / "answers.sqlite"


def where_of(config: RunConfig, source: Source, storage_root: Path, target_directory: Path) -> dict[str, Any]:
    """Paths and execution settings of one file's task."""
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
