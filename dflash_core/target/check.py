"""Check of a target: everything that a run will ask of it, compared with the model alone.

Policy: the reference is the model's own eager attention on one sample at a time, without a cache; the same
loaded weights serve both sides. Runs use the fastest `TargetMode` whose states, logits and decoding equal the
reference; a target that no mode computes right is rejected. So a family that nobody has heard of is right,
slow or rejected, but never silently wrong.

Limits: samples are short, so sliding windows beyond `MAX_WINDOW` tokens and a choice among more keys than
that are not reached. Rotary embeddings that change with the length hold up to `max_tokens`. Targets above
`FLOAT32_BYTES` are checked in their compute dtype, where only differences above its rounding show.

Price: one load of the target and about ten forwards of some 70 tokens.

Shape letters: T tokens, N captured layers, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.target.compute_dtype import dtype_name, resolve_dtype
from dflash_core.target.load import decoder_of, load_model
from dflash_core.target.mode import EAGER, FAST, PADDED, TargetMode
from dflash_core.target.shape import read_shape
from dflash_core.target.target import Target

# Tokens of the samples; the last one is also decoded.
LENGTHS = (3, 17, 48)
# The last sample is longer where a sliding window up to this size can be passed.
MAX_WINDOW = 512
# Weights up to this size in float32 are checked in float32.
FLOAT32_BYTES = 8 << 30
# Allowed difference of a token's states, as a share of their norm. In float32 right ones differ by 1e-6, and
# a wrong mask shows as 0.05 or more. In bfloat16 rounding alone gives up to 0.02, and a routed expert may
# change for single tokens, so there the median over tokens counts.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 1e-3, 0.05


@dataclass(frozen=True, kw_only=True)
class TargetCheck:
    """The outcome: how the target computes, and how far each path is from the model alone."""

    mode: TargetMode
    # "float32" or the compute dtype
    dtype: str
    tolerance: float
    # path -> largest relative difference; None where it cannot run at all
    differences: dict[str, float | None]
    # path -> why it is not used
    reasons: dict[str, str]
    # `TargetShape` as JSON types
    shape: dict[str, Any]
    # longest sample whose states do not depend on its company in a microbatch; None: any
    max_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return asdict(self)


def check_target(
    directory: str | Path,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str = "auto",
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> TargetCheck:
    """Find the fastest mode in which a target computes right.

    Args:
        directory: of the target, see `materialise`.
        device, compute_dtype, trust_remote_code, device_map: as in `Target.load`.

    Raises:
        UserError: no mode is right, or the target does not load.
    """
    dtype = _check_dtype(Path(directory), compute_dtype, str(device))
    model = load_model(
        directory,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        device_map=device_map,
        devices=(),
    )
    return _Check(model, dtype).run()


def _check_dtype(directory: Path, compute_dtype: str, device: str) -> torch.dtype:
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    # Most checkpoints hold two bytes per weight.
    return torch.float32 if 2 * size <= FLOAT32_BYTES else resolve_dtype(compute_dtype, device)


class _Check:
    """One check of a loaded model."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.layers = range(len(decoder_of(model).layers))
        config = model.config.get_text_config()
        vocabulary = model.get_input_embeddings().weight.shape[0]
        lengths = [*LENGTHS[:-1], max(LENGTHS[-1], _window(config) + 16)]
        tokens = np.random.default_rng(0).integers(vocabulary // 8, vocabulary, size=sum(lengths))
        self.tokens = tokens.astype(np.int64)
        self.bounds = np.cumsum([0, *lengths]).astype(np.int32)
        self.is_exact = dtype == torch.float32
        self.tolerance = FLOAT32_TOLERANCE if self.is_exact else BFLOAT16_TOLERANCE
        self.differences: dict[str, float | None] = {}
        self.reasons: dict[str, str] = {}

    def run(self) -> TargetCheck:
        """Try the modes, fastest first."""
        ours = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        self.expected, self.expected_logits = self._reference()
        self.model.set_attn_implementation(ours)
        mode = self._find_mode(FAST)
        if mode is None:
            self.model.set_attn_implementation("eager")
            mode = self._find_mode(EAGER)
        if mode is None:
            found = "; ".join(f"{path}: {reason}" for path, reason in self.reasons.items())
            raise UserError(
                f"target.name: {self.model.config.model_type} computes otherwise here than alone in "
                f"transformers ({found}); allowed: targets whose padded rows equal single ones"
            )
        return TargetCheck(
            mode=mode,
            dtype=dtype_name(self.dtype),
            tolerance=self.tolerance,
            differences=self.differences,
            reasons=self.reasons,
            shape=asdict(read_shape(self.model.config, num_layers=len(self.layers))),
            max_tokens=max_tokens(self.model.config),
        )

    def _find_mode(self, fastest: TargetMode) -> TargetMode | None:
        """Return the fastest right mode with this attention, or None."""
        name = "the model's own attention" if fastest.eager else "exchanged attention"
        slowest = EAGER if fastest.eager else PADDED
        is_right = (
            self._is_right(f"padded, {name}", lambda: self._captured(slowest, packed=False))
            and self._is_right(f"logits, {name}", lambda: self._logits(slowest), logits=True)
            and self._is_right(f"whole forwards, {name}", lambda: self._decoded(slowest), decoded=True)
        )
        if not is_right or fastest.eager:
            return EAGER if is_right else None
        packs = self._is_right(f"packed, {name}", lambda: self._captured(FAST, packed=True))
        caches = packs and self._is_right(f"decoding, {name}", lambda: self._decoded(FAST), decoded=True)
        return TargetMode(can_pack=packs, can_cache=caches)

    def _is_right(self, path: str, compute: Any, *, logits: bool = False, decoded: bool = False) -> bool:
        """Return True when a path gives what the reference gives; keep its difference or the reason."""
        expected = self.expected_logits if logits else self.expected
        if decoded:
            expected = expected[int(self.bounds[-2]) + 1 :]
        self.differences[path] = None
        try:
            actual: Tensor = compute()
        except (UserError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            self.reasons[path] = " ".join(str(error).split())[:300]
            return False
        difference = self._difference(actual, expected, decoded=decoded)
        self.differences[path] = difference
        if difference <= self.tolerance:
            return True
        self.reasons[path] = f"differs by {difference:.2g}, allowed {self.tolerance:g}"
        return False

    def _difference(self, actual: Tensor, expected: Tensor, *, decoded: bool) -> float:
        """Return the largest difference over samples and layers; over tokens the largest, or the median."""
        parts = [expected.shape[0]] if decoded else list(np.diff(self.bounds))
        worst = 0.0
        for a, b in zip(actual.split(parts), expected.split(parts)):
            share = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)
            of_layers = share.amax(dim=0) if self.is_exact else share.median(dim=0).values
            worst = max(worst, float(of_layers.max()))
        return worst

    def _target(self, mode: TargetMode) -> Target:
        return Target(self.model, self.layers, compute_dtype=self.dtype, feature_dtype=self.dtype, mode=mode)

    def _split(self, features: Tensor) -> Tensor:
        """Return features [T, N * D] as float32 [T, N, D] on the host."""
        return features.float().cpu().unflatten(-1, (len(self.layers), -1))

    def _captured(self, mode: TargetMode, *, packed: bool) -> Tensor:
        width = 0 if packed else int(np.diff(self.bounds).max()) + 5
        return self._split(self._target(mode).capture(self.tokens, self.bounds, width).hidden)

    def _logits(self, mode: TargetMode) -> Tensor:
        target, width = self._target(mode), int(np.diff(self.bounds).max())
        last = target.capture(self.tokens, self.bounds, width, want_last_hidden=True).last_hidden
        assert last is not None
        return target.logits(last).float().cpu()[:, None]

    def _decoded(self, mode: TargetMode) -> Tensor:
        """Return states [T - 1, N, D] of the last sample, decoded next to a shorter one.

        A prompt, a block of one true token and three drafts that are rejected, a block of four true tokens
        over them, and the rest.
        """
        target = self._target(mode)
        start, end = self.bounds[-2:].tolist()
        sample = torch.as_tensor(self.tokens[start:end], device=target.device)
        other = torch.as_tensor(self.tokens[: self.bounds[1]], device=target.device)
        half, length, place = len(sample) // 2, len(sample), torch.arange(4, device=target.device)
        cache = target.new_cache(2, length + 8)
        bounds = torch.tensor([0, half, half + len(other)], dtype=torch.int32)
        _, features, _, _ = target.prefill(torch.cat([sample[:half], other]), bounds, cache)
        states = [features[1:half]]
        rejected = torch.cat([sample[half : half + 1], sample[:3]])
        for first, block, num_true in ((half, rejected, 1), (half + 1, sample[half + 1 : half + 5], 4)):
            rows = torch.stack([block, other.new_zeros(4)])
            positions = torch.stack([first + place, len(other) + place])
            states.append(target.decode(rows, cache, positions)[1][0, :num_true])
        rest = torch.arange(half + 5, length, device=target.device)
        states.append(target.decode(sample[None, half + 5 :], cache, rest[None])[1][0])
        return self._split(torch.cat(states))

    @torch.inference_mode()
    def _reference(self) -> tuple[Tensor, Tensor]:
        """Return states [T, N, D] and logits [T, 1, V] of the model alone, float32 on the host."""
        kept: list[Tensor] = []

        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            kept.append(hidden[0].float().cpu())

        handles = [layer.register_forward_hook(keep) for layer in decoder_of(self.model).layers]
        device = self.model.get_input_embeddings().weight.device
        states, logits = [], []
        try:
            for start, end in zip(self.bounds, self.bounds[1:]):
                kept.clear()
                ids = torch.as_tensor(self.tokens[None, start:end], device=device)
                logits.append(self.model(input_ids=ids, use_cache=False).logits[0].float().cpu())
                states.append(torch.stack(kept, dim=1))
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat(states), torch.cat(logits)[:, None]


def max_tokens(config: Any) -> int | None:
    """Return the length up to which a rotary embedding is the same for all samples; None: at all lengths.

    transformers picks the factors of "longrope" and "dynamic" by the longest position in a microbatch.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    original = parameters.get("original_max_position_embeddings")
    return int(original or getattr(text, "original_max_position_embeddings", text.max_position_embeddings))


def _window(config: Any) -> int:
    """Return the sliding window or attention chunk of a configuration where it is short enough, else 0."""
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((s for s in sizes if isinstance(s, int) and s <= MAX_WINDOW), default=0)
