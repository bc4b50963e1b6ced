"""Captured states against a plain forward of each sample alone, in float32.

Bugs these catch: a later sample of a pack that sees an earlier one, states of a row that depend on its
neighbours or on padding, layer ids off by one, a normed state where the raw one is meant, positions that do
not restart.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.support.tiny_target import make_tiny_target, make_tiny_tokenizer
from dflash_core.config import DataConfig
from dflash_core.errors import UserError
from dflash_core.kernels.linear_cross_entropy import linear_argmax
from dflash_core.target.captured_layers import target_layer_ids
from dflash_core.target.decode_cache import DecodeCache
from dflash_core.target.mode import FAST, PADDED
from dflash_core.target.target import Target

LENGTHS = [5, 1, 17, 3, 9]
CU_SEQLENS = np.cumsum([0, *LENGTHS], dtype=np.int32)


def random_tokens(vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, vocab_size, size=sum(LENGTHS))


@torch.inference_mode()
def plain_states(model: torch.nn.Module, token_ids: np.ndarray) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each sample alone through transformers' own SDPA: raw outputs of every layer, and normed states."""
    raw: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.register_forward_hook(lambda module, args, output, keep=keep: keep.append(output[0]))
        for layer, keep in zip(model.model.layers, raw)
    ]
    normed = []
    for start, end in zip(CU_SEQLENS, CU_SEQLENS[1:]):
        out = model.model(input_ids=torch.as_tensor(token_ids[None, start:end]), output_hidden_states=True)
        normed.append(out.last_hidden_state[0])
        for layer in range(len(raw) - 1):  # id i is hidden_states[i + 1]; the last one is normed there
            assert torch.equal(out.hidden_states[layer + 1][0], raw[layer][-1])
        assert torch.equal(out.hidden_states[len(raw)][0], normed[-1])
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in raw], torch.cat(normed)


@pytest.fixture(scope="module")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head size apart from the width, norms on queries and keys, an untied head."""
    directory = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        tie_word_embeddings=False,
        initializer_range=0.15,
        eos_token_id=[2, 5],
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("width", [0, 17, 32], ids=["packed", "padded to the longest", "padded beyond"])
def test_captured_states_equal_a_plain_forward(
    family: str, width: int, tiny_target_dir: Path, qwen3_dir: Path
) -> None:
    directory = {"llama": tiny_target_dir, "qwen3": qwen3_dir}[family]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    num_layers = model.config.num_hidden_layers
    # The last layer's state is raw here, where transformers' own list holds the normed state.
    layer_ids = [0, 2, num_layers - 1]
    target = Target.load(directory, layer_ids=layer_ids, compute_dtype="float32")
    tokens = random_tokens(512)
    raw, normed = plain_states(model, tokens)
    captured = target.capture(tokens, CU_SEQLENS, width, want_last_hidden=True)
    assert captured.last_hidden is not None
    expected = torch.cat([raw[i] for i in layer_ids], dim=1)
    torch.testing.assert_close(captured.hidden, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(captured.last_hidden, normed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [0, 17])
def test_no_state_depends_on_what_else_is_in_the_microbatch(tiny_target_dir: Path, width: int) -> None:
    """Changing every token of the other samples leaves a sample's states as they were, bit by bit."""
    target = Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32")
    tokens = random_tokens(512)
    before = target.capture(tokens, CU_SEQLENS, width).hidden
    for sample, (start, end) in enumerate(zip(CU_SEQLENS, CU_SEQLENS[1:])):
        other = random_tokens(512, seed=9)
        other[start:end] = tokens[start:end]
        after = target.capture(other, CU_SEQLENS, width).hidden
        assert torch.equal(after[start:end], before[start:end]), f"sample {sample}"
        assert not torch.equal(after, before)


def test_a_feature_comes_from_its_own_token_and_earlier_ones(tiny_target_dir: Path) -> None:
    """Token 6 changed: states of tokens 0..5 stay, that of token 6 changes (no shift by one)."""
    target = Target.load(tiny_target_dir, layer_ids=[0], compute_dtype="float32")
    tokens = np.arange(10, 20)
    bounds = np.array([0, 10], dtype=np.int32)
    changed = tokens.copy()
    changed[6] = 99
    differs = (target.capture(tokens, bounds).hidden != target.capture(changed, bounds).hidden).any(1)
    assert differs.tolist() == [False] * 6 + [True] * 4


