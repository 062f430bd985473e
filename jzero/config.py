"""What a run is: the schema of its settings, and how they are loaded.

Defaults < YAML file (`--config`) < flags (`--SECTION.KEY VALUE`).  The flags are generated from the schema, so a key
has one name everywhere.  Whatever is wrong is a `ConfigError` of one line, raised before any array is made: it names
the key, the value and what is allowed.  There are three checks: of one value (`Field` bounds), of values against each
other (`Config._check_together`), and of the whole against the devices (`resolve`).
"""

import argparse
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from jzero import mesh, recipes
from jzero.models.decoder_config import DecoderConfig
from jzero.models.presets import PRESETS, preset_fields

BYTES = 256
Count = Annotated[int, Field(ge=1, lt=2**31)]
NonNegativeCount = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]

_MIXTURE_TOLERANCE = 1e-6  # thirds are written with a few digits


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message is one line for the user."""


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
        empty = {key for key, field in cls.model_fields.items() if _kind(field)[1] and values.get(key) == "none"}
        return {key: None if key in empty else value for key, value in values.items()}


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
    norm: Literal["rms", "layer"] = Field("rms", description="RMSNorm or LayerNorm")
    norm_eps: Positive = Field(1e-5, description="added to the mean square in RMSNorm, to the variance in LayerNorm")
    qk_norm: bool = Field(False, description="RMSNorm of each query and key head, before rotation")
    mlp: Literal["swiglu", "gelu"] = Field("swiglu", description="gated with SiLU, or the tanh form of GELU, not gated")
    biases: Literal["none", "qkv", "all"] = Field("none", description="linear layers with a bias; all: but the head")
    learned_positions: int | None = Field(
        None, ge=1, lt=2**31, description="rows of a table of learned positions; none: rotary positions"
    )
    rope_theta: Positive = Field(10_000.0, description="base of the rotary wavelengths, in positions")
    rope_scaling: Literal["linear", "llama3"] | None = Field(None, description="how rotary frequencies are stretched")
    rope_factor: Annotated[float, Field(ge=1)] = Field(1.0, description="longer context / the original one")
    rope_low_freq_factor: Positive = Field(1.0, description="llama3: rounds in the original context, stretched in full")
    rope_high_freq_factor: Positive = Field(4.0, description="llama3: rounds in the original context, left as they are")
    rope_original_positions: Count = Field(8192, description="llama3: the original context")
    window: int | None = Field(
        None, ge=1, lt=2**31, description="tokens that one attends to, itself included; none: all before it"
    )
    tied: bool = Field(False, description="one table for embedding and output")
    dropout: Decay = Field(0.0, description="probability of dropping an activation in training")
    remat: Literal["none", "full", "dots"] = Field(
        "none", description="activations recomputed in the backward pass; dots: all but matrix products"
    )
    scan: bool = Field(True, description="layers stacked and scanned; false: a loop over layers")
    attention: Literal["xla", "cudnn"] | None = Field(None, description="implementation; none: JAX chooses")

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

    path: str | None = Field(description="file or directory; none: the sources of Python's standard library")
    weight: Positive = Field(description="part of the training sequences that come from here; all sum to 1")
    glob: str | None = Field(None, min_length=1, description="which files of a directory")
    format: Literal["text", "jsonl", "tokens", "auto"] | None = Field(None, description="of the files")
    text_key: str | None = Field(None, description="where the text is in an object of JSONL")
    dtype: Literal["uint16", "uint32", "auto"] | None = Field(None, description="of token files")


class Data(Section):
    """What is read, and how it becomes sequences."""

    path: str | None = Field(None, description="file or directory; none: the sources of Python's standard library")
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
        None, ge=1, description="windows without a lower loss after which lr is multiplied by plateau_factor; none: off"
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
        return recipes.RECIPES[self.name].filled(self.name, given)


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
        None, ge=1, description="on GPUs: neighbouring gathers are combined up to this size; none: as XLA does"
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


class Config(Section):
    """All settings of a run."""

    stage: int = Field(3, ge=0, le=3, description="ZeRO: 1 shards optimizer state, 2 gradients too, 3 parameters too")
    mesh: str = Field("dp=-1", description="axis sizes such as node=2,dp=4,tp=2; -1 is what is left")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of parameters, dropout and data order")
    steps: Count = Field(600, description="optimizer steps")
    batch_size: Count = Field(16, description="sequences per optimizer step, over the whole mesh")
    micro_batch: int | None = Field(
        None, ge=1, description="sequences per data-parallel device and microbatch; none: no accumulation"
    )
    model: Model = Field(default_factory=Model.defaults)
    data: Data = Field(default_factory=Data.defaults)
    optim: Optim = Field(default_factory=Optim.defaults)
    precision: Precision = Field(default_factory=Precision.defaults)
    zero: Zero = Field(default_factory=Zero.defaults)
    comm: Comm = Field(default_factory=Comm.defaults)
    log: Log = Field(default_factory=Log.defaults)
    run: Run = Field(default_factory=Run.defaults)

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> Self:
        model, sizes = self.model, mesh.parse(self.mesh)
        model.decoder("float32" if self.precision.params == "float32" else "bfloat16")
        if model.learned_positions and self.data.seq_len > model.learned_positions:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} is more than model.learned_positions = {model.learned_positions}"
            )
        if model.vocab < BYTES:
            raise ValueError(f"model.vocab = {model.vocab}: the data are bytes, so at least {BYTES}")
        _check_tensor_parallel(model, sizes.get(mesh.TP, 1))
        _check_optimizer(self.optim)
        if self.optim.warmup_steps is not None and self.optim.warmup_steps > self.steps:
            raise ValueError(f"optim.warmup_steps = {self.optim.warmup_steps} is more than steps = {self.steps}")
        if len(set(self.zero.axes)) != len(self.zero.axes):
            raise ValueError(f"zero.axes = {','.join(self.zero.axes)} names an axis twice")
        profile_steps(self)
        _check_mixture(self.data)
        return self


def profile_steps(config: Config) -> tuple[int, int] | None:
    """(first, last) step of the profiler trace that `config` asks for.

    Raises:
        ValueError: `log.profile` does not name steps of the run.
    """
    text = config.log.profile
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    if not found:
        raise ValueError(f"log.profile = {text}: must be the first and the last step, such as 10-13, or none")
    first, last = int(found[1]), int(found[2])
    if not 1 <= first <= last <= config.steps:
        raise ValueError(f"log.profile = {text}: must be steps of the run, which go from 1 to steps = {config.steps}")
    return first, last


def _check_mixture(data: Data) -> None:
    weights = [source.weight for source in data.mixture]
    if data.mixture and data.path is not None:
        raise ValueError(f"data.path = {data.path} and data.mixture exclude each other: give one of them")
    if data.mixture and abs(math.fsum(weights) - 1) > _MIXTURE_TOLERANCE:
        shown = " + ".join(map(str, weights))
        raise ValueError(f"data.mixture: the weights {shown} sum to {math.fsum(weights):g}; they must sum to 1")


def _check_optimizer(optim: Optim) -> None:
    """Refuses what the chosen optimizer and schedule would not look at."""
    try:
        optim.settings()
    except ValueError as error:
        raise ValueError(f"optim.{error}") from None
    for key in ("plateau_factor", "plateau_window"):
        if optim.plateau_patience is None and getattr(optim, key) != Optim.model_fields[key].default:
            raise ValueError(f"optim.{key} = {getattr(optim, key)} needs optim.plateau_patience, which is none")
    unread = optim.schedule == "constant" and optim.plateau_patience is None
    if unread and optim.min_lr_ratio != Optim.model_fields["min_lr_ratio"].default:
        raise ValueError(f"optim.min_lr_ratio = {optim.min_lr_ratio}: optim.schedule = constant does not go there")


def _divides(small_key: str, small: int, large_key: str, large: int) -> None:
    if large % small:
        raise ValueError(f"{small_key} = {small} must divide {large_key} = {large}")


def _check_tensor_parallel(model: Model, tp: int) -> None:
    for key in ("heads", "kv_heads", "mlp_width"):
        if tp > 1:
            _divides("mesh axis tp", tp, f"model.{key}", getattr(model, key))


def resolve(config: Config, device_count: int, platform: str) -> Config:
    """`config` with nothing left open: mesh sizes, microbatch, number format and optimizer settings are of this run.

    Args:
        config: as loaded.
        device_count: devices of all processes.
        platform: `jax.default_backend()`.

    Raises:
        ConfigError: the mesh does not make `device_count` devices, `tp` does not divide the heads, or the batch is not
            a multiple of `micro_batch` times the data-parallel size.
    """
    try:
        sizes = mesh.sizes_on(mesh.parse(config.mesh), device_count)
        _check_tensor_parallel(config.model, sizes[mesh.TP])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_comm(config.comm, platform)
    data_parallel = sizes[mesh.NODE] * sizes[mesh.DP]
    micro_batch = config.micro_batch or max(1, config.batch_size // data_parallel)
    if config.batch_size % (micro_batch * data_parallel):
        raise ConfigError(
            f"batch_size = {config.batch_size} must be a multiple of micro_batch x data-parallel devices = "
            f"{micro_batch} x {data_parallel} = {micro_batch * data_parallel}"
        )
    open_params, open_warmup = config.precision.params == "auto", config.optim.warmup_steps is None
    params = ("float32" if platform == "cpu" else "bfloat16") if open_params else config.precision.params
    if config.model.attention == "cudnn" and platform not in ("gpu", "cuda"):
        raise ConfigError(f"model.attention = cudnn: runs on NVIDIA GPUs, not on {platform}")
    warmup_steps = config.steps // 20 if open_warmup else config.optim.warmup_steps
    optim = {"lr": recipes.RECIPES[config.optim.name].lr} if config.optim.lr is None else {}
    optim |= {"warmup_steps": warmup_steps, **config.optim.settings()}
    return config.model_copy(
        update={
            "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
            "micro_batch": micro_batch,
            "precision": config.precision.model_copy(update={"params": params}),
            "optim": config.optim.model_copy(update=optim),
        }
    )


def _check_comm(comm: Comm, platform: str) -> None:
    for key in ("reduce_bucket_bytes", "gather_bucket_bytes"):
        if getattr(comm, key) is not None and platform not in ("gpu", "cuda"):
            raise ConfigError(f"comm.{key} = {getattr(comm, key)}: is for GPUs, on {platform} there is no such size")


def load(argv: Sequence[str], prog: str = "python -m jzero.train") -> Config:
    """The settings that `argv` (without the program's name) asks for; `--help` prints them all and exits.

    Raises:
        ConfigError: one line that names the key, the value and what is allowed.
    """
    flags = _parse_flags(argv, prog)
    path = flags.pop("config", None)
    values = {} if path is None else read_yaml(path)
    fields = dict(_leaves(Config))
    for key, text in flags.items():
        _put(values, key, _from_text(fields[key], text))
    return validate(values)


def validate(values: Mapping[str, Any]) -> Config:
    """The Config of nested `values`.

    Raises:
        ConfigError: all that is wrong with them, in one line.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(map(_explain, error.errors())))) from None


