"""The sections of the settings: each key with its type, its bounds, its default and a line about it."""

import difflib
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from jzero import distributed, placement, recipes
from jzero.config.fields import kind_of
from jzero.models.attention import Implementation
from jzero.models.decoder_config import Biases, DecoderConfig, Mlp, Norm, Remat
from jzero.models.positions import RopeScaling
from jzero.models.presets import PRESETS, preset_fields

FLOAT32 = (1.1754944e-38, 3.4028234e38)  # smallest and largest normal numbers
Count = Annotated[int, Field(ge=1, lt=2**31)]
NonNegativeCount = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of keys: frozen, nothing beyond the schema, no conversion of types."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def defaults(cls) -> Self:
        """The section as it is when nothing is said about it."""
        return cls.model_validate({})

    @pydantic.model_validator(mode="before")
    @classmethod
    def _none(cls, values: Any) -> Any:
        """`none` is the word for no value, in a flag as in a file."""
        if not isinstance(values, dict):
            return values
        empty = {key for key, field in cls.model_fields.items() if kind_of(field)[1] and values.get(key) == "none"}
        return {key: None if key in empty else value for key, value in values.items()}

    @pydantic.model_validator(mode="after")
    def _float32(self) -> Self:
        """Numbers are used in float32, where smaller ones are 0 and larger ones infinite."""
        for key, value in self:
            if isinstance(value, float) and value and not FLOAT32[0] <= abs(value) <= FLOAT32[1]:
                where = f"{type(self).__name__.lower()}.{key}"
                raise ValueError(
                    f"{where} = {value}: must be in the range of float32, {FLOAT32[0]:.2g} to {FLOAT32[1]:.2g}"
                )
        return self


class Model(Section):
    """The built-in decoder; a preset stands below the keys that are given."""

    preset: str | None = Field(
        None, description="a published model's sizes, such as gpt2 or llama-3-8b; none: no preset"
    )
    vocab: Count = Field(256, description="number of tokens")
    width: Count = Field(128, description="size of the residual stream")
    layers: Count = Field(2, description="number of blocks")
    heads: Count = Field(4, description="query heads")
    kv_heads: Count = Field(4, description="key and value heads; divides heads")
    mlp_width: Count = Field(384, description="hidden size of the MLP")
    head_dim: int | None = Field(None, ge=1, lt=2**31, description="size of one head; none: width / heads")
    norm: Norm = Field("rms", description="RMSNorm or LayerNorm")
    norm_eps: Positive = Field(1e-5, description="added to the mean square in RMSNorm, to the variance in LayerNorm")
    qk_norm: bool = Field(False, description="RMSNorm of each query and key head, before rotation")
    mlp: Mlp = Field("swiglu", description="gated with SiLU, or the tanh form of GELU, not gated")
    biases: Biases = Field("none", description="linear layers with a bias; all: but the head")
    learned_positions: int | None = Field(
        None, ge=1, lt=2**31, description="rows of a table of learned positions; none: rotary positions"
    )
    rope_theta: Positive = Field(10_000.0, description="base of the rotary wavelengths, in positions")
    rope_scaling: RopeScaling | None = Field(None, description="how rotary frequencies are stretched")
    rope_factor: Annotated[float, Field(ge=1)] = Field(1.0, description="longer context / the original one")
    rope_low_freq_factor: Positive = Field(1.0, description="llama3: rounds in the original context, stretched in full")
    rope_high_freq_factor: Positive = Field(4.0, description="llama3: rounds in the original context, left as they are")
    rope_original_positions: Count = Field(8192, description="llama3: the original context")
    window: int | None = Field(
        None, ge=1, lt=2**31, description="tokens that one attends to, itself included; none: all before it"
    )
    tied: bool = Field(False, description="one table for embedding and output")
    dropout: Decay = Field(0.0, description="probability of dropping an activation in training")
    remat: Remat = Field(
        "none", description="activations recomputed in the backward pass; dots: all but matrix products"
    )
    scan: bool = Field(True, description="layers stacked and scanned; false: a loop over layers")
    attention: Implementation | None = Field(None, description="implementation; none: JAX chooses")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _below_the_keys(cls, values: Any) -> Any:
        """The preset's values under those that are given."""
        name = values.get("preset", "none") if isinstance(values, dict) else "none"
        if not isinstance(name, str) or name == "none":
            return values
        if name not in PRESETS:
            close = difflib.get_close_matches(name, PRESETS, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PRESETS)}"
            raise ValueError(f"model.preset = {name}: unknown preset; {hint}")
        return preset_fields(name) | values

    def decoder(self, dtype: str, layers_ahead: int = 1) -> DecoderConfig:
        """The decoder that the section describes, computing in `dtype`.

        Raises:
            ValueError: values do not fit each other.
        """
        try:
            return DecoderConfig(**self.model_dump(exclude={"preset"}), dtype=dtype, layers_ahead=layers_ahead)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None


