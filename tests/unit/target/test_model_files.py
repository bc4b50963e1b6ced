"""Model directories of strangers: rejected with one message before anything is copied, built or executed."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_core.data.chat import load_tokenizer
from dflash_core.errors import UserError
from dflash_core.target.materialise import materialise

CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 4, "hidden_size": 2}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the files of a model, too small to run."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(
        {"embed": np.zeros((4, 2), np.float32), "norm": np.zeros(2, np.float32)}, directory / "m.safetensors"
    )
    write(directory, "config.json", CONFIG)
    write(directory, "tokenizer_config.json", {})
    return directory


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def refused(model: Path, match: str) -> None:
    """Check that the model is rejected with one message that names its setting, and that nothing is left."""
    out = model.parent / "out"
    with pytest.raises(UserError, match=match) as error:
        materialise(str(model), out)
    assert str(error.value).startswith("target.name: ")
    assert sorted(p.name for p in model.parent.iterdir() if p.name != "secret") == ["model"]


def test_a_sound_directory_is_taken(model: Path) -> None:
    materialise(str(model), model.parent / "out")
    assert (model.parent / "out" / "m.safetensors").is_file()


@pytest.mark.parametrize("name", ["extra.json", "vocab.txt", "code.py", "additional_chat_templates"])
def test_links_that_leave_the_directory_are_rejected(model: Path, name: str) -> None:
    secret = model.parent / "secret"
    secret.mkdir()
    write(secret, "rag.jinja", "a secret")
    (model / name).symlink_to(secret if name.startswith("additional") else secret / "rag.jinja")
    refused(model, "outside of the directory; allowed: files of the directory itself")


def test_links_to_what_is_no_weights_are_rejected(model: Path) -> None:
    (model / "n.safetensors").symlink_to("/etc/passwd")
    refused(model, r"n\.safetensors cannot be read: .*header.*allowed: safetensors weights")


def test_links_inside_the_hub_cache_work(model: Path) -> None:
    cache = model.parent / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        blob = cache / "blobs" / f"{path.name}-digest"
        path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    materialise(str(snapshot), model.parent / "out")
    assert json.loads((model.parent / "out" / "config.json").read_text()) == CONFIG


def header(length: int, entries: Any, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", length or len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        header(2**60, {}),
        header(0, {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}),
        header(0, {"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}}, bytes(16)),
        header(0, {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 16]}}, bytes(16)),
        header(0, {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, bytes(16)),
        b"",
    ],
    ids=["length", "offsets", "overflow", "shape", "negative", "empty"],
)
def test_lying_headers_of_weights_are_rejected(model: Path, content: bytes) -> None:
    (model / "m.safetensors").write_bytes(content)
    refused(model, "cannot be read: .*allowed: safetensors weights")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 2**40),
        ("hidden_size", -1),
        ("hidden_size", float("nan")),
        ("intermediate_size", 1e9),
        ("num_attention_heads", "8"),
        ("vocab_size", True),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_rejected(model: Path, key: str, value: Any) -> None:
    write(model, "config.json", {**CONFIG, key: value})
    refused(model, f"config.json: {key} is .*allowed by its weights")
    write(model, "config.json", {"text_config": {**CONFIG, key: value}})
    refused(model, f"config.json: {key} is .*allowed by its weights")


def test_an_embedding_larger_than_the_weights_is_rejected(model: Path) -> None:
    write(model, "config.json", {**CONFIG, "vocab_size": 100, "hidden_size": 100})
    refused(model, "vocab_size 100 times hidden_size 100 is more than its weights hold")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("config.json", "[]", "allowed: a JSON object"),
        ("config.json", '{"a": ', "cannot be read"),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}', "allowed: a token id, or a list of them"),
        ("tokenizer_config.json", '{"vocab_file": "/etc/passwd"}', "names of files next to it"),
        (
            "m.safetensors.index.json",
            '{"weight_map": {"a": "../model/config.json"}}',
            "names of files next to it",
        ),
    ],
)
def test_damaged_or_hostile_configurations_are_rejected(
    model: Path, name: str, text: str, words: str
) -> None:
    write(model, name, text)
    refused(model, words)


def test_a_path_that_only_the_author_had_is_left_alone(model: Path) -> None:
    write(model, "tokenizer_config.json", {"tokenizer_file": "/home/author/tokenizer.json"})
    materialise(str(model), model.parent / "out")


def test_code_in_pickled_weights_is_not_executed(model: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return Path.touch, (model.parent / "made",)

    (model / "m.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Touch()}, protocol=2))
    write(model, "config.json", {**CONFIG, "num_attention_heads": 1, "intermediate_size": 2})
    refused(model, "does not load as a causal language model")


def test_code_of_the_model_is_not_executed(model: Path) -> None:
    (model / "m.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    made = model.parent / "made"
    write(model, "code.py", f"import pathlib\npathlib.Path({str(made)!r}).touch()\nclass C: pass\n")
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"}
    write(model, "config.json", {"model_type": "unknown", "auto_map": auto_map})
    refused(model, "does not load as a causal language model: .*`trust_remote_code=True`")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"version": "1.0", "model": 3}'),
        (
            "tokenizer_config.json",
            '{"auto_map": {"AutoTokenizer": ["code.C", null]}, "tokenizer_class": "C"}',
        ),
    ],
)
def test_a_tokenizer_that_is_damaged_or_code_is_one_message(model: Path, name: str, text: str) -> None:
    made = model.parent / "made"
    write(model, "code.py", f"import pathlib\npathlib.Path({str(made)!r}).touch()\nclass C: pass\n")
    write(model, name, text)
    with pytest.raises(UserError, match=r"target\.name: the tokenizer in .* does not load: ") as error:
        load_tokenizer(str(model), trust_remote_code=False)
    assert "\n" not in str(error.value)
    assert not made.exists()
