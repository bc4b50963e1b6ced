"""The frozen target: hidden states of its layers for many samples at once, and its own argmax where asked.

Policy: run the target once over each sample, keep the outputs of the layers named by `layer_ids`, and stop
after the last one that is needed. Samples travel packed (one row, no padding) or right-padded without a mask;
both give what a plain forward of each sample alone gives, and nothing is ever stored that training does not
read: no [T, V] logits, no mask. The feature at position t comes from token t; id i means the output of
0-based decoder layer i before any final norm (`hidden_states[i + 1]` in transformers, except for the last
layer, which transformers norms).

Shape letters: T packed tokens, D target width, L captured layers, V vocabulary, B rows, K tokens per row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.config import DataConfig
from dflash_core.errors import UserError
from dflash_core.microbatch import Features
from dflash_core.target.attention import Pass, begin
from dflash_core.target.captured_layers import check_layer_ids
from dflash_core.target.compute_dtype import resolve_dtype
from dflash_core.target.decode_cache import DecodeCache, TokenCache
from dflash_core.target.end_ids import added_ends_remark, end_ids, model_end_ids
from dflash_core.target.few_tokens import FewTokens, is_plain
from dflash_core.target.head import embedding_table, read_head
from dflash_core.target.load import decoder_of, load_model
from dflash_core.target.mode import TargetMode, checked_mode, expected_mode
from dflash_core.target.packed_linear import MAX_FEW_ROWS, PackedRows, can_pack


class _EnoughLayers(Exception):  # noqa: N818 (control flow, never an error)
    """Raised by a hook behind the last layer whose output is needed."""


class Target:
    """A frozen causal language model. Make one with `Target.load`."""

    def __init__(
        self,
        model: Any,
        layer_ids: Sequence[int],
        *,
        compute_dtype: torch.dtype,
        feature_dtype: torch.dtype,
        mode: TargetMode | None = None,
    ) -> None:
        self.model = model
        self.mode = mode or expected_mode(model.config)
        self.config = model.config.get_text_config()
        self.decoder = decoder_of(model)
        self.layers = self.decoder.layers
        self.layer_ids = check_layer_ids(layer_ids, len(self.layers))
        self.compute_dtype, self.feature_dtype = compute_dtype, feature_dtype
        # [V, D], as a drafter embeds its block
        self.embed_weight = embedding_table(model.get_input_embeddings())
        self.width_D = self.embed_weight.shape[1]
        self.device = self.embed_weight.device
        # With a device map the model's own lies on another device than the embedding.
        self.head = read_head(model, self.device)
        self.head_weight = self.head.weight_VD
        # Tokens that end an answer; `end_answers` adds those that the configs do not name.
        self.eos_ids = model_end_ids(model)
        self.added_eos_ids: tuple[int, ...] = ()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        layer_ids: Sequence[int],
        device: str | torch.device = "cpu",
        compute_dtype: str | torch.dtype = "auto",
        feature_dtype: str | torch.dtype = "auto",
        trust_remote_code: bool = False,
        device_map: str | None = None,
        devices: Sequence[int] = (),
        mode: TargetMode | None = None,
    ) -> Target:
        """Load from a local directory (see `materialise`), frozen and in evaluation mode.

        Args:
            directory: safetensors weights and config.
            layer_ids: decoder layers to capture, ascending.
            device: where it computes; ignored with `device_map`.
            compute_dtype: of weights and activations; "auto": as `pick_compute_dtype` chooses.
            feature_dtype: captured states are rounded to it; "auto" is the compute dtype.
            trust_remote_code: whether code in the directory may run.
            device_map: passed to transformers, for targets larger than one device.
            devices: the CUDA devices that `device_map` may use, the first for its embedding; () for all.
            mode: None: what a check of the directory has found, else what the kinds of its layers suggest.

        Raises:
            UserError: not a causal language model that transformers can load, or unsuitable layer ids.
        """
        dtype = resolve_dtype(compute_dtype, str(device))
        mode = mode or checked_mode(directory)
        model = load_model(
            directory,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
            devices=devices,
            eager=mode is not None and mode.eager,
        )
        features = dtype if feature_dtype == "auto" else resolve_dtype(feature_dtype, str(device))
        return cls(model, layer_ids, compute_dtype=dtype, feature_dtype=features, mode=mode)

    def end_answers(self, tokenizer: Any, data: DataConfig) -> None:
        """Let answers end at every token of `end_ids`, and print those that the configs do not name.

        Everything that decodes answers calls it once, so plain and speculative decoding end alike.

        Args:
            tokenizer: the target's own.
            data: names the chat template, where it is not the tokenizer's.

        Raises:
            UserError: the chat template cannot be read or does not compile.
        """
        configured, self.eos_ids = self.eos_ids, end_ids(self.eos_ids, tokenizer, data)
        added = tuple(token for token in self.eos_ids if token not in configured)
        if added:
            self.added_eos_ids += added
            print(added_ends_remark(configured, added, tokenizer), flush=True)

    @torch.inference_mode()
    def capture(
        self,
        token_ids: np.ndarray | torch.Tensor,
        cu_seqlens: np.ndarray | torch.Tensor,
        width: int = 0,
        *,
        want_last_hidden: bool = False,
    ) -> Features:
        """Return hidden states of `layer_ids` for a microbatch of samples, without labels.

        Args:
            token_ids: int64 [T], real tokens of all samples, one after another.
            cu_seqlens: int32 [n + 1]; sample i is rows cu_seqlens[i] to cu_seqlens[i + 1].
            width: 0 runs them packed; else each sample is padded on the right to `width`, and [n, width] runs
                without a mask: causality keeps real tokens from seeing what follows them.
            want_last_hidden: also return the state that lm_head reads; runs all layers.

        Raises:
            UserError: a packed microbatch for a target that cannot run packed.
        """
        tokens_T = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        bounds = torch.as_tensor(cu_seqlens, dtype=torch.int32)
        lengths = bounds.diff()
        positions_T = torch.arange(len(tokens_T)) - bounds[:-1].repeat_interleave(lengths)
        if width == 0:
            self._check_packing(len(lengths))
            rows_T, ids, positions = None, tokens_T[None], positions_T[None].to(self.device)
            forward = self._packed(bounds, lengths)
        else:
            assert int(lengths.max()) <= width, f"a sample of {int(lengths.max())} tokens in rows of {width}"
            rows_T = torch.arange(len(lengths)).repeat_interleave(lengths) * width + positions_T
            rows_T = rows_T.to(self.device)
            ids = tokens_T.new_zeros(len(lengths) * width).index_copy_(0, rows_T, tokens_T).view(-1, width)
            positions, forward = torch.arange(width, device=self.device)[None], Pass()
        features = self._empty_features(len(tokens_T))

        def keep(slot: int, hidden: torch.Tensor) -> None:
            hidden_TD = hidden.flatten(0, 1)
            features[:, self._columns(slot)] = (hidden_TD if rows_T is None else hidden_TD[rows_T]).to(
                self.device
            )

        last = None
        hooks = self._hooks(keep, stop_early=not want_last_hidden)
        with self._begin(forward), hooks, suppress(_EnoughLayers):
            out = self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
            last = out.last_hidden_state
        if last is not None:
            last = last.flatten(0, 1).to(self.device)
            last = last if rows_T is None else last[rows_T]
        return Features(features, last_hidden=last)

    def new_cache(self, num_rows: int, num_slots: int) -> DecodeCache | TokenCache:
        """Return what `prefill` and `decode` keep of the rows: keys and values, or only their tokens."""
        return (DecodeCache if self.mode.can_cache else TokenCache)(num_rows, num_slots)

    @torch.inference_mode()
    def prefill(
        self,
        token_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cache: DecodeCache | TokenCache,
        first_row: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read prompts, packed, into a cache: prompt i into row first_row + i, whatever was there.

        Returns:
            States after the final norm [T, D], features [T, L * D], and the row and the position of each
            token [T].
        """
        bounds = torch.as_tensor(cu_seqlens, dtype=torch.int32)
        lengths = bounds.diff()
        rows_T = torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device)
        positions_T = torch.arange(len(token_ids_T), device=self.device) - bounds.to(self.device)[rows_T]
        features = self._empty_features(len(token_ids_T))

        def keep(slot: int, hidden: torch.Tensor) -> None:
            features[:, self._columns(slot)] = hidden[0].to(self.device)

        rows_T = rows_T + first_row
        cache.begin_packed(rows_T, positions_T)
        if isinstance(cache, TokenCache):
            cache.store(token_ids_T)
            whole = self.capture(token_ids_T, bounds, int(lengths.max()), want_last_hidden=True)
            assert whole.last_hidden is not None
            return whole.last_hidden, whole.hidden, rows_T, positions_T
        with begin(self._packed(bounds, lengths, cache)), self._hooks(keep, stop_early=False):
            out = self.decoder(
                input_ids=token_ids_T[None], position_ids=positions_T[None], use_cache=False
            ).last_hidden_state
        return out[0].to(self.device), features, rows_T, positions_T

    @torch.inference_mode()
    def decode(
        self, token_ids_BK: torch.Tensor, cache: DecodeCache | TokenCache, positions_BK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a few more tokens of each row over its cache.

        Positions may differ from row to row; see `DecodeCache` for what happens to rejected tokens.

        Returns:
            States after the final norm [B, K, D] and features [B, K, L * D].
        """
        cache.begin(positions_BK)
        if isinstance(cache, TokenCache):
            return self._decode_whole(token_ids_BK, cache, positions_BK)
        features = self._empty_features(*token_ids_BK.shape)

        def keep(slot: int, hidden: torch.Tensor) -> None:
            features[..., self._columns(slot)] = hidden.to(self.device)

        if self._few_tokens is not None:
            slots = {i: slot for slot, i in enumerate(self.layer_ids)}
            return self._few_tokens(token_ids_BK, cache, positions_BK, slots, keep), features
        with begin(Pass(cache=cache)), self._hooks(keep, stop_early=False):
            out = self.decoder(
                input_ids=token_ids_BK, position_ids=positions_BK, use_cache=False
            ).last_hidden_state
        return out.to(self.device), features

    @functools.cached_property
    def _few_tokens(self) -> FewTokens | None:
        """The fast way of `decode`, made at its first call; None: the model's own forward."""
        return FewTokens(self.model, self.decoder) if is_plain(self.model, self.decoder) else None

    @functools.cached_property
    def _few_head(self) -> PackedRows | None:
        """lm_head for few rows, made when it is first needed; None: as for many rows."""
        weight = self.head_weight
        return PackedRows(weight) if weight.device.type == "cpu" and can_pack([weight]) else None

    def _decode_whole(
        self, token_ids_BK: torch.Tensor, cache: TokenCache, positions_BK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the rows again from their first token, padded on the right."""
        cache.store(token_ids_BK.flatten())
        rows_BS, lengths_B = cache.rows(), positions_BK[:, -1].cpu() + 1
        real = torch.arange(rows_BS.shape[1]) < lengths_B[:, None]
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)]).to(torch.int32)
        whole = self.capture(rows_BS[real.to(self.device)], bounds, rows_BS.shape[1], want_last_hidden=True)
        assert whole.last_hidden is not None
        at_BK = bounds[:-1, None].to(self.device) + positions_BK
        return whole.last_hidden[at_BK], whole.hidden[at_BK]

    def _begin(self, forward: Pass) -> AbstractContextManager[None]:
        """Let our attention compute as a pass asks; the model's own needs no asking."""
        return nullcontext() if self.mode.eager else begin(forward)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the target's own logits of its states after the final norm, [..., D] -> [..., V]."""
        return self.head.finish(self.draft_logits(hidden))

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of a drafter's final states, [..., D] -> [..., V]: lm_head's bare weight."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if len(rows) > MAX_FEW_ROWS or self._few_head is None:
            return self.head.raw(hidden)
        # A lone row's bits would differ from those that it has among others.
        logits = self._few_head.product(rows.repeat(2, 1) if len(rows) == 1 else rows)[: len(rows)]
        return logits.view(*hidden.shape[:-1], len(self.head_weight))

    @torch.inference_mode()
    def own_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, V] of the model alone: its own attention and head, without a cache."""
        ours = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        try:
            ids = torch.tensor([list(token_ids)], device=self.device)
            own: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
            return own
        finally:
            self.model.set_attn_implementation(ours)

    def _packed(self, bounds: torch.Tensor, lengths: torch.Tensor, cache: DecodeCache | None = None) -> Pass:
        """Return the pass that makes `attention` run packed; bounds and lengths are on the host."""
        return Pass(bounds.to(self.device), int(lengths.max()), cache)

    def _empty_features(self, *shape: int) -> torch.Tensor:
        width = len(self.layer_ids) * self.width_D
        return torch.empty(*shape, width, dtype=self.feature_dtype, device=self.device)

    def _columns(self, slot: int) -> slice:
        """Return the columns of the features that the slot-th captured layer fills."""
        return slice(slot * self.width_D, (slot + 1) * self.width_D)

    def _check_packing(self, num_samples: int) -> None:
        if num_samples > 1 and not self.mode.can_pack:
            raise UserError(
                f"batching.strategy: this target ({self.config.model_type}) cannot run packed; allowed: "
                "sorted, sorted_fresh, random, bucketed"
            )

    @contextmanager
    def _hooks(self, keep: Callable[[int, torch.Tensor], None], *, stop_early: bool) -> Iterator[None]:
        """Call keep(slot, hidden) after each captured layer; stop behind the last one when asked."""

        def hook_of(slot: int) -> Any:
            last = stop_early and slot == len(self.layer_ids) - 1

            def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                if hidden.dim() != 3:
                    raise UserError(
                        f"target.name: a layer of {self.config.model_type} gives states of shape "
                        f"{list(hidden.shape)}; allowed: layers that give one hidden state per token"
                    )
                keep(slot, hidden)
                if last:
                    raise _EnoughLayers

            return hook

        handles = [
            self.layers[i].register_forward_hook(hook_of(slot)) for slot, i in enumerate(self.layer_ids)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
