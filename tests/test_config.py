"""The settings: one schema for file, flags and help; whatever is wrong is one line that names it."""

import dataclasses
import re
import subprocess
import sys

import pytest
import yaml

from jzero import config, recipes
from jzero.config import ConfigError, Model, load, resolve, to_yaml, validate
from jzero.config.fields import keys_of
from jzero.models.decoder_config import DecoderConfig
from jzero.models.presets import PRESETS


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def refusal(*argv):
    with pytest.raises(ConfigError) as caught:
        load(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sources(loaded):
    return [(source.path, source.weight) for source in loaded.data.mixture]


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = write(tmp_path, "steps: 7\nseed: 3\noptim: {lr: 0.5, b1: 0.8}\n")
    loaded = load(["--config", path, "--steps", "9", "--optim.lr=0.25"])
    assert (loaded.steps, loaded.seed, loaded.optim.lr, loaded.optim.b1) == (9, 3, 0.25, 0.8)
    assert loaded.optim.b2 == load([]).optim.b2


@pytest.mark.parametrize(
    ("argv", "read", "value"),
    [
        (["--optim.lr", "1e-3"], lambda c: c.optim.lr, 1e-3),
        (["--optim.lr", "1"], lambda c: c.optim.lr, 1.0),
        (["--optim.clip_norm", "none"], lambda c: c.optim.clip_norm, None),
        (["--data.path", "none"], lambda c: c.data.path, None),
        (["--data.path", "12"], lambda c: c.data.path, "12"),
        (["--data.eos", "<|endoftext|>"], lambda c: c.data.eos, "<|endoftext|>"),
        (["--data.eval_batches", "none"], lambda c: c.data.eval_batches, None),
        (["--data.mixture", "none=0.7, a=b.txt=3e-1"], sources, [(None, 0.7), ("a=b.txt", 0.3)]),
        (["--run.dir", "true"], lambda c: c.run.dir, "true"),
        (["--model.remat", "none"], lambda c: c.model.remat, "none"),
        (["--model.scan", "false"], lambda c: c.model.scan, False),
        (["--zero.axes", "dp"], lambda c: c.zero.axes, ("dp",)),
        (["--zero.axes", "[dp, node]"], lambda c: c.zero.axes, ("dp", "node")),
        (["--zero.replicate", "*/scale,head/*"], lambda c: c.zero.replicate, ("*/scale", "head/*")),
        (["--mesh", "dp=-1,tp=2"], lambda c: c.mesh, "dp=-1,tp=2"),
        (["--micro_batch", "none"], lambda c: c.micro_batch, None),
        (["--run.cache_dir", "none"], lambda c: c.run.cache_dir, None),
        (["--checkpoint.resume", "120"], lambda c: c.checkpoint.resume, 120),
        (["--checkpoint.resume", "must"], lambda c: c.checkpoint.resume, "must"),
        (["--checkpoint.every", "none"], lambda c: c.checkpoint.every, None),
        (["--checkpoint.keep", "none"], lambda c: c.checkpoint.keep, None),
        (["--log.profile", "7-9"], config.profile_steps, (7, 9)),
        (["--log.profile", "none"], config.profile_steps, None),
        (["--optim.lr", "none"], lambda c: c.optim.lr, None),
        (["--optim.name", "sgd", "--optim.nesterov", "true"], lambda c: c.optim.nesterov, True),
        (["--optim.name", "muon", "--optim.adamw_leaves", "a*,b"], lambda c: c.optim.adamw_leaves, ("a*", "b")),
        (["--optim.adamw_leaves", "none"], lambda c: c.optim.adamw_leaves, None),
        (["--optim.ema", "0.99"], lambda c: c.optim.ema, 0.99),
    ],
)
def test_a_flag_means_what_it_says(argv, read, value):
    got = read(load(argv))
    assert got == value
    assert type(got) is type(value)


def test_numbers_with_an_exponent_and_the_word_none_mean_the_same_in_a_file(tmp_path):
    loaded = load(["--config", write(tmp_path, "optim: {lr: 1e-3, clip_norm: none}\nmodel: {remat: none}")])
    assert (loaded.optim.lr, loaded.optim.clip_norm, loaded.model.remat) == (1e-3, None, "none")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        # (what is given, what the one line must name)
        (["--optim.lrr", "3"], ["--optim.lrr", "did you mean --optim.lr?"]),
        (["--lr", "3"], ["--lr", "did you mean --optim.lr?"]),
        (["--optmi.weight_decay", "3"], ["did you mean --optim.weight_decay?"]),
        (["--qqq", "3"], ["--qqq: unknown key", "--help"]),
        (["--step", "3"], ["--step: unknown key; did you mean --steps?"]),
        (["steps=3"], ["'steps=3'", "--"]),
        (["--steps"], ["--steps"]),
        (["--stage", "4"], ["stage = 4", "0, 1, 2, 3, auto"]),
        (["--stage", "-1"], ["stage = -1", "0, 1, 2, 3, auto"]),
        (["--stage", "true"], ["stage = true", "0, 1, 2, 3, auto"]),
        (["--steps", "0"], ["steps = 0", ">= 1"]),
        (["--steps", "-5"], ["steps = -5", ">= 1"]),
        (["--steps", "2.5"], ["steps = 2.5", "whole number"]),
        (["--log.every", "0"], ["log.every = 0", ">= 1"]),
        (["--log.eval_every", "-2"], ["log.eval_every = -2", ">= 1"]),
        (["--log.tensorboard", "1"], ["log.tensorboard = 1", "true or false"]),
        (["--log.profile", "10:13"], ["log.profile = 10:13", "such as 10-13"]),
        (["--log.profile", "10"], ["log.profile = 10", "the first and the last step"]),
        (["--log.profile", "0-3"], ["log.profile = 0-3", "from 1"]),
        (["--log.profile", "5-4"], ["log.profile = 5-4", "steps of the run"]),
        (["--log.profile", "10-13", "--steps", "12"], ["log.profile = 10-13", "steps = 12"]),
        (["--checkpoint.every", "0"], ["checkpoint.every = 0", ">= 1", "or none"]),
        (["--checkpoint.keep", "0"], ["checkpoint.keep = 0", ">= 1", "or none"]),
        (["--checkpoint.resume", "yes"], ["checkpoint.resume = yes", "auto, must, never or the number of a step"]),
        (["--checkpoint.resume", "-1"], ["checkpoint.resume = -1", "auto, must, never or the number of a step"]),
        (["--run.cache_dir", ""], ["run.cache_dir"]),
        (["--batch_size", "many"], ["batch_size = many", "whole number"]),
        (["--optim.lr", "-1e-3"], ["optim.lr = -0.001", "> 0"]),
        (["--optim.lr", "nan"], ["optim.lr = nan", "> 0"]),
        (["--optim.lr", "inf"], ["optim.lr = inf", "> 0"]),
        (["--optim.schedule", "cosin"], ["optim.schedule = cosin", "constant, linear, cosine"]),
        (["--optim.name", "adam"], ["optim.name = adam", "adamw, lion, adafactor, sgd, muon"]),
        (["--optim.momentum", "0.9"], ["optim.momentum = 0.9: adamw has none", "weight_decay, b1, b2, eps"]),
        (["--optim.nesterov", "false"], ["optim.nesterov = False: adamw has none"]),
        (["--optim.name", "sgd", "--optim.b2", "0.9"], ["optim.b2 = 0.9: sgd has none", "momentum, nesterov"]),
        (["--optim.name", "lion", "--optim.eps", "1e-8"], ["optim.eps = 1e-08: lion has none"]),
        (["--optim.name", "adafactor", "--optim.b1", "0.5"], ["optim.b1 = 0.5: adafactor has none"]),
        (["--optim.adamw_leaves", "head/*"], ["optim.adamw_leaves", "adamw has none"]),
        (["--optim.b1", "1"], ["optim.b1 = 1", "< 1"]),
        (["--optim.name", "sgd", "--optim.momentum", "-1"], ["optim.momentum = -1", ">= 0"]),
        (["--optim.name", "sgd", "--optim.nesterov", "1"], ["optim.nesterov = 1", "true or false, or none"]),
        (["--optim.weight_decay", "-1"], ["optim.weight_decay = -1", ">= 0"]),
        (["--optim.ema", "1"], ["optim.ema = 1", "> 0 and < 1"]),
        (["--optim.ema", "0"], ["optim.ema = 0", "> 0 and < 1"]),
        (["--optim.plateau_patience", "0"], ["optim.plateau_patience = 0", ">= 1"]),
        (["--optim.plateau_factor", "1"], ["optim.plateau_factor = 1", "< 1"]),
        (["--optim.plateau_factor", "0.1"], ["optim.plateau_factor = 0.1 needs optim.plateau_patience"]),
        (["--optim.schedule", "constant", "--optim.min_lr_ratio", "0"], ["optim.min_lr_ratio = 0", "constant"]),
        (["--optim.plateau_window", "0"], ["optim.plateau_window = 0", ">= 1"]),
        (["--optim.plateau_window", "5"], ["optim.plateau_window = 5 needs optim.plateau_patience"]),
        (["--model.scan", "1"], ["model.scan = 1", "true or false"]),
        (["--model.vocab", "0"], ["model.vocab = 0", ">= 1"]),
        (["--model.preset", "gpt-2"], ["model.preset = gpt-2", "did you mean gpt2?"]),
        (["--model.preset", "zzz"], ["model.preset = zzz", "tiny, gpt2,", "qwen3-8b"]),
        (["--model.preset", ""], ["model.preset = ", "unknown preset"]),
        (["--model.head_dim", "0"], ["model.head_dim = 0", ">= 1"]),
        (["--model.head_dim", "7"], ["model.head_dim=7", "even"]),
        (["--model.norm", "batch"], ["model.norm = batch", "rms, layer"]),
        (["--model.qk_norm", "1"], ["model.qk_norm = 1", "true or false"]),
        (["--model.mlp", "relu"], ["model.mlp = relu", "swiglu, gelu"]),
        (["--model.biases", "true"], ["model.biases = true", "none, qkv, all"]),
        (["--model.learned_positions", "0"], ["model.learned_positions = 0", ">= 1"]),
        (["--model.learned_positions", "64"], ["data.seq_len = 128", "model.learned_positions = 64"]),
        (["--model.preset", "gpt2", "--model.rope_theta", "5e5"], ["model.rope_theta=500000.0", "learned_positions"]),
        (["--model.rope_scaling", "yarn"], ["model.rope_scaling = yarn", "linear, llama3"]),
        (["--model.rope_factor", "8"], ["model.rope_factor=8.0 has no effect", "rope_scaling is none"]),
        (["--model.rope_factor", "0.5"], ["model.rope_factor = 0.5", ">= 1"]),
        (
            ["--model.rope_scaling", "linear", "--model.rope_low_freq_factor", "2"],
            ["model.rope_low_freq_factor=2.0 has no effect", "linear"],
        ),
        (
            ["--model.rope_scaling", "llama3", "--model.rope_low_freq_factor", "4"],
            ["model.rope_low_freq_factor=4.0", "rope_high_freq_factor=4.0"],
        ),
        (["--model.rope_high_freq_factor", "0"], ["model.rope_high_freq_factor = 0", "> 0"]),
        (["--model.rope_original_positions", "1.5"], ["model.rope_original_positions = 1.5", "whole number"]),
        (["--model.window", "0"], ["model.window = 0", ">= 1"]),
        (["--model.remat", "some"], ["model.remat = some", "none, full, dots"]),
        (["--model.attention", "flash"], ["model.attention = flash", "xla, cudnn"]),
        (
            ["--model.attention", "cudnn", "--precision.params", "float32"],
            ["model.attention='cudnn'", "16 bits", "float32"],
        ),
        (["--model.attention", "cudnn", "--model.head_dim", "20"], ["model.attention='cudnn'", "head size 20"]),
        (["--model.dropout", "1"], ["model.dropout = 1", "< 1"]),
        (["--precision.params", "float16"], ["precision.params = float16", "bfloat16, float32, auto"]),
        (["--zero.axes", "dp,tp"], ["zero.axes", "tp", "node and dp"]),
        (["--zero.axes", ""], ["zero.axes = []"]),
        (["--data.format", "csv"], ["data.format = csv", "text, jsonl, tokens, auto"]),
        (["--data.dtype", "int8"], ["data.dtype = int8", "uint16, uint32, auto"]),
        (["--data.packing", "docs"], ["data.packing = docs", "none, documents"]),
        (["--data.tokenizer", ""], ["data.tokenizer = ", "text"]),
        (["--data.eval_batches", "0"], ["data.eval_batches = 0", ">= 1"]),
        (["--data.mixture", "a=0.5,b"], ["data.mixture = b", "PATH=WEIGHT"]),
        (["--data.mixture", "a=0.5,b=half"], ["data.mixture = b=half", "PATH=WEIGHT"]),
        (["--data.mixture", "a=0.5,b=0.4"], ["data.mixture: the weights 0.5 + 0.4 sum to 0.9"]),
        (["--data.mixture", "a=1.5,b=-0.5"], ["data.mixture, source 2: weight = -0.5", "> 0"]),
        (["--data.mixture", "a=1", "--data.path", "b"], ["data.path = b", "data.mixture", "exclude"]),
        (["--zero.axes", "dp,dp"], ["zero.axes = dp,dp", "twice"]),
        (["--mesh", "db=8"], ["'db'", "did you mean 'dp'?", "node, dp, tp"]),
        (["--mesh", "dp=0"], ["dp=0"]),
        (["--mesh", "dp=-1,tp=-1"], ["-1"]),
        (["--mesh", "tp=3"], ["tp = 3", "model.heads = 4"]),
        (["--mesh", "tp=2", "--model.kv_heads", "1"], ["tp = 2", "model.kv_heads = 1"]),
        (["--model.heads", "3"], ["model.width=128", "heads=3", "head_dim"]),
        (["--model.kv_heads", "3"], ["model.heads=4", "kv_heads=3"]),
        (["--model.width", "12"], ["model.width=12 / heads=4", "size 3", "even"]),
        (["--optim.warmup_steps", "20", "--steps", "10"], ["optim.warmup_steps = 20", "steps = 10"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml", "No such file"]),
        (["--config", "/"], ["--config /"]),
        (["--distributed.coordinator", "host"], ["distributed.coordinator = host", "HOST:PORT, auto or none"]),
        (["--distributed.coordinator", "host:0"], ["distributed.coordinator = host:0", "HOST:PORT"]),
        (["--distributed.coordinator", ":1234"], ["distributed.coordinator = :1234", "HOST:PORT"]),
        (
            ["--distributed.coordinator", "none", "--distributed.processes", "2"],
            ["processes = 2", "coordinator = none"],
        ),
        (["--distributed.coordinator", "none", "--distributed.process", "0"], ["process = 0", "coordinator = none"]),
        (["--distributed.processes", "0"], ["distributed.processes = 0", ">= 1, or none"]),
        (["--distributed.process", "-1"], ["distributed.process = -1", ">= 0, or none"]),
        (["--distributed.processes", "2", "--distributed.process", "2"], ["process = 2", "below", "processes = 2"]),
        (["--distributed.local_devices", "0,x"], ["distributed.local_devices = 0,x", "0,1, or all or auto"]),
        (["--distributed.local_devices", "1,1"], ["distributed.local_devices = 1,1"]),
        (["--distributed.start_timeout_s", "0"], ["distributed.start_timeout_s = 0", ">= 1"]),
        (["--distributed.heartbeat_timeout_s", "1"], ["distributed.heartbeat_timeout_s = 1", ">= 5"]),
        (["--comm.layers_ahead", "3"], ["comm.layers_ahead = 3", "<= 2"]),
        (["--comm.overlap", "maybe"], ["comm.overlap = maybe"]),
        (["--comm.reduce_bucket_bytes", "0"], ["comm.reduce_bucket_bytes = 0", ">= 1, or none"]),
        (["--optim.lr", "1e39"], ["optim.lr = 1e+39", "range of float32"]),
        (["--optim.clip_norm", "1e-50"], ["optim.clip_norm = 1e-50", "range of float32"]),
        (["--optim.plateau_patience", "99999999999"], ["optim.plateau_patience = 99999999999"]),
        (["--data.path", ""], ["data.path"]),
    ],
)
def test_wrong_flags_are_refused_in_one_line(argv, parts):
    message = refusal(*argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stepz: 3", ["stepz: unknown key", "did you mean steps?"]),
        ("optim: {lrr: 3}", ["optim.lrr: unknown key", "did you mean optim.lr?"]),
        ("model: {lr: 3}", ["model.lr: unknown key", "did you mean optim.lr?"]),
        ("optim.lr: 3", ["optim.lr", "nested"]),
        ("optim: 3", ["optim = 3", "section", "optim.lr"]),
        ("optim:\n", ["optim = none", "section"]),
        ("steps: '3'", ["steps = 3", "whole number"]),
        ("steps: true", ["steps = true", "whole number"]),
        ("optim: {lr: true}", ["optim.lr = true", "a number > 0"]),
        ("zero: {axes: dp}", ["zero.axes = dp", "a list of node and dp"]),
        ("zero: {replicate: [1]}", ["zero.replicate", "a list of texts"]),
        ("log: {profile: 10}", ["log.profile = 10", "text, or none"]),
        ("checkpoint: {resume: 1.5}", ["checkpoint.resume = 1.5"]),
        ("checkpoint: {resume: true}", ["checkpoint.resume = true"]),
        ("model: {preset: 3}", ["model.preset = 3", "text, or none"]),
        ("model: {preset: [gpt2]}", ["model.preset = [gpt2]", "text, or none"]),
        ("data: {path: 3}", ["data.path = 3", "text, or none"]),
        ("data: {eos: 1.5}", ["data.eos = 1.5"]),
        ("data: {mixture: a}", ["data.mixture = a", "a list of {path: PATH, weight: WEIGHT, ...}"]),
        ("data: {mixture: [{path: a}]}", ["data.mixture, source 1: has no weight"]),
        ("data: {mixture: [{path: a, weight: 1, wait: 2}]}", ["source 1: wait: unknown key", "path, weight, glob"]),
        ("data: {mixture: [{path: a, weight: 1, format: csv}]}", ["source 1: format = csv", "text, jsonl, tokens"]),
        ("steps: 3\nseed: 1\nsteps: 4", ["'steps' is given twice", "line 3"]),
        ("optim: {lr: 1.0, lr: 2.0}", ["'lr' is given twice"]),
        ("[1, 2]", ["list"]),
        ("a: b: c", ["line 1"]),
        ("1: 2", ["1: unknown key"]),
        ("steps: !!python/object/apply:os.getcwd []", ["could not determine a constructor"]),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path, text, parts):
    message = refusal("--config", write(tmp_path, text))
    for part in parts:
        assert part in message


def test_a_preset_stands_above_the_defaults_and_below_the_keys_that_are_given(tmp_path):
    path = write(tmp_path, "model: {preset: gpt2, layers: 6}\n")
    model = load(["--config", path, "--model.mlp_width", "16", "--model.dropout", "0.1"]).model
    assert (model.layers, model.mlp_width) == (6, 16)
    assert (model.width, model.norm, model.biases, model.learned_positions) == (768, "layer", "all", 1024)
    assert model.dropout == 0.1
    assert load(["--config", path, "--model.preset", "none"]).model.width == 128


def test_a_resolved_preset_holds_its_values_and_reads_back(tmp_path):
    resolved = resolve(load(["--model.preset", "llama-3.1-8b", "--model.layers", "2"]), 8, "cpu")
    values = yaml.safe_load(to_yaml(resolved))["model"]
    assert (values["layers"], values["width"], values["rope_scaling"], values["rope_factor"]) == (2, 4096, "llama3", 8)
    assert load(["--config", write(tmp_path, to_yaml(resolved))]) == resolved


def test_the_models_keys_are_the_decoders_fields_with_its_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(DecoderConfig)}
    assert set(Model.model_fields) - {"preset"} == set(fields) - {"dtype", "param_dtype", "layers_ahead"}
    for name, default in fields.items():
        if default is not dataclasses.MISSING and name in Model.model_fields:
            assert Model.model_fields[name].default == default, name
    assert load([]).model.decoder("float32") == PRESETS["tiny"]


