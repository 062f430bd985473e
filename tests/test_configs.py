"""The files of configs/: few, short, each says what it shows, and each is a run that can start."""

import re
from pathlib import Path

import jax
import pytest

import jzero
from jzero import hlo, targets, train
from jzero.build import make_run
from jzero.config import load, resolve

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"))
FOR_ACCELERATORS = {"gpu", "llama-3-8b"}
pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="the files are for eight devices")


def test_they_are_few_and_the_readme_has_a_line_for_each():
    assert 1 < len(FILES) <= 8
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^\| \[`(.+?)`\]\(configs/", readme, re.MULTILINE) == [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_first_lines_say_what_it_shows_and_how_to_run_it(path):
    first, command, *rest = path.read_text().splitlines()
    assert re.fullmatch(r"# .{20,}[.]", first)
    assert command.startswith(f"#   python -m jzero.train --config configs/{path.name}")
    assert len(rest) <= 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_a_run_that_can_start(path):
    platform = "gpu" if path.stem in FOR_ACCELERATORS else "cpu"
    config = resolve(load(["--config", str(path)]), 8, platform)
    if config.model.attention == "cudnn":  # which needs its GPU already when it is traced
        config = config.model_copy(update={"model": config.model.model_copy(update={"attention": None})})
    run = make_run(config, jzero.make_mesh(config.mesh))
    assert run.micro_batches * config.micro_batch * run.mesh.shape["node"] * run.mesh.shape["dp"] == config.batch_size
    assert not run.whole or config.zero.persist_below


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in FOR_ACCELERATORS], ids=lambda path: path.stem)
def test_the_small_ones_train(path, tmp_path):
    short = ["--steps", "3", "--optim.warmup_steps", "1", "--data.eval_batches", "1"]
    assert train.main(["--config", str(path), "--run.dir", str(tmp_path / "run"), *short]) == 0


@pytest.mark.slow
@pytest.mark.skipif(targets.available() is not None, reason=str(targets.available()))
def test_llama_3_8b_fits_a_node_of_eight():
    pytest.importorskip("nvidia.cudnn", reason="compiling its attention needs cuDNN")
    config = resolve(load(["--config", str(ROOT / "configs/llama-3-8b.yaml")]), 8, "gpu")
    mesh = jzero.make_mesh(config.mesh, targets.gpu_devices("h100", 8))
    run = make_run(config, mesh)
    program = run.lower()["step"].compile(compiler_options=targets.COMPILER_OPTIONS)
    assert 25e9 < hlo.memory(program).peak_bytes < 35e9  # 18 GB of them are 18 bytes for each of 8 billion / 8
