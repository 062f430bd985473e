"""The journal over the sessions of a run: metrics.jsonl is that of a run that never stopped, and nothing is lost."""

import json
from types import SimpleNamespace

import pytest
from event_files import events_in

from jzero import metrics_file
from jzero.config import load
from jzero.journal import Journal, Progress, RunError
from jzero.resume import telling_what_is_left
from jzero.waiting import Ended

SEQ_LEN = 4


def settings(*argv):
    return load(["--steps", "20", "--log.every", "5", "--log.eval_every", "10", "--data.seq_len", str(SEQ_LEN), *argv])


def session(path, config, start, last, bad=(), evaluate=True):
    """One session, from `start` to the end of step `last`; returns how far it came, and what it says.

    Args:
        bad: steps whose gradient is not finite.
    """
    with Journal(path / "metrics.jsonl", config, start=start) as journal:
        if journal.evaluation_is_due(start.step):
            journal.evaluated((5.0 - start.step / 10, 64.0))
        for step in range(start.step + 1, last + 1):
            in_row = 0
            while step - in_row in bad:
                in_row += 1
            skipped = start.skipped + sum(start.step < b <= step for b in bad)
            metrics = {"loss": 5.0 / step, "lr": 0.5, "skipped": skipped, "skipped_in_row": in_row}
            journal.trained([Ended(step, metrics, journal.now())])
            if evaluate and journal.evaluation_is_due(step):
                journal.evaluated((5.0 - step / 10, 64.0))
        return journal


def lines(path, name="metrics.jsonl"):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def without_times(found):
    return [{k: v for k, v in line.items() if k not in ("step_s", "tokens_per_s")} for line in found]


def unbroken(tmp_path, config):
    (tmp_path / "unbroken").mkdir()
    session(tmp_path / "unbroken", config, Progress(), config.steps)
    return without_times(lines(tmp_path / "unbroken"))


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(("saved", "killed"), [(7, 7), (7, 13), (5, 6), (10, 10), (10, 19), (19, 20), (20, 20)])
def test_a_run_that_was_killed_and_resumed_has_the_metrics_of_one_that_never_stopped(tmp_path, saved, killed, every):
    config = settings("--log.every", str(every))
    session(tmp_path, config, Progress(), killed)
    start = Progress(saved, samples=saved * config.batch_size)
    session(tmp_path, config, start, 20)
    assert without_times(lines(tmp_path)) == unbroken(tmp_path, config)


def test_what_a_killed_session_wrote_after_its_last_checkpoint_is_set_aside(tmp_path):
    config = settings("--log.every", "1")
    session(tmp_path, config, Progress(), 13)
    first = lines(tmp_path)
    session(tmp_path, config, Progress(7, samples=7 * config.batch_size), 9)
    taken_back = [line for line in first if line["step"] > 7]
    assert lines(tmp_path, "metrics.dropped.jsonl") == taken_back
    second = lines(tmp_path)
    assert second[:-2] == [line for line in first if line["step"] <= 7]
    session(tmp_path, config, Progress(8, samples=8 * config.batch_size), 20)
    assert lines(tmp_path, "metrics.dropped.jsonl") == [*taken_back, second[-1]]  # what was there is still there
    files = {f.name for f in tmp_path.iterdir() if "tfevents" not in f.name}
    assert files == {"metrics.jsonl", "metrics.dropped.jsonl"}


def test_a_session_that_ended_cleanly_leaves_nothing_to_set_aside(tmp_path):
    config = settings()
    progress = session(tmp_path, config, Progress(), 8).progress
    before = (tmp_path / "metrics.jsonl").stat()
    session(tmp_path, config, progress, 8)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not (tmp_path / "metrics.dropped.jsonl").exists()


@pytest.mark.parametrize("torn", [b'{"step": 8, "loss": 0.6', b"{", b'{"step": 8}x', b"\0\0\0", b"\xff\xfe", b'"step"'])
def test_a_line_that_was_cut_off_is_set_aside_and_the_next_one_is_whole(tmp_path, torn):
    config = settings("--log.every", "1")
    session(tmp_path, config, Progress(), 7)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    session(tmp_path, config, Progress(7, samples=7 * config.batch_size), 20)
    assert without_times(lines(tmp_path)) == unbroken(tmp_path, config)
    assert (tmp_path / "metrics.dropped.jsonl").read_bytes() == torn + b"\n"