def test_layers_behind_the_last_captured_one_do_not_run(tiny_target_dir: Path) -> None:
    target = Target.load(tiny_target_dir, layer_ids=[0, 1], compute_dtype="float32")
    ran: list[int] = []
    for i, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: ran.append(i))
    bounds = np.array([0, 4], dtype=np.int32)
    first = target.capture(np.arange(4, 8), bounds).hidden
    assert ran == [0, 1]
    ran.clear()
    second = target.capture(np.arange(4, 8), bounds, want_last_hidden=True)
    assert ran == [0, 1, 2, 3]
    assert torch.equal(first, second.hidden)


def test_argmax_of_captured_states_is_what_the_target_would_write(tiny_target_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    target = Target.load(tiny_target_dir, layer_ids=[1], compute_dtype="float32")
    tokens = random_tokens(512)
    last = target.capture(tokens, CU_SEQLENS, want_last_hidden=True).last_hidden
    assert last is not None
    rows = np.array([0, 6, 7, 8, 21, 22, 34])
    expected = []
    for row in rows:
        start = CU_SEQLENS[np.searchsorted(CU_SEQLENS, row, side="right") - 1]
        with torch.inference_mode():
            logits = model(torch.as_tensor(tokens[None, start : row + 1])).logits
        expected.append(int(logits[0, -1].argmax()))
    assert linear_argmax(last[rows], target.head_weight).tolist() == expected
    assert linear_argmax(last[:0], target.head_weight).tolist() == []
    assert target.logits(last[rows]).argmax(-1).tolist() == expected
    many = last.repeat(10, 1)  # more rows than the transposed product is for
    torch.testing.assert_close(target.logits(many)[: len(last)], target.logits(last))


def test_decoding_rows_of_different_lengths_equals_a_plain_forward(tiny_target_dir: Path) -> None:
    """Two rows at positions apart, a rejected block overwritten: as if each row were alone and whole."""
    target = Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32")
    rng = np.random.default_rng(3)
    rows = [rng.integers(4, 512, size=14), rng.integers(4, 512, size=11)]
    cache = DecodeCache(num_rows=2, num_slots=32)
    prompts = [rows[0][:6], rows[1][:5]]
    packed = torch.as_tensor(np.concatenate(prompts))
    hidden_T, features_T, rows_T, positions_T = target.prefill(packed, torch.tensor([0, 6, 11]), cache)
    assert rows_T.tolist() == [0] * 6 + [1] * 5
    assert positions_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    alone = target.capture(packed, np.array([0, 6, 11], dtype=np.int32), want_last_hidden=True)
    torch.testing.assert_close(features_T, alone.hidden)
    torch.testing.assert_close(hidden_T, alone.last_hidden)
    # Row 0 continues from position 6, row 1 from position 3: its slots 3 and 4 count as rejected.
    starts = [6, 3]
    junk = torch.full((2, 5), 77)
    positions = torch.tensor([[s + k for k in range(5)] for s in starts])
    target.decode(junk, cache, positions)
    block = torch.as_tensor(np.stack([row[s : s + 8] for row, s in zip(rows, starts)]))
    positions = torch.tensor([[s + k for k in range(8)] for s in starts])
    hidden, features = target.decode(block, cache, positions)
    for i, (row, s) in enumerate(zip(rows, starts)):
        plain = target.capture(row[: s + 8], np.array([0, s + 8], dtype=np.int32), want_last_hidden=True)
        assert plain.last_hidden is not None
        torch.testing.assert_close(features[i], plain.hidden[s:], rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(hidden[i], plain.last_hidden[s:], rtol=1e-5, atol=5e-5)


def test_sliding_window_layers_match_transformers(tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    target = Target.load(tmp_path, layer_ids=[1, 2, 3], compute_dtype="float32")
    tokens = random_tokens(512)
    raw, _ = plain_states(model, tokens)
    expected = torch.cat([raw[i] for i in (1, 2, 3)], dim=1)
    for width in (0, 20):
        features = target.capture(tokens, CU_SEQLENS, width).hidden
        torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)


def test_layer_ids_are_checked_at_loading(tiny_target_dir: Path) -> None:
    with pytest.raises(UserError, match="drafter.target_layer_ids.*0 to 3"):
        Target.load(tiny_target_dir, layer_ids=[4], compute_dtype="float32")


def test_a_target_that_mixes_outside_of_attention_is_rejected_packed(tiny_target_dir: Path) -> None:
    target = Target.load(tiny_target_dir, layer_ids=[1], compute_dtype="float32")
    config = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    model.config.layer_types = ["linear_attention", "full_attention"]
    hybrid = Target(model, [0], compute_dtype=torch.float32, feature_dtype=torch.float32)
    with pytest.raises(UserError, match="batching.strategy.*cannot run packed"):
        hybrid.capture(np.arange(8), np.array([0, 3, 8]))
    assert target.mode == FAST
    assert hybrid.mode == PADDED


def test_all_end_tokens_are_known(tiny_target_dir: Path, qwen3_dir: Path) -> None:
    assert Target.load(tiny_target_dir, layer_ids=[1], compute_dtype="float32").eos_ids == (2,)
    assert Target.load(qwen3_dir, layer_ids=[1], compute_dtype="float32").eos_ids == (2, 5)


def test_answers_end_at_the_end_of_turn_that_only_the_template_knows(
    tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.load(tiny_target_dir, layer_ids=[1], compute_dtype="float32")
    target.end_answers(make_tiny_tokenizer(), DataConfig())
    assert (target.eos_ids, target.added_eos_ids, capsys.readouterr().out) == ((2,), (), "")
    target.eos_ids = (9,)
    for _ in range(2):
        target.end_answers(make_tiny_tokenizer(), DataConfig())
    assert (target.eos_ids, target.added_eos_ids) == ((2, 9), (2,))
    [line] = capsys.readouterr().out.splitlines()
    assert "2 '<|im_end|>'" in line


def test_features_are_rounded_to_the_feature_dtype(tiny_target_dir: Path) -> None:
    tokens = random_tokens(512)
    wide = Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32").capture(tokens, CU_SEQLENS)
    narrow = Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32", feature_dtype="bfloat16")
    features = narrow.capture(tokens, CU_SEQLENS).hidden
    assert features.dtype == torch.bfloat16
    assert torch.equal(features, wide.hidden.to(torch.bfloat16))


def test_a_target_placed_by_a_device_map_captures_the_same(tiny_target_dir: Path) -> None:
    tokens = random_tokens(512)
    plain, placed = (
        Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32", device_map=device_map)
        for device_map in (None, "cpu")
    )
    assert placed.device == placed.head_weight.device == torch.device("cpu")
    expected = plain.capture(tokens, CU_SEQLENS).hidden
    assert torch.equal(placed.capture(tokens, CU_SEQLENS).hidden, expected)


def test_the_real_target_captures_as_transformers_computes(smollm2_dir: Path) -> None:
    """SmolLM2: three prompts packed and padded, layers of the published formula."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    target = Target.load(smollm2_dir, layer_ids=target_layer_ids(30, 5), compute_dtype="float32")
    assert target.eos_ids == (2,)
    tokens = random_tokens(49_000)
    raw, normed = plain_states(model, tokens)
    expected = torch.cat([raw[i] for i in (1, 8, 14, 20, 27)], dim=1)
    for width in (0, 17):
        captured = target.capture(tokens, CU_SEQLENS, width, want_last_hidden=True)
        # some coordinates of this model reach 26,000: relative to the largest value of the row
        scale = expected.abs().amax(dim=1, keepdim=True)
        assert ((captured.hidden - expected).abs() / scale).max() < 1e-5
        torch.testing.assert_close(captured.last_hidden, normed, rtol=1e-4, atol=1e-4)


def test_a_tiny_target_is_the_same_each_time(tmp_path: Path, tiny_target_dir: Path) -> None:
    from dflash_core.target.materialise import fingerprint

    assert fingerprint(make_tiny_target(tmp_path / "again")) == fingerprint(tiny_target_dir)
