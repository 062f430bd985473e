"""The closed formulas are the published ones: the ZeRO paper's table, DeepSpeed's printed values, bytes of traffic."""

import re
from itertools import pairwise

import pytest

from jzero.plan import __main__ as cli
from jzero.plan.formulas import Widths, deepspeed_estimates, paper_rows, states, traffic
from jzero.zero import ShardingError

# Rajbhandari et al. 2020, table 1, GB: devices -> stages 1, 2, 3 of each model, as printed there (digits are cut or
# rounded).
TABLE_1 = """
   1   120  120   120    2048 2048 2048   16000 16000 16000
   4   52.5 41.3  30     896  704  512    7000  5500  4000
  16   35.6 21.6  7.5    608  368  128    4750  2875  1000
  64   31.4 16.6  1.88   536  284  32     4187  2218  250
 256   30.4 15.4  0.47   518  263  8      4046  2054  62.5
1024   30.1 15.1  0.12   513  257  2      4011  2013  15.6
"""
MODELS = (7.5e9, 128e9, 1e12)

# What DeepSpeed 0.19 prints for 2851e6 parameters, a largest layer of 32e6, one host of 8: GB of a host, and of a GPU.
DEEPSPEED = [
    (3, "both", "in shards", "71.69", "0.12"),
    (3, "both", "whole", "127.45", "0.12"),
    (3, "optimizer", "in shards", "63.72", "0.78"),
    (3, "optimizer", "whole", "127.45", "0.78"),
    (3, "none", "in shards", "1.43", "6.09"),
    (3, "none", "whole", "127.45", "6.09"),
    (2, "optimizer", "-", "127.45", "5.31"),
    (2, "none", "-", "127.45", "11.28"),
]


def answer(capsys, line, status=0):
    """What the command prints."""
    assert cli.main(line.split()) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


def numbers(line):
    return [float(word.replace(",", "")) for word in re.findall(r"[\d,.]*\d", line)]


def is_printed_as(value, printed):
    """Whether `printed` is `value`, its last digit cut or rounded."""
    decimals = len(printed.partition(".")[2])
    return abs(value - float(printed)) < 10.0**-decimals


def test_the_command_prints_table_1_of_the_paper(capsys):
    out = answer(capsys, "--formula paper --parameters 7.5e9,128e9,1e12 --devices 1,4,16,64,256,1024")
    for part, (psi, text) in enumerate(zip(MODELS, out.split("\nΨ = ")[1:], strict=True)):
        lines = text.splitlines()
        assert lines[0] == f"{psi:,.0f}, GB"
        assert re.findall(r"\d: (\S+(?: \+ \S+)?)", lines[1]) == ["16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N"]
        for printed, line in zip(TABLE_1.strip().splitlines(), lines[2:8], strict=True):
            devices, *stages = printed.split()
            n, whole, *shown = numbers(line)
            assert (n, whole) == (float(devices), 16 * psi / 1e9)
            assert all(map(is_printed_as, shown, stages[3 * part : 3 * part + 3])), (printed, line)


def test_seven_billion_on_eight_devices_by_class(capsys):
    out = answer(capsys, "--formula paper --parameters 7e9 --devices 8")
    rows = [numbers(line) for line in out.splitlines() if re.match(r"[0-3]  ", line)]
    assert rows == [
        [0, 14, 14, 28, 56, 112],
        [1, 14, 14, 3.5, 7, 38.5],
        [2, 14, 1.75, 3.5, 7, 26.25],
        [3, 1.75, 1.75, 3.5, 7, 14],
    ]


def test_both_conventions_of_traffic_are_printed_and_named(capsys):
    out = answer(capsys, "--formula paper --parameters 7e9 --devices 8")
    head, *rows = out[out.index("stage: collectives") :].splitlines()
    assert re.split(r"  +", head) == [
        "stage: collectives", "messages", "sent", "sent / stage 0's", "messages, GB", "sent, GB"
    ]  # fmt: skip
    # 14, 28, 28, 42 GB as tutorials count; 7/8 of 28, 28, 28, 42 on the wire.
    assert [row.split()[-5:] for row in rows] == [
        ["Ψ", "2Ψ", "1", "14.00", "24.50"],
        ["2Ψ", "2Ψ", "1", "28.00", "24.50"],
        ["2Ψ", "2Ψ", "1", "28.00", "24.50"],
        ["3Ψ", "3Ψ", "1.5", "42.00", "36.75"],
    ]
    assert rows[3].startswith("3: reduce-scatter Ψ, all-gather 2Ψ ")


@pytest.mark.parametrize("m", [1, 2, 8])
def test_accumulation_costs_stage_2_and_3_and_not_stage_1(m):
    moved = [traffic(7e9, stage, 8, m) for stage in range(4)]
    assert [t.ring_elements / 7e9 for t in moved] == [2, 2, m + 1, 3 * m]
    assert [t.message_elements / 7e9 for t in moved] == [1, 2, m + 1, 3 * m]
    assert traffic(7e9, 3, 8, m, regather=False).ring_elements == 2 * m * 7e9
    assert moved[2].wire_elements == moved[2].ring_elements * 7 / 8