def to_yaml(config: Config) -> str:
    """`config` as YAML that `load` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _StrictLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001 (as in PyYAML)
        """The mapping `node` describes, each key once."""
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in a number with an exponent and takes 1e-3 for text; everybody who writes it means the number.
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+$")
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(path: str) -> dict[str, Any]:
    """The nested mapping a YAML file holds; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, gives a key twice, or is not a mapping.
    """
    try:
        # _StrictLoader is a SafeLoader: it makes plain values only.
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: not a text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold keys and values, not {type(values).__name__}")
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _parse_flags(argv: Sequence[str], prog: str) -> dict[str, str]:
    """Key -> text of the flags that are given."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--KEY VALUE ...]",
        description="Every key may stand in the YAML file or be a flag; flags win.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help="a file of settings")
    groups: dict[str, Any] = {"": parser}
    for key, field in _leaves(Config):
        section = key.rpartition(".")[0]
        if section not in groups:
            doc = Config.model_fields[section].annotation.__doc__  # pyright: ignore[reportOptionalMemberAccess]
            groups[section] = parser.add_argument_group(section, doc)
        text = f"{field.description} ({_allowed(field)}; default {_show(field.default)})"
        groups[section].add_argument(
            f"--{key}", metavar="VALUE", default=argparse.SUPPRESS, help=text.replace("%", "%%")
        )
    known, unknown = parser.parse_known_args(_join_negative_values(argv))
    if unknown:
        word = unknown[0]
        raise ConfigError(
            _unknown_key(word[2:].partition("=")[0], "--")
            if word.startswith("--")
            else f"{word!r}: a flag starts with --"
        )
    return vars(known)


