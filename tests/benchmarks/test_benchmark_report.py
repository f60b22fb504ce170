"""The performance page and its plots match the result files (report.py, pages.py, tables.py, plots.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.harness import Record, Results

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
    before = page(site).split("slower than in the previous run")[1].split("\n## ")[0]
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
