"""`run.json`, the description of a run, and the parts of a run on this rank that are built from it.

Parts: token store, compute dtypes, the target or its frozen ends, the drafter with its initial weights.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import RunConfig, decisive, from_dict
from dflash_core.data.store import TokenStore, open_store
from dflash_core.dataflow.schedule import Schedule
from dflash_core.drafter.directory import drafter_directory
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import load_drafter
from dflash_core.drafter.initial_weights import empty_model, start_from_target, stored_tensors
from dflash_core.drafter.shape import DrafterShape, drafter_shape
from dflash_core.errors import UserError
from dflash_core.launch.process_groups import World
from dflash_core.microbatch import FeatureSpec
from dflash_core.objective.loss import TargetEnds
from dflash_core.target.captured_layers import captured_layers
from dflash_core.target.compute_dtype import resolve_dtype
from dflash_core.target.head import embedding_table, embedding_with
from dflash_core.target.load import load_config
from dflash_core.target.materialise import fingerprint
from dflash_core.target.shape import read_shape
from dflash_core.target.target import Target
from dflash_core.training.state import State, changed_fields

# Facts of a checkpoint that its run found out on its machine, once in its life, and that a resume keeps.
FOUND_HERE = ("dtypes", "total_steps")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The contents of run.json: config, paths and digests of one run."""

    directory: Path
    config: RunConfig
    run_key: str
    target: Path
    shards: tuple[Path, ...]
    plans: tuple[Path, ...]
    cache: Path
    total_steps: int | None
    mlflow_run_id: str | None

    @classmethod
    def load(cls, path: Path) -> RunSpec:
        """Read and check a run.json; relative paths are relative to its directory.

        Raises:
            UserError: a missing or unreadable file, or a missing field, by name.
        """
        try:
            values = json.loads(path.read_text())
            paths = values["paths"]
            at = functools.partial(_path_from, path.resolve().parent)
            return cls(
                directory=at(paths["run"]),
                config=from_dict(RunConfig, values["config"]),
                run_key=values["run_key"],
                target=at(paths["target"]),
                shards=tuple(at(p) for p in paths["shards"]),
                plans=tuple(at(p) for p in paths["plans"]),
                cache=at(paths.get("cache") or f"{paths['run']}/captures"),
                total_steps=values.get("total_steps"),
                mlflow_run_id=values.get("mlflow_run_id"),
            )
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: cannot be read as a run description: {error}") from error
        except KeyError as error:
            raise UserError(
                f"{path}: {error.args[0]!r} is missing; allowed: a run.json written by a flow"
            ) from error

    def open_store(self) -> TokenStore:
        """Open the shards with the validation share of the settings."""
        return open_store(self.shards, self.config.data)

    def open_schedule(self, store: TokenStore) -> Schedule:
        """Open the plans.

        Raises:
            UserError: they have another number of steps than run.json states.
        """
        schedule = Schedule(store, self.plans, self.config.training.max_steps)
        if self.total_steps not in (None, schedule.total_steps):
            raise UserError(
                f"run.json: total_steps is {self.total_steps}, the plans with training.max_steps "
                f"{self.config.training.max_steps} have {schedule.total_steps}"
            )
        return schedule

    def facts(self, schedule: Schedule) -> dict[str, Any]:
        """Return decisive settings and digests of all inputs, which a checkpoint must share to be resumed."""
        settings = decisive(self.config)
        settings["training"].pop("init_from", None)  # a checkpoint replaces these weights
        return {
            **json.loads(json.dumps(settings)),
            "inputs": {
                "data": schedule.store.digest,
                "plans": list(schedule.digests),
                "target": fingerprint(self.target),
            },
        }


def _path_from(directory: Path, text: str) -> Path:
    """Return an absolute path as it is, and a relative one from a directory, without `..`."""
    return Path(os.path.normpath(directory / text))


def check_compatible(path: Path, state: State, facts: dict[str, Any]) -> None:
    """Check that a checkpoint belongs to this run.

    Args:
        path: of the checkpoint, for the message.
        state: of the checkpoint.
        facts: of the run.

    Raises:
        UserError: with each differing field and both values.
    """
    stored = {k: v for k, v in state.facts.items() if k not in FOUND_HERE}
    if lines := changed_fields(stored, facts):
        raise UserError(
            f"training.resume_from: checkpoint {path} does not fit this run (checkpoint -> run): "
            f"{'; '.join(lines)}"
        )


def pick_dtypes(run: RunSpec, world: World, state: State | None) -> dict[str, torch.dtype]:
    """Return compute dtypes of `target` and `drafter` and the `feature` dtype, stable over resumes.

    "auto" is resolved once in the life of a run, for rank 0's device (the caller broadcasts): another outcome
    later would change the results.

    Args:
        run: its settings.
        world: its device decides.
        state: of the checkpoint to resume from, or None for a new run.
    """
    config = run.config
    if state is None:
        device = str(world.device)
        target = resolve_dtype(config.target.compute_dtype, device)
        wanted = config.target.feature_dtype
        feature = target if wanted == "auto" else resolve_dtype(wanted, device)
        drafter = resolve_dtype(config.training.compute_dtype, device)
        return {"target": target, "feature": feature, "drafter": drafter}
    names = state.facts.get("dtypes")
    if not isinstance(names, dict) or not all(
        isinstance(getattr(torch, str(v), 0), torch.dtype) for v in names.values()
    ):
        raise UserError(f"state.json: facts.dtypes is {names!r}; allowed: the dtypes that a run saved")
    stored = {k: getattr(torch, v) for k, v in names.items()}
    asked = {"target": config.target.compute_dtype, "drafter": config.training.compute_dtype}
    return {k: getattr(torch, asked[k]) if asked.get(k, "auto") != "auto" else v for k, v in stored.items()}


