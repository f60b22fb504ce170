"""The performance page and its plots match the result files (report.py, pages.py, tables.py, plots.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import plots, report
from benchmarks.harness import Record, Results
from benchmarks.labels import label

MACHINE = {
    "device": "Chip 9000", "capability": "sm_90", "driver": "1.2", "cpu": "CPU", "cores": 4, "threads": 4,
    "cpu_flags": ["avx2"], "torch": "2.11.0", "triton": "3.6.0", "torchao": "0.17.0", "timm": "1.0", "python": "3.12.1",
    "qframework": "0.1.0", "commit": "abc123", "dirty": False, "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


IDENTITY = Record(benchmark="int8_linear", op="int8_linear", shape=[8, 16, 32], provider="any")


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


def history(site: Path) -> str:
    return (site / "performance-history.md").read_text()


def test_the_summary_has_a_plot_and_a_sentence_for_each_run_and_links_to_its_tables(site):
    run_report(site)
    plots, losses = page(site).split("\n## Where qframework is slower")
    assert "](assets/" not in losses, "plots come first"
    assert plots.index("assets/performance-cpu.svg") < plots.index("assets/performance-linear.svg"), "models first"
    assert "0.56 times as fast as the best peer as geometric mean of 2 cases, between 0.25 (4,5,6) and 1.25" in plots
    assert "qframework is 1.50 times as fast as the best peer." in plots
    for title in (
        "INT8 linear: Chip 9000, 2026-01-02",
        "Vision transformers on the CPU, vit, batch 8: Chip 9000, 2026-01-02",
    ):
        assert f"\n## {title}\n" in history(site)
        assert f"(performance-history.md#{report.anchor(title)})" in plots


def test_the_tracked_summary_is_short():
    assert len(report.PAGE.read_text().splitlines()) <= 400
    assert "](assets/performance-vit-b.svg)" not in report.PAGE.read_text(), "it belongs to README and site"
    assert (report.PAGE.parent / "assets" / report.FIRST_SCREEN).exists()


@pytest.mark.parametrize(
    ("provider", "shown"),
    [
        ("qframework_static_frozen", "static INT8, frozen weights"),
        ("qframework_static_int8_attention", "static INT8, INT8 attention"),
        ("qframework_dynamic_float_graphs", "dynamic INT8, float weights, CUDA graphs"),
        ("scaled_mm_fp8_bias_precise", "FP8 (cuBLAS), bias, exact sums"),
        ("fp16_max_autotune", "FP16 compiled, max-autotune"),
        ("qframework_sage2_int8", "sage2_int8"),
        ("qframework_1x128_compiled", "INT8 blocks of 1x128, compiled"),
        ("qframework_b32", "INT8 blocks of 32"),
        ("somebody_else", "somebody_else"),
    ],
)
def test_labels(provider, shown):
    assert label(provider) == shown


@pytest.mark.parametrize("benchmark", ["int8_linear", "attention", "vit_gpu"])
def test_plots_say_what_the_axes_are(benchmark, tmp_path):
    shape = {"int8_linear": [8, 16, 32], "attention": [1, 2, 64, 64]}.get(benchmark)
    rate = {"tflops": 5.0} if shape else {"images_per_second": 5.0, "model": "vit", "batch": 2}
    names = ("qframework_static", "qframework_per_token", "torch_fp16")
    records = [
        Record(benchmark=benchmark, op=benchmark, shape=shape, provider=name, p50_ms=1.0, **rate) for name in names
    ]
    results = Results(benchmark, MACHINE, tmp_path / "run.json")
    results.add(*records)
    plots.draw(report.load_run(results.path), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    said = {"int8_linear": "M, N, K: rows, outputs, inputs", "attention": "B, H, N, D", "vit_gpu": "images/s"}[
        benchmark
    ]
    assert said in drawn
    assert "static INT8" in drawn
    assert "qframework_" not in drawn


def test_report_names_machine_versions_commit_and_date_beside_every_table(site):
    assert run_report(site) == 0
    for section in history(site).split("\n## ")[1:]:
        for fact in ("Chip 9000, sm_90, driver 1.2", "torch 2.11.0", "triton 3.6.0", "`abc123`", "2026-01-02T03:04:05"):
            assert fact in section
    assert "`abc123` with local changes" in history(site)


def test_report_computes_ratios(site):
    run_report(site)
    assert "| 1,2,3 | **500** | 400 |  | 1.25 |" in history(site)
    assert "| static INT8 | 12 | 2.40 | 1.50 |" in history(site)
    assert "| X86InductorQuantizer, static | 8 | 1.60 |  |" in history(site)


def test_report_shows_losses_and_failures(site):
    run_report(site)
    losses = page(site).split("## Where qframework is slower")[1].split("\n## ")[0]
    assert "| 4,5,6 | qframework | 0.25 FP16 (cuBLAS) |" in losses
    assert "1,2,3" not in losses
    assert "vit" not in losses
    assert "failed: a / b |" in history(site)


def test_report_shows_regressions(site):
    """The newest run against the previous one, without peers; one percent is noise."""
    folder = site / "results"
    for name, date, rates in (("older", "2026-01-03", (99.0, 1.0)), ("old", "2026-01-04", (20.0, 9.0))):
        results = Results("vit_cpu", {**MACHINE, "date": date}, folder / f"{name}.json")
        results.add(vit("qframework_static", rates[0]), vit("qframework_dynamic", 10.0), vit("fp32_eager", rates[1]))
    machine_now = {**MACHINE, "commit": "def456", "date": "2026-01-05"}
    new = Results("vit_cpu", machine_now, folder / "new.json", note="Attention too. And more.")
    new.add(vit("qframework_static", 18.0), vit("qframework_dynamic", 9.9), vit("fp32_eager", 5.0))
    run_report(site)
    before = history(site).split("slower than in the previous run")[1].split("\n## ")[0]
    assert "| vit, batch 8 | static INT8 | new, `def456` | 18 | old, `abc123` | 20 | 0.90 | Attention too |" in before
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
    assert "tiny" not in page(site) + history(site)


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