@pytest.mark.parametrize("key", ["comm.reduce_bucket_bytes", "comm.gather_bucket_bytes"])
def test_sizes_for_the_gpu_compiler_are_refused_elsewhere(key):
    config = load([f"--{key}", "1000"])
    with pytest.raises(ConfigError, match=f"{key} = 1000: is for GPUs"):
        resolve(config, 8, "cpu")
    assert resolve(config, 8, "gpu").comm == config.comm


def test_all_that_is_wrong_is_named_at_once():
    message = refusal("--steps", "0", "--optim.lr", "fast")
    assert "steps = 0" in message
    assert "optim.lr = fast" in message


def test_a_config_survives_the_way_through_yaml(tmp_path):
    argv = ["--stage", "1", "--mesh", "dp=2,tp=2", "--optim.lr", "1e-5", "--optim.clip_norm", "none"]
    argv += ["--zero.replicate", "a*,b: c", "--zero.axes", "dp", "--run.dir", "yes", "--model.norm_eps", "1e-12"]
    mixture = "data: {mixture: [{path: none, weight: 0.9}, {path: a.bin, weight: 0.1, dtype: uint32}], eos: 3}"
    mixed = load(["--config", write(tmp_path, mixture)])
    assert sources(mixed) == [(None, 0.9), ("a.bin", 0.1)]
    for before in (load(argv), resolve(load(argv), 4, "cpu"), load([]), mixed):
        assert load(["--config", write(tmp_path, to_yaml(before))]) == before