class MixtureSource(Section):
    """One source of `data.mixture`; what it does not say is as in `data`."""

    path: str | None = Field(
        min_length=1, description="file or directory; none: the sources of Python's standard library"
    )
    weight: Positive = Field(description="part of the training sequences that come from here; all sum to 1")
    glob: str | None = Field(None, min_length=1, description="which files of a directory")
    format: Literal["text", "jsonl", "tokens", "auto"] | None = Field(None, description="of the files")
    text_key: str | None = Field(None, description="where the text is in an object of JSONL")
    dtype: Literal["uint16", "uint32", "auto"] | None = Field(None, description="of token files")


class Data(Section):
    """What is read, and how it becomes sequences."""

    path: str | None = Field(
        None, min_length=1, description="file or directory; none: the sources of Python's standard library"
    )
    glob: str = Field("**/*", min_length=1, description="which files of a directory")
    format: Literal["text", "jsonl", "tokens", "auto"] = Field(
        "auto", description="of the files; auto: .jsonl and .ndjson are JSONL, .bin are tokens, all others text"
    )
    text_key: str = Field("text", description="where the text is in an object of JSONL")
    dtype: Literal["uint16", "uint32", "auto"] = Field(
        "auto", description="of token files; auto: uint16 where model.vocab is at most 65536, else uint32"
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="a tokenizer.json; text is tokenized once, and cached; none: bytes"
    )
    eos: str | int | None = Field(
        None,
        description="name or id of the token between two documents; none: byte 0, and no such token with a tokenizer",
    )
    mixture: tuple[MixtureSource, ...] = Field(
        (), strict=False, description="sources by weight, instead of path; the weights sum to 1"
    )
    packing: Literal["none", "documents"] = Field(
        "none", description="documents: rows of whole documents that do not see each other; none: windows of the stream"
    )
    seq_len: Count = Field(128, description="predicted tokens per sequence")
    eval_fraction: Decay = Field(0.05, description="part of the data held out; 0: no evaluation")
    eval_batches: int | None = Field(
        8, ge=1, lt=2**31, description="batches per evaluation, spread over the held-out part; none: all of it"
    )
    prefetch: Count = Field(4, description="batches read ahead of the step")


def _setting(key: str, description: str, **limits: Any) -> Any:
    return Field(None, description=f"{description}; none: {recipes.takers(key)}", **limits)


