"""Pictures of plans show the plans' numbers, and their words stand clear of each other."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from jzero.plan import __main__ as cli
from jzero.plan import plots, text
from jzero.plan.bars import memory_classes
from jzero.plan.estimate import Estimate
from jzero.plan.lanes import waits
from jzero.plan.memory import Memory, Part
from jzero.plan.report import Plan
from jzero.plan.traffic import Sent, Traffic
from jzero.schedule import Event, Timeline

CAPACITY = 80 * 10**9


def memory(params, opt_state, grads, temp, activations=0, gathered=0):
    parts = [("parameters", params), ("gradients", grads), ("master", opt_state), ("m", opt_state), ("v", opt_state)]
    rest = params + 3 * opt_state
    return Memory(
        parts=tuple(Part(name, nbytes, 0.0, "") for name, nbytes in parts),
        tiers={"device": rest, "host": 0},
        host_bytes_per_machine=0, batch_bytes=0, counter_bytes=0, argument_bytes=rest, temp_bytes=temp,
        peak_bytes=rest + temp, activations_bytes=activations, gathered_bytes=gathered,
    )  # fmt: skip


def timeline(phase):
    events = (
        Event("gather", "communication", 0.0, 2e-3, "all-gather dp", ""),
        Event("gemm", "compute", 1e-3, 4e-3, "matmul", ""),
        Event("fusion", "compute", 4e-3, 5e-3, "other", ""),
        Event("scatter", "communication", 4e-3, 7e-3, "reduce-scatter node+dp", ""),
        Event("gemm.1", "compute", 6e-3, 8e-3, "matmul", ""),
    )
    return Timeline(phase, phase, 31, 9e-3, events)


def estimate(loops):
    return Estimate(0.5, 0.4, 0.1, 0.2, 10**15, 0.5, 16_384, 2048, 1000.0, (), loops, ())


def plan(stage=3, mesh="dp=8", remat="full", gb=10**9, loops=("backward", "forward"), capacity: int | None = CAPACITY):
    sizes = {"node": 1, "dp": 1, "tp": 1} | {k: int(v) for k, v in (axis.split("=") for axis in mesh.split(","))}
    held = memory(14 * gb, (28 >> stage) * gb, 28 * gb, 40 * gb, 5 * gb, gb)
    across = ("node", "dp") if sizes["node"] > 1 else ("dp",)
    sent = (
        Sent("all-gather", across, "bf16", "between hosts" if sizes["node"] > 1 else "in a host", 20 * gb, 15 * gb, 0),
        Sent("reduce-scatter", ("dp",), "f32", "in a host", 20 * gb, 10 * gb, 0),
        Sent("all-reduce", ("tp",), "bf16", "in a host", 2 * gb, 3 * gb, None),
    )
    return Plan(
        device="NVIDIA H100 80GB HBM3", absent=True, mesh=sizes, stage=stage, parameters=6_738_415_616, rows=8,
        micro_batches=1, capacity_bytes=capacity, memory=held, traffic=Traffic(sent, 0, 0, 0.0, ""),
        time=estimate(tuple(map(timeline, loops))), label={"remat": remat, "micro_batch": "1"},
    )  # fmt: skip


def several(count):
    every = itertools.product(("none", "dots", "full"), ("node=32,dp=8,tp=8", "dp=8"), range(4))
    return [plan(stage, mesh, remat) for remat, mesh, stage in every][:count]


def drawn(plans, margin=0.1):
    """The figure, its axes, and its renderer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    page = plots.figure(plans, margin)
    canvas = FigureCanvasAgg(page)
    canvas.draw()
    return page, page.axes, canvas.get_renderer()


def words_of(page):
    """All that is written on a page."""
    yield from page.texts
    for ax in page.axes:
        yield from (*ax.texts, ax.xaxis.label, ax.title, ax._left_title)
        if ax.get_legend():
            yield from ax.get_legend().get_texts()
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            inside = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            yield from (tick.label1 for tick in inside if tick.label1.get_visible())


@pytest.mark.parametrize("count", [1, 4, 12, 24])
@pytest.mark.parametrize("gb", [10**6, 10**9, 10**11])
def test_no_two_words_overlap_and_none_leaves_the_page(count, gb):
    plans = [dataclasses.replace(p, memory=plan(p.stage, gb=gb).memory) for p in several(count)]
    page, _, renderer = drawn(plans)
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in words_of(page) if t.get_text()]
    assert len(boxes) > 30 + 3 * count
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), (one, other)
    for words, box in boxes:
        assert page.bbox.x0 <= box.x0, words
        assert box.x1 <= page.bbox.x1, words
        assert page.bbox.y0 <= box.y0, words
        assert box.y1 <= page.bbox.y1, words