def test_nothing_is_left_open_in_a_resolved_config():
    resolved = resolve(load(["--mesh", "tp=2,dp=-1", "--batch_size", "16", "--steps", "40"]), 8, "gpu")
    assert resolved.mesh == "node=1,dp=4,tp=2"
    assert resolved.micro_batch == 4
    assert resolved.precision.params == "bfloat16"
    assert resolved.optim.warmup_steps == 2
    assert resolve(resolved, 8, "gpu") == resolved
    assert (resolved.optim.lr, resolved.optim.b2, resolved.optim.momentum) == (3e-3, 0.95, None)
    assert resolve(load([]), 8, "cpu").precision.params == "float32"
    assert resolve(load(["--precision.params", "bfloat16"]), 8, "cpu").precision.params == "bfloat16"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--mesh", "dp=3"], ["dp=3", "8 devices"]),
        (["--mesh", "dp=-1,tp=16", "--model.heads", "16", "--model.kv_heads", "16"], ["tp=16", "8 devices"]),
        (["--mesh", "node=1,dp=1,tp=-1"], ["tp = 8", "model.heads = 4"]),
        (["--batch_size", "12"], ["batch_size = 12", "1 x 8 = 8"]),
        (["--batch_size", "4"], ["batch_size = 4", "1 x 8 = 8"]),
        (["--batch_size", "32", "--micro_batch", "3"], ["batch_size = 32", "3 x 8 = 24"]),
        (["--mesh", "dp=4,tp=2", "--batch_size", "32", "--micro_batch", "5"], ["5 x 4 = 20"]),
        (["--model.attention", "cudnn"], ["model.attention = cudnn", "not on cpu"]),
    ],
)
def test_what_the_devices_do_not_allow_is_refused_in_one_line(argv, parts):
    with pytest.raises(ConfigError) as caught:
        resolve(load(argv), 8, "cpu")
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_resolved_optimizer_has_the_settings_of_its_recipe_and_no_others(name, tmp_path):
    resolved = resolve(load(["--optim.name", name]), 8, "cpu")
    recipe = recipes.RECIPES[name]
    assert resolved.optim.lr == recipe.lr
    for key in recipes.KEYS:
        assert getattr(resolved.optim, key) == recipe.settings.get(key)
    assert load(["--config", write(tmp_path, to_yaml(resolved))]) == resolved
    other = resolve(load(["--optim.name", name, "--optim.lr", "0.5", "--optim.weight_decay", "0.25"]), 8, "cpu")
    assert (other.optim.lr, other.optim.weight_decay) == (0.5, 0.25)