def test_bytes_follow_the_dtype_of_each_collective():
    """bfloat16 parameters and float32 reductions: 8, 6, 6, 8 bytes per parameter; 4, 4, 4, 6 with bfloat16 ones."""
    for widths, expected in ((Widths(reduce=4), [8, 6, 6, 8]), (Widths(), [4, 4, 4, 6])):
        sent = [traffic(1e6, stage, 8, widths=widths).wire_bytes * 8 / 7 / 1e6 for stage in range(4)]
        assert sent == pytest.approx(expected)
        message = traffic(1e6, 1, 8, widths=widths).message_bytes
        assert message == (widths.reduce + widths.params) * 1e6


def test_one_device_sends_nothing():
    assert [traffic(7e9, stage, 1).wire_bytes for stage in range(4)] == [0, 0, 0, 0]


def test_float32_gradients_add_two_bytes_where_gradients_are():
    for stage, more in enumerate([2, 2, 2 / 8, 2 / 8]):
        with_more = states(7e9, stage, 8, widths=Widths(grads=4))
        assert with_more.total - states(7e9, stage, 8).total == more * 7e9


def test_tensor_parallelism_divides_everything():
    for stage in range(4):
        assert states(7e9, stage, 8, tp=4).total == states(7e9, stage, 8).total / 4
        assert traffic(7e9, stage, 8, tp=4).wire_bytes == traffic(7e9, stage, 8).wire_bytes / 4
    (row,) = [row for row in paper_rows([10**9], [32], tp=4) if row.stage == 3]
    assert row.states.total == 16 * 1e9 / 32
    assert row.traffic.devices == 8


def test_memory_falls_with_the_stage_and_traffic_does_not():
    rows = paper_rows([10**9], [2, 64])
    for lower, higher in pairwise(rows):
        if lower.devices == higher.devices:
            assert higher.states.total < lower.states.total
            assert higher.traffic.ring_elements >= lower.traffic.ring_elements


def test_a_stage_that_is_none_is_refused():
    for function in (states, traffic):
        with pytest.raises(ShardingError, match="stage 4 is not one of 0, 1, 2, 3"):
            function(7e9, 4, 8)


def test_the_command_prints_deepspeeds_eight_values(capsys):
    line = "--formula deepspeed --parameters 2851e6 --largest_layer 32e6 --devices_per_host 8 --hosts 1"
    rows = answer(capsys, line).splitlines()[-8:]
    assert [tuple(re.split(r"  +", row)) for row in rows] == [(str(n), *rest) for n, *rest in DEEPSPEED]


def test_deepspeeds_estimates_on_several_hosts():
    """By hand: P = 1e9, L = 1e7, g = 4, n = 2, b = 2."""
    found = {(r.stage, r.offload, r.sharded_init): r for r in deepspeed_estimates(10**9, 10**7, 4, 2, 2.0)}
    billions = {key: (r.cpu_bytes / 1e9, r.gpu_bytes / 1e9) for key, r in found.items()}
    assert billions == {
        (3, "both", True): (18, 0.04),
        (3, "both", False): (32, 0.04),
        (3, "optimizer", True): (16, 0.29),
        (3, "optimizer", False): (32, 0.29),
        (3, "none", True): (0.32, 2.29),
        (3, "none", False): (32, 2.29),
        (2, "optimizer", None): (64, 2),
        (2, "none", None): (32, 4.25),
    }


def test_without_parameters_the_settings_say_which_model(capsys):
    assert "Ψ = 6,738,415,616 on 8 devices" in answer(capsys, "--formula paper --model.preset llama-2-7b")
    out = answer(capsys, "--formula deepspeed --model.preset llama-2-7b --model.layers 2")
    assert "666,914,816 parameters, largest layer 131,072,000; 1 host of 8, buffer factor 1.5" in out
    assert "Ψ = 492,160 on 8 devices, MB" in answer(capsys, "--formula=paper")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--formula", "--formula: expected one argument"),
        ("--formula papers", "--formula: invalid choice: 'papers'"),
        ("--formula paper --parameters 7B", "--parameters: 7B: must be a whole number from 1, such as 8 or 7.5e9"),
        ("--formula paper --parameters 7.5", "--parameters: 7.5: must be a whole number"),
        ("--formula paper --parameters 1e9,", "--parameters: : must be a whole number"),
        ("--formula paper --devices 0", "--devices: 0: must be a whole number from 1"),
        ("--formula paper --devices nan", "--devices: nan: must be a whole number from 1"),
        ("--formula paper --devices 8,9 --tp 2", "--devices: 9 devices are not a multiple of tp = 2"),
        ("--formula paper --grads int8", "--grads: invalid choice: 'int8'"),
        ("--formula paper --hosts 2", "--hosts says nothing to --formula paper; it is for --formula deepspeed"),
        ("--formula deepspeed --tp 2", "--tp says nothing to --formula deepspeed; it is for --formula paper"),
        ("--formula deepspeed --parameters 7e9", "needs --largest_layer L beside --parameters P"),
        ("--formula deepspeed --buffer_factor 0.5", "--buffer_factor: 0.5: must be a number from 1"),
        ("--formula paper --parameters 7e9 --model.layers 2", "--model.layers says nothing beside --parameters"),
        ("--formula paper --stage 3", "--stage: of a run's settings a formula reads --config and --model.* alone"),
        ("--formula paper --model.preset gpt9", "model.preset = gpt9"),
        ("--formula paper --parameter 7e9", "--parameter: of a run's settings a formula reads"),
    ],
)
def test_bad_input_is_one_line(capsys, line, message):
    error = answer(capsys, line, status=2)
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