class Optim(Section):
    """The optimizer and its schedule."""

    name: recipes.OptimizerName = Field("adamw", description="optimizer; all its state is float32")
    lr: float | None = Field(None, gt=0, description=f"highest learning rate; none: {recipes.rates()}")
    weight_decay: float | None = _setting("weight_decay", "decay per step and unit of lr, of matrices only", ge=0)
    b1: float | None = _setting("b1", "decay of the first moment", ge=0, lt=1)
    b2: float | None = _setting("b2", "decay of the second moment", ge=0, lt=1)
    eps: float | None = _setting("eps", "added to the second moment (adafactor) or its root", gt=0)
    momentum: float | None = _setting("momentum", "decay of the sum of gradients", ge=0, lt=1)
    nesterov: bool | None = _setting("nesterov", "the momentum looks one step ahead")
    adamw_leaves: tuple[str, ...] | None = _setting(
        "adamw_leaves", "patterns of paths of matrices that adamw trains instead", strict=False
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="steps of linear warm-up to lr; none: a twentieth of steps"
    )
    schedule: recipes.ScheduleName = Field("cosine", description="course of lr after the warm-up")
    min_lr_ratio: Fraction = Field(0.1, description="last learning rate / lr; plateaus do not go below it either")
    plateau_patience: int | None = Field(
        None,
        ge=1,
        lt=2**31,
        description="windows without a lower loss after which lr is multiplied by plateau_factor; none: off",
    )
    plateau_factor: float = Field(0.5, gt=0, lt=1, description="what a plateau of the loss multiplies lr by")
    plateau_window: Count = Field(10, description="steps in a window, whose mean loss is compared with the lowest")
    ema: float | None = Field(None, gt=0, lt=1, description="decay of an average of the weights; none: no average")
    clip_norm: float | None = Field(1.0, gt=0, description="largest global gradient norm; none: no clipping")
    max_skipped: Count = Field(10, description="steps with a non-finite gradient in a row that end the run")

    def settings(self) -> dict[str, recipes.Setting]:
        """What the optimizer takes beside the learning rate: as given, else its own defaults.

        Raises:
            ValueError: a key is given that it does not take.
        """
        given = {key: getattr(self, key) for key in recipes.KEYS}
        return recipes.settings_of(self.name, given)


class Precision(Section):
    """Number formats; the optimizer state is always float32."""

    params: Literal["bfloat16", "float32", "auto"] = Field(
        "auto", description="parameters and compute; auto: bfloat16 on an accelerator, float32 on CPU"
    )
    grads: Literal["bfloat16", "float32"] = Field("float32", description="accumulated gradients")
    reduce: Literal["bfloat16", "float32"] = Field("float32", description="gradients on the wire")


class Zero(Section):
    """What is sharded, and over which axes."""

    axes: tuple[Literal["node", "dp"], ...] = Field(
        ("node", "dp"), strict=False, min_length=1, description="mesh axes the state is sharded over"
    )
    persist_below: NonNegativeCount = Field(0, description="parameters with fewer elements stay whole")
    replicate: tuple[str, ...] = Field((), strict=False, description="patterns of parameter paths that stay whole")
    regather: bool = Field(True, description="stage 3 gathers again for backward; false: keeps what forward gathered")


class Comm(Section):
    """What is sent when, and in pieces of which size."""

    overlap: bool = Field(True, description="on GPUs: computation is moved between start and end of a collective")
    layers_ahead: int = Field(1, ge=0, le=2, description="layers gathered ahead of the one that computes")
    reduce_bucket_bytes: int | None = Field(
        None, ge=1, description="on GPUs: neighbouring reductions are combined up to this size; none: as XLA does"
    )
    gather_bucket_bytes: int | None = Field(
        None, ge=1, description="on GPUs: neighbouring gathers are combined up to this size; none: to a layer's"
    )


