"""The benchmarks run, refuse wrong results, and the performance page says what the result files say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness, machine, models, report, timing, vit_cpu
from benchmarks.harness import Record, Results, UnavailableError, WrongResultError
from benchmarks.machine import describe_machine
from qframework.errors import FileFormatError

SHAPE = (8, 16, 32)
IDENTITY = Record(benchmark="int8_linear", op="int8_linear", shape=[8, 16, 32], provider="any")
MACHINE = {
    "device": "Chip 9000", "capability": "sm_90", "driver": "1.2", "cpu": "CPU", "cores": 4, "threads": 4,
    "cpu_flags": ["avx2"], "torch": "2.11.0", "triton": "3.6.0", "torchao": "0.17.0", "timm": "1.0", "python": "3.12.1",
    "qframework": "0.1.0", "commit": "abc123", "dirty": False, "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def read(path: Path) -> dict:
    return json.loads(path.read_text())


# Harness


@pytest.fixture
def reference() -> torch.Tensor:
    return torch.randn(64, 48, dtype=torch.float64)


def zero_one_row(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[5] = 0
    return value


@pytest.mark.parametrize(
    "spoil",
    [
        zero_one_row,
        lambda v: 2 * v,
        lambda v: v.roll(1, 0),
        lambda v: v[:-1],
        lambda v: v.masked_fill(v > 2, torch.nan),
    ],
    ids=["zeroed row", "twice", "shifted rows", "shape", "nan"],
)
@pytest.mark.parametrize("kind", ["rows_within", "elements_within", "one_step_apart"])
def test_checks_refuse_wrong_results(reference, spoil, kind):
    right = (reference * 30).round() if kind == "one_step_apart" else reference
    check = {
        "rows_within": harness.rows_within(lambda: right, 1e-6),
        "elements_within": harness.elements_within(lambda: right, lambda r: 1e-6 * r.abs()),
        "one_step_apart": harness.one_step_apart(lambda: right, 1e-2),
    }[kind]
    assert check(right) == 0
    with pytest.raises(WrongResultError):
        check(spoil(right))


def test_rows_within_returns_the_error_of_a_right_result(reference):
    error = harness.rows_within(lambda: reference, 1e-2)(reference * 1.001)
    assert error == pytest.approx(1e-3, rel=1e-9)


def test_one_step_apart_counts_the_steps():
    reference = torch.zeros(10, 100)
    value = reference.clone()
    value[0, :5] = 1
    harness.one_step_apart(lambda: reference, 5e-3)(value)
    with pytest.raises(WrongResultError, match="got up to 1 steps"):
        harness.one_step_apart(lambda: reference, 4e-3)(value)


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (WrongResultError("off", 0.5), "wrong", 1),
        (RuntimeError("boom\nlong trace"), "failed", 1),
        (UnavailableError("no such chip"), "unsupported", 0),
    ],
)
def test_errors_become_rows_and_the_exit_status(error, status, exit_code):
    def measure() -> Record:
        raise error

    results = Results("int8_linear", MACHINE)
    results.attempt(IDENTITY, measure)
    (record,) = results.records
    assert record.status == status
    assert record.reason in (str(error), "RuntimeError: boom")
    assert record.p50_ms is None
    assert results.exit_code == exit_code


@pytest.mark.parametrize("error", [WrongResultError("off", 0.5), RuntimeError("boom")])
def test_what_another_package_does_not_manage_is_a_row_and_no_failure(error):
    def measure() -> Record:
        raise error

    results = Results("attention", MACHINE)
    results.attempt(dataclasses.replace(IDENTITY, provider="sageattention"), measure)
    assert results.records[0].status in harness.BROKEN
    assert results.exit_code == 0


def test_interleaving_takes_turns_after_one_round_that_does_not_count():
    order = []
    turns = timing.time_interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=2)
    assert "".join(order) == "abcabcabc"
    assert {name: times.fields()["runs"] for name, times in turns.items()} == {"a": 2, "b": 2, "c": 2}


def test_timing_quantiles():
    fields = timing.Timing(tuple(float(ms) for ms in range(11))).fields()
    assert fields == {"p20_ms": 2.0, "p50_ms": 5.0, "p80_ms": 8.0, "runs": 11}


def test_records_survive_the_file(tmp_path):
    """Also those with values JSON has no number for; absent values stay absent."""
    record = dataclasses.replace(IDENTITY, p50_ms=1.23456, sqnr_db=float("inf"), error=0.0)
    path = tmp_path / "deep" / "out.json"
    Results("int8_linear", MACHINE, path).add(record)
    (fields,) = read(path)["records"]
    assert "gbps" not in fields
    assert Record.from_json(fields) == dataclasses.replace(record, p50_ms=1.235)


def test_another_run_of_the_same_code_is_added_beside_the_first(tmp_path):
    """And numbered; its exit status is its own; other code or another machine is refused."""
    path = tmp_path / "out.json"
    Results("int8_linear", MACHINE, path, note="seen").add(dataclasses.replace(IDENTITY, status="failed"))
    for run in (2, 3):
        results = Results("int8_linear", {**MACHINE, "date": "later"}, path)
        results.follow(Results.load(path))
        results.add(dataclasses.replace(IDENTITY, p50_ms=float(run)))
        assert results.exit_code == 0
        assert [record.run for record in Results.load(path).records] == [None, *range(2, run + 1)]
    assert Results.load(path).note == "seen"
    for change in ({"commit": "def456"}, {"device": "Chip 1"}, {"dirty": True}):
        with pytest.raises(FileFormatError, match="must be"):
            Results("int8_linear", {**MACHINE, **change}, path).follow(Results.load(path))


def test_machine_header_names_everything():
    header = describe_machine("cpu")
    assert set(header) == set(MACHINE)
    assert header["torch"] == torch.__version__
    assert header["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("named", "state"),
    [("abc123", ("abc123", False)), ("abc123-dirty", ("abc123", True)), ("", ("fedcba987654", True))],
)
def test_the_commit_named_wins_over_git(monkeypatch, named, state):
    """A copy of the tree may lie in a repository that is at another commit; an empty name is none."""
    monkeypatch.setattr(machine, "_output", lambda *command: "fedcba987654" if "rev-parse" in command else " M file.py")
    monkeypatch.setenv("QFRAMEWORK_COMMIT", named)
    assert machine.git_state() == state


def test_without_git_and_a_name_the_commit_is_unknown(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    monkeypatch.delenv("QFRAMEWORK_COMMIT", raising=False)
    assert machine.git_state() == (None, None)


# Smoke runs


@pytest.mark.slow
def test_vit_cpu_smoke(tmp_path, fresh_dynamo):
    output = tmp_path / "out.json"
    assert vit_cpu.main(["--smoke", "--output", str(output)]) == 0
    records = {record["provider"]: record for record in read(output)["records"]}
    assert list(records) == list(vit_cpu.PROVIDERS)
    assert records["fp32_eager"]["sqnr_db"] == "inf"
    for name in ("qframework_static", "qframework_dynamic_float"):
        record = records[name]
        assert record["runs"] == 2
        assert record["first_call_s"] > 0
        assert models.SQNR_FLOOR_DB["int8"] < record["worst_sqnr_db"] <= record["sqnr_db"] < 60


def test_vit_cpu_refuses_a_wrong_provider(monkeypatch, tmp_path):
    wrong = vit_cpu.Provider("float32", "float32", compile=lambda module: lambda images: 2 * module(images))
    monkeypatch.setitem(vit_cpu.PROVIDERS, "fp32_inductor", wrong)
    output = tmp_path / "out.json"
    assert vit_cpu.main(["--smoke", "--providers", "fp32_eager,fp32_inductor", "--output", str(output)]) == 1
    status = {record["provider"]: record["status"] for record in read(output)["records"]}
    assert status == {"fp32_eager": "ok", "fp32_inductor": "wrong"}


def test_accuracy_looks_at_every_image():
    """One image's logits of 64 are zeros: the SQNR over all is 18 dB, the image's own is 0."""
    logits = torch.randn(64, 1000)
    assert models.accuracy(logits * 1.01, logits, "float16")["worst_sqnr_db"] == pytest.approx(40, abs=0.1)
    with pytest.raises(WrongResultError, match=r"SQNR of the worst image must be at least 12 dB, got 0\.0 dB"):
        models.accuracy(zero_one_row(logits), logits, "int8")
    with pytest.raises(WrongResultError, match="nan dB"):
        models.accuracy(logits * torch.nan, logits, "int8")


def test_int8_that_was_never_quantized_is_refused():
    """A quantizer that annotates nothing gives a perfect answer at float speed: no INT8 row may come of it."""
    logits = torch.randn(4, 10)
    with pytest.raises(WrongResultError, match="too exact for int8"):
        models.accuracy(logits, logits, "int8")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval()
    with pytest.raises(WrongResultError, match="2 of 2 linears were left in float: linear, linear_1"):
        models.require_quantized(torch.export.export(model, (torch.randn(2, 4),)).module())


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_x86_rival_quantizes_every_linear(is_dynamic):
    model = models.build_model(models.SMOKE_MODEL, smoke=True)
    models.require_quantized(models.quantize_x86(model, models.random_images(model, 2), is_dynamic=is_dynamic))


def test_unknown_providers_are_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        vit_cpu.main(["--providers", "fp32_eager,magic"])
    assert "must be of fp32_eager, fp32_inductor, " in capsys.readouterr().err


# Report


def gemm(provider: str, tflops: float, shape: list[int]) -> Record:
    return dataclasses.replace(
        IDENTITY, provider=provider, shape=shape, tflops=tflops, p20_ms=0.9, p50_ms=1.0, p80_ms=1.1, runs=7, error=1e-4
    )


def vit(provider: str, images_per_second: float) -> Record:
    return Record(
        benchmark="vit_cpu", model="vit", batch=8, provider=provider, images_per_second=images_per_second, p50_ms=1.0,
        sqnr_db=30.0, first_call_s=12.0,
    )  # fmt: skip


@pytest.fixture
def site(tmp_path):
    """A folder with two fabricated runs: a GEMM one with a win, a loss and a failure, and one of a model with a win."""
    folder = tmp_path / "results"
    linear = Results("int8_linear", MACHINE, folder / "linear.json", peaks={"8-bit": 1000.0})
    linear.add(gemm("qframework", 500, [1, 2, 3]), gemm("torch_fp16", 400, [1, 2, 3]))
    linear.add(gemm("qframework", 100, [4, 5, 6]), gemm("torch_fp16", 400, [4, 5, 6]))
    linear.add(dataclasses.replace(IDENTITY, provider="torch_bf16", shape=[4, 5, 6], status="failed", reason="a | b"))
    cpu = Results("vit_cpu", {**MACHINE, "dirty": True}, folder / "cpu.json")
    cpu.add(vit("fp32_eager", 5.0), vit("x86_inductor_static", 8.0), vit("qframework_static", 12.0))
    return tmp_path


def run_report(site: Path, *arguments: str) -> int:
    return report.main(["--results", str(site / "results"), "--page", str(site / "performance.md"), *arguments])


def page(site: Path) -> str:
    return (site / "performance.md").read_text()


def test_report_names_machine_versions_commit_and_date_beside_every_table(site):
    assert run_report(site) == 0
    for section in page(site).split("\n## ")[3:]:
        for fact in ("Chip 9000, sm_90, driver 1.2", "torch 2.11.0", "triton 3.6.0", "`abc123`", "2026-01-02T03:04:05"):
            assert fact in section
    assert "`abc123` with local changes" in page(site)


def test_report_computes_ratios(site):
    run_report(site)
    assert "| 1,2,3 | **500** | 400 |  | 1.25 |" in page(site)
    assert "| qframework_static | 12 | 2.40 | 1.50 |" in page(site)
    assert "| x86_inductor_static | 8 | 1.60 |  |" in page(site)


def test_report_shows_losses_and_failures(site):
    run_report(site)
    losses = page(site).split("## Where qframework is slower")[1].split("\n## ")[0]
    assert "| 4,5,6 | qframework | 0.25 torch_fp16 |" in losses
    assert "1,2,3" not in losses
    assert "vit" not in losses
    assert "failed: a / b |" in page(site)


def test_report_shows_what_was_faster_before(site):
    """The newest run beside the one before it, peers left out; a percent is noise."""
    folder = site / "results"
    for name, date, rates in (("older", "2026-01-03", (99.0, 1.0)), ("old", "2026-01-04", (20.0, 9.0))):
        results = Results("vit_cpu", {**MACHINE, "date": date}, folder / f"{name}.json")
        results.add(vit("qframework_static", rates[0]), vit("qframework_dynamic", 10.0), vit("fp32_eager", rates[1]))
    machine_now = {**MACHINE, "commit": "def456", "date": "2026-01-05"}
    new = Results("vit_cpu", machine_now, folder / "new.json", note="Attention too. And more.")
    new.add(vit("qframework_static", 18.0), vit("qframework_dynamic", 9.9), vit("fp32_eager", 5.0))
    run_report(site)
    before = page(site).split("Slower than in the run before")[1].split("\n## ")[0]
    assert (
        "| vit, batch 8 | qframework_static | new, `def456` | 18 | old, `abc123` | 20 | 0.90 | Attention too |"
        in before
    )
    assert "dynamic" not in before
    assert "fp32" not in before


def test_report_check_finds_a_stale_page_plot_or_leftover(site):
    assert run_report(site, "--check") == 1
    run_report(site)
    assert run_report(site, "--check") == 0
    results = Results("vit_cpu", {**MACHINE, "date": "2026-01-03"}, site / "results" / "new.json")
    results.add(vit("fp32_eager", 5.0), vit("x86_inductor_static", 8.0))
    assert run_report(site, "--check") == 1
    run_report(site)
    plot = site / "assets" / "performance-new.svg"
    plot.write_text(plot.read_text().replace(report.load_run(results.path).digest, "0"))
    assert run_report(site, "--check") == 1
    results.path.unlink()
    run_report(site)
    assert not plot.exists()
    assert run_report(site, "--check") == 0


def test_report_is_idempotent(site):
    run_report(site)
    before = {path: path.read_bytes() for path in [site / "performance.md", *(site / "assets").iterdir()]}
    for plot in (site / "assets").iterdir():
        plot.unlink()
    run_report(site)
    assert {path: path.read_bytes() for path in before} == before


def test_report_leaves_smoke_runs_out(site):
    Results("vit_gpu", MACHINE, site / "results" / "smoke.json", smoke=True).add(vit("tiny", 1e6))
    run_report(site)
    assert "tiny" not in page(site)


def test_report_without_results_says_so(tmp_path):
    assert run_report(tmp_path) == 0
    assert "Nothing measured yet" in page(tmp_path)
    assert run_report(tmp_path, "--check") == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_report_refuses_a_foreign_file(tmp_path, content, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "odd.json").write_text(content)
    assert run_report(tmp_path) == 2
    assert "odd.json" in capsys.readouterr().err


def test_report_smoke():
    assert report.main(["--smoke"]) == 0


def test_the_tracked_page_is_up_to_date():
    assert report.main(["--check"]) == 0