def test_a_whole_line_without_its_end_stays(tmp_path):
    config = settings("--log.every", "1")
    session(tmp_path, config, Progress(), 7)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    session(tmp_path, config, Progress(7, samples=7 * config.batch_size), 20)
    assert without_times(lines(tmp_path)) == unbroken(tmp_path, config)


def test_killed_while_it_rewinds_it_leaves_the_metrics_as_they_were(tmp_path, monkeypatch):
    config = settings("--log.every", "1")
    session(tmp_path, config, Progress(), 13)
    before = lines(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    start = Progress(7, samples=7 * config.batch_size)
    monkeypatch.setattr(metrics_file.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        session(tmp_path, config, start, 20)
    monkeypatch.undo()
    assert lines(tmp_path) == before
    session(tmp_path, config, start, 20)
    assert without_times(lines(tmp_path)) == unbroken(tmp_path, config)


def test_a_run_that_begins_anew_keeps_no_line_of_what_was_there(tmp_path):
    config = settings("--log.every", "1")
    session(tmp_path, config, Progress(), 3)  # killed before its first checkpoint
    session(tmp_path, config, Progress(), 20)
    assert without_times(lines(tmp_path)) == unbroken(tmp_path, config)
    assert len(lines(tmp_path, "metrics.dropped.jsonl")) == 4


def test_a_resumed_run_whose_metrics_are_gone_writes_new_ones(tmp_path):
    session(tmp_path, settings(), Progress(7, samples=70), 12)
    assert [line["step"] for line in lines(tmp_path)] == [10, 10]


def test_tokens_go_on_from_the_samples_consumed_also_with_another_batch_size(tmp_path):
    session(tmp_path, settings("--batch_size", "8"), Progress(), 10)
    progress = session(tmp_path, settings("--batch_size", "6"), Progress(10, samples=80), 20).progress
    assert progress.samples == 80 + 60
    tokens = {line["step"]: line["tokens"] for line in lines(tmp_path) if "loss" in line}
    assert tokens == {1: 8 * 4, 5: 40 * 4, 10: 80 * 4, 15: 110 * 4, 20: 140 * 4}


# Evaluations.


@pytest.mark.parametrize(
    ("step", "evaluated", "due"),
    [
        (0, False, True),
        (0, True, True),  # a run that begins anew
        (10, False, True),  # stopped after the step, before its evaluation
        (10, True, False),
        (7, False, False),
        (20, False, True),
        (20, True, False),
    ],
)
def test_a_session_begins_with_an_evaluation_if_one_belongs_there_and_is_missing(tmp_path, step, evaluated, due):
    if evaluated:
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "eval_loss": 5.0}) + "\n")
    with Journal(tmp_path / "metrics.jsonl", settings(), start=Progress(step)) as journal:
        assert journal.evaluation_is_due(step) == due


# What a run says of itself.


def test_the_summary_tells_the_session_from_the_run_and_begins_with_the_first_evaluation(tmp_path):
    config = settings("--batch_size", "8")
    fresh = session(tmp_path, config, Progress(), 12).summary()
    assert "stopped: 12 steps, 384 tokens in " in fresh
    summary = session(tmp_path, config, Progress(12, samples=96), 20).summary().splitlines()
    assert summary[0].startswith("done: 8 steps after step 12, 256 tokens in ")
    assert summary[1] == "the whole run: 20 steps, 640 tokens, 0 steps skipped"
    assert summary[2] == "held-out loss: 5.0000 -> 3.0000 nats per token"


def test_a_run_that_is_complete_says_so_and_does_nothing(tmp_path):
    config = settings()
    progress = session(tmp_path, config, Progress(), 20).progress
    before = lines(tmp_path)
    resumed = session(tmp_path, config, progress, 20)
    assert resumed.summary().startswith("done: 0 steps after step 20, 0 tokens in ")
    assert "held-out loss: 5.0000 -> 3.0000" in resumed.summary()
    resumed.check()
    assert lines(tmp_path) == before