def _join_negative_values(argv: Sequence[str]) -> list[str]:
    """`--key -1e3` as `--key=-1e3`: argparse would take the value for another flag."""
    joined: list[str] = []
    for word in argv:
        if re.match(r"-[\d.]", word) and joined and re.match(r"--[^=]+$", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every key, in the order of the schema."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    inner = values.setdefault(section, {}) if section else values
    if isinstance(inner, dict):  # else the file is wrong there, and validation says so
        inner[name] = value


def _from_text(field: FieldInfo, text: str) -> Any:
    """What a flag's text would be in a file; text that does not fit is left for validation to name."""
    kind, optional = _kind(field)
    if optional and text == "none":
        return text  # the section knows the word
    if _is_sources(kind):
        return [_source_from_text(part) for part in text.strip("[]").split(",") if part.strip()]
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    if kind is str or all(isinstance(a, str) for a in get_args(kind) or (0,)):
        return text
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _source_from_text(text: str) -> Any:
    """PATH=WEIGHT as a file would say it; text that is not of that form is left for validation to name."""
    path, sign, weight = text.strip().rpartition("=")
    try:
        return {"path": path, "weight": float(weight)} if sign else text
    except ValueError:
        return text


def _is_sources(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[0] is MixtureSource


def _kind(field: FieldInfo) -> tuple[Any, bool]:
    """(type without None, whether None is allowed) of a field."""
    members = get_args(field.annotation)
    optional = NoneType in members
    return next(m for m in members if m is not NoneType) if optional else field.annotation, optional


def _allowed(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number >= 1"."""
    kind, optional = _kind(field)
    if get_origin(kind) is Literal:
        text = "one of " + ", ".join(map(str, get_args(kind)))
    elif _is_sources(kind):
        text = "PATH=WEIGHT,PATH=WEIGHT,..., in a file a list of {path: PATH, weight: WEIGHT, ...}"
    elif get_origin(kind) is tuple:
        text = "a list of " + (" and ".join(get_args(get_args(kind)[0])) or "texts")
    else:
        text = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    limits = [f"{sign} {getattr(b, name)}" for b in field.metadata for name, sign in signs if hasattr(b, name)]
    text = f"{text} {' and '.join(limits)}" if limits else text
    return f"{text}, or none" if optional else text


def _explain(error: Any) -> str:
    """One pydantic error in one line."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    known, parts = dict(_leaves(Config)), [str(part) for part in error["loc"]]
    if parts[:2] == ["data", "mixture"] and len(parts) > 3:
        return _explain_source(error, f"data.mixture, source {int(parts[2]) + 1}", parts[3])
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown_key(".".join(parts))
    key = next((k for k in (".".join(parts[:2]), parts[0]) if k in known), ".".join(parts))
    if key in known:
        return f"{key} = {_show(error['input'])}: must be {_allowed(known[key])}"
    inside = ", ".join(name for name in known if name.startswith(f"{key}."))
    return f"{key} = {_show(error['input'])}: must be a section, with keys of {inside}"


def _explain_source(error: Any, where: str, name: str) -> str:
    """One error in one source of a mixture."""
    fields = MixtureSource.model_fields
    if error["type"] == "missing":
        return f"{where}: has no {name}; a source is {{path: PATH, weight: WEIGHT, ...}}"
    if name not in fields:
        return f"{where}: {name}: unknown key; the keys of a source are {', '.join(fields)}"
    return f"{where}: {name} = {_show(error['input'])}: must be {_allowed(fields[name])}"


def _unknown_key(key: str, flag: str = "") -> str:
    names = [name for name, _ in _leaves(Config)] + (["config"] if flag else [])
    if key in names:
        return f"{key}: in a file, the keys of a section are nested under its name"
    short = {
        name.rpartition(".")[2]: name for name in reversed(names)
    }  # the right word in the wrong section, or in none
    last = key.rpartition(".")[2]
    close = (
        [last]
        if last in short
        else difflib.get_close_matches(key, names, 1) or difflib.get_close_matches(last, short, 1)
    )
    hint = f"did you mean {flag}{short.get(close[0], close[0])}?" if close else "--help lists all keys"
    return f"{flag}{key}: unknown key; {hint}"


def _show(value: Any) -> str:
    """A value as a file or a flag would spell it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
