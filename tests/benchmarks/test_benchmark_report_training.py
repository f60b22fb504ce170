"""The page on INT8 training: all targets with the right verdicts (report_training.py, target_table_training.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import (
    block_linear_cases,
    block_operators_cases,
    report,
    report_training,
    training_block,
    training_models,
)
from benchmarks.harness import Record, Results
from benchmarks.target_table import Target, evaluate
from benchmarks.target_table_training import (
    BLOCK_PEERS,
    COMPILED,
    DIRECTIONS,
    HIDDEN,
    LINEAR,
    STEP,
    TRAINING_TARGETS,
    subject_of_block,
)
from benchmarks.training_gradients import Row
from benchmarks.training_parity import SUBJECTS, Case
from benchmarks.training_processes import Run
from qframework.kernels.blocks.format import BLOCK_SIZES

MACHINE = {"device": "NVIDIA H100", "commit": "abc123", "date": "2026-01-02T03:04:05"}
PARTS = {
    "training_block": training_block,
    "training_models": training_models,
    "block_linear": block_linear_cases,
    "block_operators": block_operators_cases,
}


def find(what: str, against: str) -> Target:
    (target,) = (target for target in TRAINING_TARGETS if (target.what, target.against) == (what, against))
    return target


def records(target: Target, ours: float, peers: float) -> list[Record]:
    """Of all cases, with times (or memory) of so many milliseconds (or MB)."""

    def one(provider: str, value: float, op: str, subject: str) -> Record:
        model, _, batch = subject.partition(", batch ")
        what = {"model": model, "batch": int(batch)} if batch else {"shape": list(map(int, subject.split(",")))}
        named = Record(benchmark=target.benchmark, provider=provider, op=op, **what)  # type: ignore[arg-type]
        memory = {"activation_mb": value} if target.measure == "activation_mb" else {}
        return Record(**{**vars(named), "p50_ms": value, "tflops": 1 / value, **memory})

    return [
        one(name, value, op, subject)
        for names, value in ((target.ours, ours), (target.peers, peers))
        for name in names
        for op, subject in target.cases
    ]


# Targets


def test_promises() -> None:
    """The targets, written down independently."""
    must = {(target.what, target.against): target.must for target in TRAINING_TARGETS}
    assert len(must) == len(TRAINING_TARGETS)
    assert must["non-linear operators, hidden 8192, blocks of 32", "PyTorch FP16"] == 1.8
    assert must["gelu backward, hidden 8192", "PyTorch FP16"] == 1.8
    for size in ("32", "64", "128", "32x128", "1x128"):
        memory = must[f"GPT block, activation memory, blocks of {size}", "BF16 compiled"]
        assert memory == pytest.approx(1 / 1.49, abs=5e-4)
        assert must[f"non-linear operators, hidden 8192, blocks of {size}", "PyTorch FP16"] == 1.8
    assert find("GPT block, forward and backward, hidden 4096", "BF16 compiled").aim == 1.2
    assert {subject.bound for subject in SUBJECTS.values()} == {0.3, 0.01}
    for hidden in (1024, 2048, 4096):
        for peer in ("torchao INT8", "torchao FP8"):
            assert (f"GPT block, forward and backward, hidden {hidden}", peer) in must
            assert (f"linear, forward and backward, hidden {hidden}", peer) in must
    for graphs in ("", ", CUDA graphs"):
        speeds = {"llama_2048, 3": 1.15, "llama_4096, 2": 1.4, "vit_large, 6": 1.1, "vit_base, 6": 1.0}
        for model, speed in speeds.items():
            assert must[f"step of {model} blocks{graphs}", "BF16 compiled"] == speed
        assert must[f"step of llama_4096, 2 blocks{graphs}", "torchao FP8"] == 1.0
    assert {"gelu forward", "layer_norm backward", "dropout backward", "add_statistics forward"} <= set(DIRECTIONS)


def test_every_name_is_measured() -> None:
    for target in TRAINING_TARGETS:
        assert {*target.ours, *target.peers} <= set(PARTS[target.benchmark].PROVIDERS)
        assert all(name.startswith("qframework") for name in target.ours)
    assert STEP in training_block.OPS


@pytest.mark.parametrize(
    ("what", "against", "ours", "verdict"),
    [
        ("non-linear operators, hidden 8192, blocks of 32", "PyTorch FP16", 0.5, "PASS"),
        ("non-linear operators, hidden 8192, blocks of 32", "PyTorch FP16", 1 / 1.44, "short of 1.8 by 20 percent"),
        ("gelu forward, hidden 8192", "PyTorch FP16", 1 / 1.79, "short of 1.8 by 0.56 percent"),
        ("GPT block, activation memory, blocks of 64", "BF16 eager", 0.67, "PASS"),
        ("GPT block, activation memory, blocks of 64", "BF16 eager", 0.7381, "short of 0.671 by 10 percent"),
        ("GPT block, forward and backward, hidden 4096", "BF16 compiled", 0.8, "aim reached"),
        ("GPT block, forward and backward, hidden 4096", "BF16 compiled", 1.0, "short of the aim by 17 percent"),
        ("GPT block, forward and backward, hidden 1024", "BF16 compiled", 1.0, ""),
        ("linear, forward and backward, hidden 2048", "BF16 eager", 1.0, ""),
        ("step of llama_4096, 2 blocks", "BF16 compiled", 0.8, "short of 1.4 by 11 percent"),
        ("step of llama_4096, 2 blocks", "torchao FP8", 0.8, "PASS"),
    ],
)
def test_verdicts(what: str, against: str, ours: float, verdict: str) -> None:
    target = find(what, against)
    outcome = evaluate(target, records(target, ours, 1.0))
    assert outcome is not None
    assert outcome.verdict == verdict


def test_the_verdict_is_open_if_an_operator_is_missing() -> None:
    target = find("non-linear operators, hidden 8192, blocks of 32", "PyTorch FP16")
    some = [record for record in records(target, 0.5, 1.0) if record.op != "silu backward"]
    outcome = evaluate(target, some)
    assert outcome is not None
    assert outcome.verdict == f"open: {len(DIRECTIONS) - 1} of {len(DIRECTIONS)} operators measured"


def test_operators_are_compared_by_their_times() -> None:
    """Half of the bytes in half of the time is the same GB/s."""
    target = find("gelu forward, hidden 8192", "PyTorch FP16")
    fields = [{**vars(record), "tflops": None, "gbps": 1000.0} for record in records(target, 0.5, 1.0)]
    outcome = evaluate(target, [Record(**each) for each in fields])
    assert outcome is not None
    assert outcome.mean == pytest.approx(2.0)


# The page


def write_runs(folder: Path, task: str, seeds: int = 3, smoke: bool = False, **values: float) -> None:
    """Runs that end with these figures."""
    for name, value in values.items():
        for seed in range(seeds):
            path = Case(task, name, seed).path(folder / "training")
            path.parent.mkdir(parents=True, exist_ok=True)
            figures = {"loss": 1.0, SUBJECTS[task].metric: value}
            head = {"configuration": name, "seed": seed, "smoke": smoke, "settings": {"steps": 20}, "machine": MACHINE}
            curves = {"losses": [2.0, 1.0], "losses_every": 10, "validation": [[20, figures]]}
            path.write_text(json.dumps({**head, **curves}))


def write_records(folder: Path, found: list[Record], **machine: str) -> None:
    results = Results(found[0].benchmark, {**MACHINE, **machine}, folder / "training" / f"{found[0].benchmark}.json")
    results.records += found
    results.write()


def arguments(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "results" / "training").mkdir(parents=True, exist_ok=True)
    (tmp_path / "docs").mkdir(exist_ok=True)
    places = ["--results", str(tmp_path / "results"), "--page", str(tmp_path / "docs" / "performance.md")]
    return [*places, *more]


def write_step(folder: Path, date: str, error: float, smoke: bool = False) -> None:
    """A document of training_gradients with one row for each case."""
    rows = [Row("per_block_32", 0.0, 1.5, 2.0, 2.0, error), Row("per_block_32", 50.0, 300.0, 3.0, 2.0)]
    settings = {"width": 256, "depth": 4, "tokens": 8192}
    head = {"smoke": smoke, "settings": settings, "machine": {**MACHINE, "date": date}}
    path = folder / "training" / "gradients" / f"{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "rows": [vars(row) for row in rows]}))


def page(tmp_path: Path) -> str:
    assert report.main(arguments(tmp_path)) == 0
    return (tmp_path / "docs" / report_training.NAME).read_text()


def line(text: str, start: str) -> str:
    (found,) = (row for row in text.splitlines() if row.startswith(f"| {start}"))
    return found


def test_without_results_nothing_is_measured(tmp_path: Path) -> None:
    text = page(tmp_path)
    promised = [row for row in text.partition("## Block sizes")[0].splitlines() if row.startswith("| ")]
    rows = [row for row in promised if "---" not in row and not row.startswith("| what")]
    long = [task for task, subject in SUBJECTS.items() if subject.long]
    assert len(rows) == len(TRAINING_TARGETS) + (len(SUBJECTS) - len(long)) * len(BLOCK_SIZES) + len(long) + 1
    assert all("not measured" in row for row in rows)
    for size in ("128", "1x128"):
        assert line(text, f"{size} |").count("not measured") == 8


@pytest.mark.parametrize(
    ("task", "bf16", "value", "verdict"),
    [
        ("digits", 98.0, 97.8, "| 0.3 points | +0.20 ± 0.00 | 3 | PASS |"),
        ("digits", 98.0, 97.64, "| 0.3 points | +0.36 ± 0.00 | 3 | short of 0.3 by 20 percent |"),
        ("gpt", 1.0, 1.009, "| 1 percent | +0.90 ± 0.00 | 3 | PASS |"),
        ("gpt", 1.0, 1.015, "| 1 percent | +1.50 ± 0.00 | 3 | short of 1 by 50 percent |"),
    ],
)
def test_accuracy(tmp_path: Path, task: str, bf16: float, value: float, verdict: str) -> None:
    write_runs(tmp_path / "results", task, bf16=bf16, per_block_32=value)
    text = page(tmp_path)
    found = line(text, f"{task}, {SUBJECTS[task].unit}, per_block_32 ")
    assert verdict in found
    assert found.endswith("| 2026-01-02, `abc123` |")
    assert "not measured" in line(text, f"{task}, {SUBJECTS[task].unit}, per_block_64 ")


def test_two_seeds_are_too_few(tmp_path: Path) -> None:
    write_runs(tmp_path / "results", "digits", 2, bf16=98.0, per_block_32=98.0, per_tensor=10.0)
    text = page(tmp_path)
    assert "| open: 2 of 3 seeds |" in line(text, "digits, top-1 in percent, per_block_32 ")
    assert "| open: 2 of 3 seeds |" in line(text, "per_tensor, worse on one")


@pytest.mark.parametrize(
    ("digits", "gpt", "verdict"),
    [
        (97.0, 1.0, "PASS"),
        (98.0, 1.02, "PASS"),
        (97.9, 1.005, "not worse"),
        (98.0, None, "open: gpt not measured"),
    ],
)
def test_per_tensor_must_be_worse_than_blocks(tmp_path: Path, digits: float, gpt: float | None, verdict: str) -> None:
    write_runs(tmp_path / "results", "digits", bf16=98.0, per_tensor=digits)
    if gpt is not None:
        write_runs(tmp_path / "results", "gpt", bf16=1.0, per_tensor=gpt)
    assert f"| {verdict} |" in line(page(tmp_path), "per_tensor, worse on one")


def test_smoke_runs_do_not_count(tmp_path: Path) -> None:
    write_runs(tmp_path / "results", "gpt", smoke=True, bf16=1.0, per_block_32=1.0)
    assert "## Accuracy: gpt" not in page(tmp_path)


def test_block_sizes_have_rows_of_their_own(tmp_path: Path) -> None:
    write_runs(tmp_path / "results", "digits", bf16=98.0, per_block_32=98.0, per_block_128=97.5, per_block_1x128=97.9)
    shape = list(map(int, subject_of_block(HIDDEN[-1]).split(",")))
    providers = {COMPILED[0]: 2.0, COMPILED[2]: 1.0, BLOCK_PEERS["BF16 compiled"][0]: 1.5}
    base = Record(benchmark="training_block", provider="", op=STEP, shape=shape)
    block = [
        Record(**{**vars(base), "provider": name, "p50_ms": ms, "tflops": 1 / ms, "activation_mb": 100 * ms})
        for name, ms in providers.items()
    ]
    block.append(Record(**{**vars(base), "provider": COMPILED[1], "status": "wrong", "reason": "dX is inf"}))
    write_records(tmp_path / "results", block)
    linear = Record(benchmark="block_linear", provider="qframework_blocks_128", op=LINEAR, shape=[8192, 1024, 1024])
    write_records(tmp_path / "results", [Record(**{**vars(linear), "p50_ms": 1.0, "tflops": 1.0, "error": 0.016})])
    text = page(tmp_path)
    small, large, rows = line(text, "32 |"), line(text, "128 |"), line(text, "1x128 |")
    assert line(text, "64 |").startswith("| 64 | wrong | ")
    assert rows.endswith(" | not measured | +0.10 | not measured | not measured |")
    assert small.startswith("| 32 | 0.75 | ")
    assert small.endswith(" | not measured | +0.00 | not measured | not measured |")
    assert large.startswith("| 128 | 1.50 | ")
    assert large.endswith(" | 1.6e-02 | +0.50 | not measured | not measured |")
    best = line(text, "GPT block, forward and backward, hidden 4096 | BF16 compiled | ")
    assert "| 1.500 | aim reached | INT8 blocks of 128, compiled | BF16, compiled | training_block, `abc123` |" in best


def test_missing_memory_is_not_the_minimum(tmp_path: Path) -> None:
    """Under CUDA graphs, memory is not measured."""
    shape = list(map(int, subject_of_block(HIDDEN[-1]).split(",")))
    base = Record(
        benchmark="training_block", provider=training_block.GRAPHS, op=STEP, shape=shape, p50_ms=1.0, tflops=1.0
    )
    peer = Record(**{**vars(base), "provider": "bf16_compiled", "activation_mb": 200.0})
    write_records(tmp_path / "results", [base, peer])
    memory = page(tmp_path).partition("MB that a block keeps")[2]
    assert "**200**" in memory
    assert training_block.GRAPHS not in memory


def test_peers_that_are_faster_are_listed(tmp_path: Path) -> None:
    target = find("gelu forward, hidden 8192", "PyTorch FP16")
    write_records(tmp_path / "results", records(target, 4.0, 1.0))
    text = page(tmp_path)
    assert "| gelu forward 8192,8192 | INT8 blocks of 32 | 0.25 FP16 (cuBLAS) |" in text
    write_records(tmp_path / "results", records(target, 1.0, 4.0))
    assert "Nowhere in these runs." in page(tmp_path)


def test_tables_show_the_newest_run_of_each_case(tmp_path: Path) -> None:
    """What an older run found slower is not told any more, nor what only it measured left out."""
    target = find("gelu forward, hidden 8192", "PyTorch FP16")
    older, newer = records(target, 4.0, 1.0), records(target, 1.0, 4.0)
    more = [Record(**{**vars(record), "op": "silu forward"}) for record in older]
    machine = {**MACHINE, "date": "2026-01-01T00:00:00", "commit": "older"}
    results = Results(older[0].benchmark, machine, tmp_path / "results" / "training" / "older.json")
    results.path.parent.mkdir(parents=True)
    results.add(*older, *more)
    write_records(tmp_path / "results", newer)
    text = page(tmp_path)
    assert "| gelu forward 8192,8192 | INT8 blocks of 32 | 0.25" not in text
    assert "| silu forward 8192,8192 | INT8 blocks of 32 | 0.25" in text
    tables = text[text.index("## Operators between INT8 blocks") :]
    assert tables.count("\n| gelu forward ") == tables.count("\n| silu forward ") == 1


def test_other_chips_are_shown_without_a_verdict(tmp_path: Path) -> None:
    target = find("gelu forward, hidden 8192", "PyTorch FP16")
    write_records(tmp_path / "results", records(target, 1.0, 4.0), device="Chip 9000")
    text = page(tmp_path)
    assert "not measured" in line(text, "gelu forward, hidden 8192")
    assert "## Operators between INT8 blocks: Chip 9000, 2026-01-02" in text


def test_check_detects_stale_files(tmp_path: Path) -> None:
    write_runs(tmp_path / "results", "gpt", bf16=1.0)
    plot = tmp_path / "docs" / "assets" / "training-gpt.png"
    page(tmp_path)
    before = plot.read_bytes()
    assert before.startswith(b"\x89PNG")
    assert report.main(arguments(tmp_path, "--check")) == 0
    plot.write_bytes(before.replace(b"results ", b"another "))
    assert report.main(arguments(tmp_path, "--check")) == 1
    page(tmp_path)
    assert plot.read_bytes() == before
    write_runs(tmp_path / "results", "gpt", per_block_32=1.0)
    assert report.main(arguments(tmp_path, "--check")) == 1
    (tmp_path / "docs" / "assets" / "training-digits.png").write_bytes(before)
    page(tmp_path)
    assert plot.read_bytes() != before
    assert not (tmp_path / "docs" / "assets" / "training-digits.png").exists()


def test_runs_of_several_kinds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path / "results", "gpt", bf16=1.0)
    path = Case("gpt", "bf16", 0).path(tmp_path / "results" / "training")
    path.write_text(path.read_text().replace('"steps": 20', '"steps": 30'))
    assert report.main(arguments(tmp_path)) == 2
    assert "must have the same settings, got 2 kinds" in capsys.readouterr().err


def write_processes(folder: Path, date: str, loss: float, smoke: bool = False) -> None:
    """A document of training_processes: two processes beside one whose loss is 2."""
    runs = [Run("bf16", 1, 100.0, 2.0, [3.0, 2.5]), Run("bf16", 2, 150.0, loss, [3.0, 2.5])]
    head = {"smoke": smoke, "settings": {"width": 64, "compiled": True}, "machine": {**MACHINE, "date": date}}
    path = folder / "training" / "processes" / f"{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "runs": [vars(run) for run in runs]}))


def write_fsdp(folder: Path, date: str, p50_ms: float, smoke: bool = False) -> None:
    """A document of training_fsdp with one case."""
    row = Record(benchmark="training_fsdp", provider="qframework_gather_int8", p50_ms=p50_ms, gather_mb=100.0)
    path = folder / "training" / "fsdp" / f"{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"smoke": smoke, "machine": {**MACHINE, "date": date}}
    path.write_text(json.dumps({**head, "records": [row.to_json()]}))


def write_simulation(folder: Path, date: str, loss: float, smoke: bool = False) -> None:
    """A document of training_simulation with one run."""
    distances = [{"step": 5, "pair": "kernels and floats", "distance": 0.25}]
    path = folder / "training" / "simulation" / f"{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"smoke": smoke, "machine": {**MACHINE, "date": date}}
    path.write_text(json.dumps({**head, "runs": {"kernels": [[5, loss]]}, "distances": distances}))


@pytest.mark.parametrize(
    ("write", "values", "title", "row", "settings"),
    [
        (
            write_fsdp,
            (2.0, 2.1, 2.0),
            "FSDP2 on two GPUs",
            "| INT8 | INT8 | AdamW | 2.1 | 100 |  |  |  |",
            "2026-01-02, `abc123`.",
        ),
        (
            write_simulation,
            (2.0, 2.1, 2.0),
            "Kernels against a simulation",
            "| kernels | 2.100 |",
            "2026-01-02, `abc123`.",
        ),
        (
            write_step,
            (0.01, 0.02, 0.03),
            "A single step",
            "| per_block_32 | 0.0200 | +0.00 % | +50.00 % |",
            "width 256, depth 4, 8,192 tokens, 2026-01-02",
        ),
        (
            write_processes,
            (2.0, 2.1, 2.0),
            "Several processes",
            "| bf16 | 2 | 150.0 | 1.50 | 2.1000 | 5.000 | 0.000 | too far |",
            "width 64, compiled True, 2026-01-02, `abc123`.",
        ),
    ],
)
def test_the_newest_document_is_shown(
    tmp_path: Path, write: Callable[..., None], values: tuple[float, ...], title: str, row: str, settings: str
) -> None:
    assert title not in page(tmp_path)
    for day, value in enumerate(values, 1):
        write(tmp_path / "results", f"2026-01-0{day}", value, smoke=day == 3)
    assert report.main(arguments(tmp_path, "--check")) == 1
    text = page(tmp_path)
    assert row in text
    assert settings in text