def test_skipped_steps_are_those_of_all_sessions(tmp_path):
    config = settings("--optim.max_skipped", "100")
    progress = session(tmp_path, config, Progress(), 8, bad=(2, 3, 7)).progress
    assert progress.skipped == 3
    resumed = session(tmp_path, config, progress, 20, bad=range(9, 21))
    assert "15 steps skipped" in resumed.summary()
    resumed.check()  # steps 1, 4, 5, ... were good


def test_a_run_of_which_every_session_skipped_every_step_came_to_nothing(tmp_path):
    config = settings("--optim.max_skipped", "100")
    progress = session(tmp_path, config, Progress(), 8, bad=range(1, 9)).progress
    with pytest.raises(RunError, match="all 20 steps were skipped"):
        session(tmp_path, config, progress, 20, bad=range(9, 21)).check()


@pytest.mark.parametrize(
    ("every", "bad", "left"),
    [
        (None, 8, "nothing is saved, and the next session begins anew"),
        (4, 9, "the next session goes on from step 8"),
        (4, 10, "the next session goes on from step 8"),
        (2, 9, "from step 10, which is after the last good one, 8: go back with --checkpoint.resume 8"),
        (2, 8, "from step 10, which is after the last good one, 7: no earlier one is kept"),
    ],
)
def test_a_run_that_goes_wrong_says_what_the_next_session_begins_from(tmp_path, every, bad, left):
    waited = []

    def saved():
        assert waited, "the newest may be on its way"
        return list(range(every, 11, every))[-2:] if every else []

    checkpoints = SimpleNamespace(wait=lambda: waited.append(True), steps=saved)
    config = settings("--optim.max_skipped", str(11 - bad))
    message = rf"^step 10: the gradient was not finite in {11 - bad} steps in a row .*; .*{left}$"
    with pytest.raises(RunError, match=message), telling_what_is_left(checkpoints):
        session(tmp_path, config, Progress(), 20, bad=range(bad, 21))


def test_a_session_without_a_step_is_no_failure(tmp_path):
    session(tmp_path, settings(), Progress(), 0).check()


def test_the_bar_goes_on_where_the_run_is(tmp_path):
    with Journal(tmp_path / "metrics.jsonl", settings(), start=Progress(13)) as journal:
        assert (journal._bar.n, journal._bar.total) == (13, 20)


def test_compiling_again_is_no_part_of_the_speed_of_a_resumed_run(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jzero.journal.time.perf_counter", lambda: now[0])
    with Journal(tmp_path / "metrics.jsonl", settings(), start=Progress(6)) as journal:
        for step in range(7, 16):
            now[0] += 100.0 if step == 7 else 1.0
            journal.trained([Ended(step, {"loss": 1.0, "skipped": 0, "skipped_in_row": 0}, journal.now())])
    assert {line["step"]: line["step_s"] for line in lines(tmp_path)} == {10: 1.0, 15: 1.0}


def test_what_is_done_aside_is_no_part_of_the_time_of_steps_whenever_they_are_taken_in(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jzero.journal.time.perf_counter", lambda: now[0])
    metrics = {"loss": 1.0, "skipped": 0, "skipped_in_row": 0}
    with Journal(tmp_path / "metrics.jsonl", settings("--log.every", "1")) as journal:
        steps = []
        for step in range(1, 5):
            now[0] += 2.0
            steps.append(Ended(step, metrics, journal.now()))
            with journal.aside():
                now[0] += 100.0
                assert journal.now() == 2.0 * step
        journal.trained(steps)
    assert [line["step_s"] for line in lines(tmp_path)] == [2.0] * 4


# TensorBoard.


@pytest.mark.parametrize(("saved", "killed"), [(7, 7), (7, 13), (10, 12), (0, 4)])
def test_tensorboard_shows_every_step_once_over_the_sessions_of_a_run(tmp_path, saved, killed):
    config = settings("--log.every", "1")
    session(tmp_path, config, Progress(), killed)
    start = Progress(saved, samples=saved * config.batch_size)
    session(tmp_path, config, start, 20)  # within one second: their files are in order nevertheless
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    written = {(x["step"], name): value for x in lines(tmp_path) for name, value in x.items() if name != "step"}
    assert events_in(tmp_path) == pytest.approx(written, rel=1e-6)