def test_a_resolved_config_is_that_of_all_processes(tmp_path):
    flags = [
        "--distributed.coordinator",
        "host:1234",
        "--distributed.processes",
        "2",
        "--distributed.local_devices",
        "0",
    ]
    flags += ["--distributed.heartbeat_timeout_s", "50"]
    first, second = (resolve(load([*flags, "--distributed.process", str(i)]), 8, "cpu") for i in range(2))
    assert first == second
    assert (first.distributed.coordinator, first.distributed.heartbeat_timeout_s) == ("auto", 50)
    assert load(["--config", write(tmp_path, to_yaml(first))]) == first
    assert dict(config.values_of(first))["distributed.processes"] is None


@pytest.mark.parametrize("mesh", ["tp=4", "node=2,tp=4", "node=1,dp=-1,tp=4"])
def test_tensor_parallelism_across_hosts_is_refused_until_it_is_written_out(mesh):
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    with pytest.raises(
        ConfigError, match=r"tp = 4 would lie across hosts \(devices: 2 on a, 2 on b, .*divides 2,"
    ) as caught:
        resolve(load(["--mesh", "dp=-1," * ("-1" not in mesh and "node" not in mesh) + mesh]), 8, "cpu", hosts)
    written_out = str(caught.value).rpartition(" ")[2]
    resolved = resolve(load(["--mesh", written_out]), 8, "cpu", hosts)
    assert resolved.mesh == written_out
    assert resolve(load(["--mesh", "dp=-1,tp=2"]), 8, "cpu", hosts).mesh == "node=1,dp=4,tp=2"
    assert resolve(load(["--mesh", "dp=-1,tp=4"]), 8, "cpu", ["a"] * 8).mesh == "node=1,dp=2,tp=4"