def test_bars_are_as_long_as_the_numbers():
    plans = [plan(stage) for stage in range(4)]
    (memory_ax, traffic_ax, *_) = drawn(plans)[1]
    for y, one in enumerate(plans):
        for ax, nbytes in ((memory_ax, one.memory.peak_bytes), (traffic_ax, 28 * 10**9)):
            bars = [p for c in ax.containers for p in c.patches if round(p.get_y() + p.get_height() / 2) == y]
            assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(nbytes / 1e9)
            assert sum(bar.get_width() for bar in bars) == pytest.approx(nbytes / 1e9)
    (line,) = memory_ax.lines
    assert set(line.get_xdata()) == {CAPACITY / 1e9}


def test_memory_that_is_far_more_is_said_and_not_drawn():
    one = plan(capacity=10**12)
    ax = drawn([one])[1][0]
    assert not ax.lines
    assert ax.get_xlabel() == "GB (10⁹ bytes) of 1,000 that a device has"
    assert ax.get_xlim()[1] < 2 * one.memory.peak_bytes / 1e9


def test_the_words_beside_a_bar_say_what_is_missing():
    texts = [t.get_text() for t in drawn([plan(0), plan(3)])[1][0].texts]
    assert texts == ["138.00 GB, 66.00 too much", "63.00 GB, fits"]
    assert [t.get_text() for t in drawn([plan(0, capacity=None)])[1][0].texts] == ["138.00 GB"]


def test_classes_add_up_to_the_peak_also_where_temporaries_are_not_alive_together():
    for held in (memory(10, 5, 7, 20, 4, 3), memory(10, 5, 7, 8, 4, 3)):
        classes = dict(memory_classes(SimpleNamespace(memory=held)))
        assert sum(classes.values()) == held.peak_bytes
        assert classes["gradients"] == 7
    assert classes["activations"] == 1
    assert classes["gathered parameters"] == classes["other temporaries"] == 0


def test_forward_stands_above_backward_and_waiting_is_where_nothing_computes():
    axes = drawn([plan()])[1]
    assert [ax.get_title(loc="left") for ax in axes[2:]] == [
        "forward, one of 31 turns: 9.00 ms, 3.00 ms of it waiting",
        "backward, one of 31 turns: 9.00 ms, 3.00 ms of it waiting",
    ]
    assert list(waits(timeline("forward"))) == [(0.0, 1e-3), (5e-3, 6e-3), (8e-3, 9e-3)]


def test_without_loops_or_rates_there_are_bars_alone():
    for one in (plan(loops=()), dataclasses.replace(plan(), time=None)):
        assert len(drawn([one])[1]) == 2


def test_loops_are_of_the_last_plan_that_has_some():
    page = drawn([plan(2), plan(3), plan(0, loops=())])[0]
    assert any("layer loop of stage 3" in t.get_text() for t in page.texts)


def test_what_plans_share_is_said_once():
    plans = [plan(2), plan(3, "node=2,dp=8")]
    assert plots.common(plans) == "6,738,415,616 parameters, NVIDIA H100 80GB HBM3, remat full, micro batch 1"
    assert [plots.difference(p, plans) for p in plans] == ["stage 2, dp=8", "stage 3, node=2,dp=8"]
    assert plots.difference(plan(), [plan()]) == ""


def test_the_same_plans_make_the_same_file(tmp_path):
    for name in ("a.png", "b.png"):
        plots.save(str(tmp_path / "made" / name), several(4), 0.1)
    assert (tmp_path / "made" / "a.png").read_bytes() == (tmp_path / "made" / "b.png").read_bytes()


@pytest.mark.parametrize("name", ["a.svg", "a.pdf", "A.PNG"])
def test_other_formats_are_written_too(tmp_path, name):
    plots.save(str(tmp_path / name), [plan()])
    assert (tmp_path / name).stat().st_size > 1000


def refused(capsys, path):
    assert cli.main(["--model.layers", "1", "--plot", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --plot {path}: ")
    assert error.count("\n") == 1
    return error


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_compiled(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "plans", None)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    assert "must end in one of .png, .svg, .pdf" in refused(capsys, tmp_path / "plan.jpg")
    assert "is a directory" in refused(capsys, tmp_path / "folder.png")
    assert "not a directory" in refused(capsys, tmp_path / "file" / "plan.png").lower()
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'jzero[plot]'" in refused(capsys, tmp_path / "plan.png")


def test_the_command_draws_what_it_has_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "plans", lambda settings, *_: several(len(settings)))
    file = tmp_path / "plan.png"
    assert cli.main(["--stages", "0,1,2,3", "--plot", str(file), "--run.cache_dir", "none"]) == 0
    assert file.stat().st_size > 10_000
    assert "between hosts" in capsys.readouterr().out


def test_a_sweeps_table_has_a_head_for_every_column():
    head, *rows = text.compare(several(4), 0.1).splitlines()[1:6]
    assert head.endswith("  mfu")
    assert {len(row) for row in rows} == {len(head)}