def layer_ids(run: RunSpec, target_config: Any) -> tuple[int, ...]:
    """Return the target layers to capture."""
    return captured_layers(run.config.drafter, target_config.get_text_config().num_hidden_layers)


def load_target_config(run: RunSpec) -> Any:
    """Load the transformers configuration of the target."""
    return load_config(run.target, trust_remote_code=run.config.target.trust_remote_code)


def load_target(run: RunSpec, world: World, ids: tuple[int, ...], dtypes: dict[str, torch.dtype]) -> Target:
    """Load the frozen target on this rank."""
    return Target.load(
        run.target,
        layer_ids=ids,
        device=world.device,
        compute_dtype=dtypes["target"],
        feature_dtype=dtypes["feature"],
        trust_remote_code=run.config.target.trust_remote_code,
        device_map=run.config.target.device_map,
        devices=[d.index for d in world.devices if d.index is not None],
    )


def load_ends(
    run: RunSpec, target_config: Any, target: Target | None, device: torch.device, dtype: torch.dtype
) -> TargetEnds:
    """Return the target's embedding and lm_head in the drafter's compute dtype.

    Without the target on this rank, only those two tensors are read from its files.

    Raises:
        UserError: the files hold no such tensor.
    """
    if target is not None:
        return TargetEnds(target.embed_weight.to(device, dtype), target.head_weight.to(device, dtype))
    model = empty_model(target_config, trust_remote_code=run.config.target.trust_remote_code)
    names = {id(p): name for name, p in model.named_parameters()}
    wanted = [names[id(m.weight)] for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    stored = stored_tensors(run.target, wanted)
    missing = [n for n in wanted if n not in stored]
    if missing and not target_config.get_text_config().tie_word_embeddings:
        raise UserError(
            f"target: {run.target} holds no tensor {missing[0]}; allowed: a complete causal language model"
        )
    # Tied weights may be stored under either name.
    either = next(iter(stored.values()))
    embed, head = (stored.get(n, either).to(device, dtype) for n in wanted)
    return TargetEnds(embedding_table(embedding_with(model.get_input_embeddings(), embed)), head)


def build_drafter(
    run: RunSpec, target_config: Any, ids: tuple[int, ...], device: torch.device
) -> DFlashDrafter:
    """Return the drafter with its initial weights, fp32, on the device.

    They are those of `training.init_from`, or random ones of the seed, or derived from the target's
    (`training.first_weights`).

    Raises:
        UserError: the drafter of `training.init_from` has another shape.
    """
    shape = drafter_shape(read_shape(target_config), run.config.drafter, ids)
    if run.config.training.init_from is not None:
        return _given_drafter(run, shape).float().to(device)
    drafter = DFlashDrafter(shape, torch.Generator().manual_seed(run.config.training.seed))
    if run.config.training.first_weights == "target":
        model = empty_model(target_config, trust_remote_code=run.config.target.trust_remote_code)
        start_from_target(drafter, run.target, model)
    return drafter.float().to(device)


def _given_drafter(run: RunSpec, shape: DrafterShape) -> DFlashDrafter:
    """Load the drafter of `training.init_from`.

    It keeps what only published drafters choose (a scaled rotary embedding, windows in some layers, biases)
    and what the settings leave open; the rest has to be as the settings say.

    Raises:
        UserError: there is no drafter, or it has another shape.
    """
    source = drafter_directory(Path(run.config.training.init_from or ""), field="training.init_from")
    drafter = load_drafter(source)
    given, settings = drafter.shape, run.config.drafter
    kept = {"rope_scaling", "sliding_layers", "attention_bias", "max_position_embeddings", "rms_norm_eps"}
    names = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta")
    kept |= {name for name in names if getattr(settings, name) is None}
    wanted = replace(shape, **{name: getattr(given, name) for name in kept})
    if given != wanted:
        lines = changed_fields(vars(given), vars(wanted))
        raise UserError(f"training.init_from: {source} does not fit (there -> here): {'; '.join(lines)}")
    return drafter


def feature_spec(
    run: RunSpec, target_config: Any, ids: tuple[int, ...], dtypes: dict[str, torch.dtype]
) -> FeatureSpec:
    """Return the shapes of the captured features."""
    return FeatureSpec.of(
        run.config.objective,
        layers=len(ids),
        width=target_config.get_text_config().hidden_size,
        feature_dtype=dtypes["feature"],
        compute=dtypes["target"],
    )