def test_every_setting_of_an_optimizer_is_a_key():
    assert set(recipes.KEYS) <= config.Optim.model_fields.keys()


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load([]).optim.lr = 1.0


def test_help_has_a_line_for_every_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        load(["--help"])
    text = capsys.readouterr().out
    for key, field in keys_of(config.Config):
        assert re.search(rf"--{re.escape(key)} VALUE\b", text), key
        assert len(field.description) > 10
        assert " ".join(field.description.split()) in " ".join(text.split()), key


def test_the_contract_keys_exist():
    keys = yaml.safe_load(to_yaml(load([])))
    assert {"stage", "mesh", "seed", "steps", "batch_size", "micro_batch"} <= keys.keys()
    assert {"name", "lr", "weight_decay", "warmup_steps", "schedule", "clip_norm"} <= keys["optim"].keys()
    assert {"params", "grads", "reduce"} <= keys["precision"].keys()
    assert {"axes", "persist_below", "replicate", "regather"} <= keys["zero"].keys()
    assert "every" in keys["log"]
    assert "dir" in keys["run"]


def test_values_from_a_program_are_held_to_the_same_schema():
    assert validate({"steps": 5}).steps == 5
    with pytest.raises(ConfigError, match="steps = 5: must be a whole number"):
        validate({"steps": "5"})


def test_loading_makes_no_array():
    program = (
        "import jax\nfrom jzero.config import load, resolve\n"
        "resolve(load(['--mesh', 'dp=4,tp=2']), 8, 'cpu')\nprint(len(jax.live_arrays()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