class Offload(Section):
    """What rests outside of the device between its uses; the arithmetic is the same wherever that is."""

    optimizer: Literal["none", "device", "host", "nvme"] = Field(
        "none",
        description="where the optimizer's state rests; host: in pinned memory, nvme: in files, both stream through "
        "the device in groups; device: there, but updated in groups",
    )
    update: Literal["device", "cpu"] = Field(
        "device", description="where the update is computed; cpu: the state never comes to the device"
    )

    @pydantic.field_validator("update", mode="before")
    @classmethod
    def _at_once(cls, value: Any) -> Any:
        if "delay" in str(value):
            placement.Offload(update=str(value))  # says why not
        return value

    params: Literal["none", "host", "nvme"] = Field(
        "none",
        description="where parameters rest; host: fetched layer by layer, ahead of use; nvme: read from files so, and "
        "written in the groups of the optimizer's state, wherever that rests",
    )
    grads: Literal["none", "host"] = Field("none", description="where accumulated gradients rest")
    dir: tuple[str, ...] = Field(
        (), strict=False, description="directories for the files of nvme, one on each disk, over which they are striped"
    )
    group_size: Count = Field(
        placement.GROUP_BYTES,
        description="bytes on one device that are worked on together: optimizer state, float32 gradients, and "
        "parameters that rest elsewhere",
    )
    host_bytes: int = Field(
        0,
        ge=0,
        description="bytes of one device's optimizer state that stay in host memory although the rest is in files",
    )
    min_param_bytes: NonNegativeCount = Field(
        placement.MIN_PARAM_BYTES, description="bytes in a layer below which a parameter stays on the device"
    )


class Checkpoint(Section):
    """When the state is saved, and what a run begins from."""

    every: int | None = Field(
        200, ge=1, lt=2**31, description="steps between checkpoints; the last step has one, too; none: no checkpoints"
    )
    keep: int | None = Field(2, ge=1, lt=2**31, description="newest checkpoints that stay; none: all")
    resume: str | int = Field(
        "auto",
        description="auto: goes on from the newest checkpoint in run.dir, where there is one; must: fails where there "
        "is none; never: takes a new directory only; a number: goes back to that step",
    )

    @pydantic.field_validator("resume")
    @classmethod
    def _word_or_step(cls, value: str | int) -> str | int:
        if value in ("auto", "must", "never"):
            return value
        if not str(value).isdecimal() or int(value) >= 2**31:
            raise ValueError(f"checkpoint.resume = {value}: must be auto, must, never or the number of a step")
        return int(value)


class Distributed(Section):
    """How several processes find each other; on its own, or under Slurm or Open MPI, nothing has to be set."""

    coordinator: str | None = Field(
        distributed.AUTO,
        min_length=1,
        description="HOST:PORT at which process 0 listens and the others find it; auto: as Slurm, Open MPI, Kubernetes "
        "or JAX_COORDINATOR_ADDRESS say; none: this process trains on its own",
    )
    processes: int | None = Field(None, ge=1, description="how many there are; none: as the launcher says")
    process: int | None = Field(None, ge=0, description="index of this one; none: as the launcher says")
    local_devices: str = Field(
        distributed.AUTO,
        min_length=1,
        description="GPUs of this process, such as 0,1; all: those it sees; auto: all, or the one of its index where "
        "the launcher has several processes on a host",
    )
    start_timeout_s: Count = Field(
        distributed.START_TIMEOUT_S, description="seconds to wait for all processes to start"
    )
    heartbeat_timeout_s: int = Field(
        distributed.HEARTBEAT_TIMEOUT_S,
        ge=5,
        lt=2**31,
        description="a process silent for so many seconds is taken for dead, and the others end",
    )


class Log(Section):
    """What is reported, and how often."""

    every: Count = Field(10, description="steps between lines of metrics.jsonl")
    eval_every: Count = Field(200, description="steps between evaluations")
    tensorboard: bool = Field(True, description="the scalars of metrics.jsonl as TensorBoard events, too")
    profile: str | None = Field(
        None, description="steps of which a profiler trace is kept in the run directory, first and last, such as 10-13"
    )


class Run(Section):
    """Where a run leaves its files."""

    dir: str | None = Field(None, min_length=1, description="run directory; none: runs/ and the time of the start")
    cache_dir: str | None = Field(
        "auto",
        min_length=1,
        description="where compiled programs are kept for the next start; auto: JAX_COMPILATION_CACHE_DIR, else the "
        "user's cache directory; none: nowhere",
    )
