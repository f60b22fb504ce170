"""Targets: ratios within one run, verdicts and the command (target_table.py, targets.py, report_targets.py)."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks import report, targets
from benchmarks.harness import Record, Results
from benchmarks.int8_linear import LARGE_SHAPES, default_providers
from benchmarks.int8_linear import PROVIDERS as LINEARS
from benchmarks.report_targets import newest
from benchmarks.tables import combined
from benchmarks.target_table import BEFORE, TARGETS, Target, evaluate, rows
from benchmarks.vit_cpu import PROVIDERS as CPU_PROVIDERS
from benchmarks.vit_gpu_cases import PROVIDERS

SPEED = Target(
    what="a", against="b", benchmark="int8_linear", subjects=("1,2,3", "4,5,6"), ours=("qframework_x", "qframework_y"),
    peers=("peer", "other"), also=("extra",), must=1.25, aim=1.5,
)  # fmt: skip
COST = Target(
    what="a", against="b", benchmark="vit_gpu", subjects=("m, batch 256",), ours=("qframework_x",), peers=("peer",),
    measure="peak_mb", must=0.75, aim=0.6,
)  # fmt: skip


def gemm(provider: str, tflops: float | None, shape: tuple[int, ...] = (1, 2, 3), **fields) -> Record:
    base = Record(benchmark="int8_linear", op="int8_linear", provider=provider, shape=list(shape), p50_ms=1.0)
    return dataclasses.replace(base, tflops=tflops, **fields)


def both(provider: str, first: float | None, second: float | None, **fields) -> list[Record]:
    return [gemm(provider, first, **fields), gemm(provider, second, (4, 5, 6), **fields)]


def memory(provider: str, megabytes: float, **fields) -> Record:
    return Record(benchmark="vit_gpu", provider=provider, model="m", batch=256, peak_mb=megabytes, **fields)


RIVALS = [*both("peer", 100, 400), *both("other", 200, 100)]  # the best: 200 and 400


# Ratios


def test_the_ratio_is_the_geometric_mean_of_best_over_best():
    outcome = evaluate(SPEED, [*RIVALS, *both("qframework_x", 400, 100), *both("qframework_y", 100, 800)])
    assert outcome.ratios == (pytest.approx((400 / 200 * 800 / 400) ** 0.5),)
    assert outcome.which == ("qframework_x", "qframework_y")
    assert outcome.rivals == ("other", "peer")
    assert outcome.verdict == "PASS, aim reached"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (300, "PASS, aim reached"),
        (299, "PASS"),
        (250, "PASS"),
        (249, "short of 1.25 by 0.4 percent"),
        (125, "short of 1.25 by 50 percent"),
    ],
)
def test_verdicts_of_speeds(ours, verdict):
    assert evaluate(SPEED, [*RIVALS, *both("qframework_x", ours, 2 * ours)]).verdict == verdict


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(600, "PASS, aim reached"), (601, "PASS"), (750, "PASS"), (900, "short of 0.75 by 20 percent")],
)
def test_verdicts_of_costs(ours, verdict):
    outcome = evaluate(COST, [memory("peer", 1000), memory("qframework_x", ours)])
    assert outcome.verdict == verdict
    assert outcome.mean == pytest.approx(ours / 1000)


def test_the_lowest_cost_counts():
    target = dataclasses.replace(COST, ours=("qframework_x", "qframework_y"), peers=("peer", "other"))
    records = [memory("peer", 500), memory("other", 1000), memory("qframework_x", 300), memory("qframework_y", 400)]
    assert evaluate(target, records).mean == pytest.approx(300 / 500)


def test_the_verdict_is_open_if_a_peer_was_not_measured_or_timed_out():
    mine = both("qframework_x", 300, 600)
    assert evaluate(SPEED, [*mine, *both("peer", 200, 400)]).verdict == "open: no figure of other"
    stopped = [dataclasses.replace(record, status="timeout", tflops=None) for record in both("other", 1, 1)]
    assert evaluate(SPEED, [*mine, *both("peer", 200, 400), *stopped]).verdict == "open: no figure of other"
    assert evaluate(SPEED, [*mine, *both("peer", 200, 400), gemm("other", 200)]).verdict == "open: no figure of other"


def test_a_missed_target_stays_missed_whatever_is_open():
    assert evaluate(SPEED, [*both("qframework_x", 200, 400), *both("peer", 200, 400)]).verdict.startswith("short")


@pytest.mark.parametrize("status", ["unsupported", "wrong", "failed"])
def test_an_unsupported_peer_is_named_and_does_not_block_a_pass(status):
    broken = [dataclasses.replace(record, status=status) for record in both("other", 9e9, 9e9)]
    outcome = evaluate(SPEED, [*both("qframework_x", 300, 600), *both("peer", 200, 400), *broken])
    assert outcome.verdict == "PASS, aim reached"
    assert outcome.without == (f"other ({status})",)
    assert f"peer; without other ({status})" in rows([(SPEED, outcome, "file")])


def test_our_own_wrong_result_is_the_verdict():
    wrong = both("qframework_x", 9e9, 9e9, status="wrong")
    outcome = evaluate(SPEED, [*RIVALS, *wrong])
    assert (outcome.ratios, outcome.verdict, outcome.is_complete) == ((), "wrong: qframework_x", True)
    assert "|  | wrong: qframework_x |" in rows([(SPEED, outcome, "file")])
    assert evaluate(SPEED, [*RIVALS, wrong[0], *both("qframework_x", 300, 600)[1:]]).verdict == "wrong: qframework_x"
    right = both("qframework_y", 300, 600)
    second = [dataclasses.replace(record, run=2) for record in [*RIVALS, *right]]
    assert evaluate(SPEED, [*RIVALS, *wrong, *second]).verdict == "wrong: qframework_x"
    assert evaluate(SPEED, [*RIVALS, *wrong, *right]).verdict == "PASS, aim reached"


def test_there_is_no_outcome_without_a_comparison():
    assert evaluate(SPEED, RIVALS) is None
    assert evaluate(SPEED, both("qframework_x", 1, 1)) is None


def test_the_verdict_is_open_if_a_shape_is_missing():
    outcome = evaluate(SPEED, [*RIVALS, gemm("qframework_x", 9e9)])
    assert outcome.verdict == "open: 1 of 2 shapes measured"
    assert not outcome.is_complete


def test_optional_peers_count_where_measured():
    outcome = evaluate(SPEED, [*RIVALS, *both("extra", 1000, 1000), *both("qframework_x", 300, 600)])
    assert outcome.verdict.startswith("short")
    assert outcome.rivals == ("extra",)


def test_every_run_must_pass_on_its_own():
    """The second run's machine is twice as fast, and so are its peers."""
    first = [*RIVALS, *both("qframework_x", 280, 560)]
    second = [dataclasses.replace(record, run=2, tflops=2 * record.tflops) for record in first]
    outcome = evaluate(SPEED, [*first, *second])
    assert outcome.ratios == (pytest.approx(1.4), pytest.approx(1.4))
    assert outcome.verdict == "PASS"
    slower = [*second[:4], *both("qframework_x", 480, 960, run=2)]
    outcome = evaluate(SPEED, [*first, *slower])
    assert outcome.verdict == "short of 1.25 by 4 percent"
    assert outcome.range == "1.296 (1.200 to 1.400 in 2 runs)"


@pytest.mark.parametrize("lacking", [(), both("peer", None, None, run=2, status="timeout")])
def test_a_peer_that_a_run_lacks_counts_with_its_value_of_another_run(lacking):
    """Also where it timed out: without the fastest peer the run would look better."""
    ours = both("qframework_x", 280, 560)
    second = [dataclasses.replace(record, run=2) for record in [*both("other", 200, 100), *ours]]
    outcome = evaluate(SPEED, [*RIVALS, *ours, *lacking, *second])
    assert outcome.ratios == (pytest.approx(1.4), pytest.approx(1.4))
    assert outcome.rivals == ("other", "peer")


def test_records_of_other_benchmarks_are_ignored():
    foreign = [dataclasses.replace(record, benchmark="vit_gpu") for record in both("peer", 9e9, 9e9)]
    assert evaluate(SPEED, [*RIVALS, *foreign, *both("qframework_x", 300, 600)]).verdict == "PASS, aim reached"


# The table


def test_every_name_in_the_table_is_a_provider():
    known = {
        "int8_linear": set(LINEARS), "vit_gpu": set(PROVIDERS), "vit_first_call": set(PROVIDERS),
        "vit_cpu": set(CPU_PROVIDERS),
    }  # fmt: skip
    known["vit_gpu"] |= {f"qframework_{mode}{form}" for mode in ("static", "dynamic") for form in BEFORE}
    for target in TARGETS:
        assert {*target.ours, *target.peers, *target.also} <= known[target.benchmark]
        assert all(name.startswith("qframework") for name in target.ours)
        assert not any(name.startswith("qframework") for name in (*target.peers, *target.also))


def test_the_command_measures_every_name_in_the_table():
    """Each part for the GPU contains all of our providers and required peers of its targets."""
    measured = {
        ("int8_linear", ""): set(default_providers()),
        ("vit_gpu", "batch 256"): set(targets.THROUGHPUT),
        ("vit_gpu", "batch 1"): set(targets.LATENCY),
        ("vit_first_call", "batch 256"): set(targets.vit_gpu.FIRST_CALL_PROVIDERS),
    }
    for target in TARGETS:
        if target.devices:
            batch = re.findall(r"batch \d+$", target.subjects[0])
            providers = measured[target.benchmark, "".join(batch)]
            assert set(target.peers) <= providers
            assert set(target.ours) & providers


def test_promises():
    """The targets, written down independently."""
    must = {(target.what, target.against): target.must for target in TARGETS}
    fastest = "best of FP16 compiled and torchao FP8"
    assert must["INT8 GEMM, M >= 12608, fp16 out", "cuBLAS FP8 tensor-wise"] == 1.0
    assert must["INT8 GEMM, M >= 12608, int8 out", "cuBLAS bf16 + bias"] == 1.45
    assert must["INT8 GEMM, M = 197 and 1576, fp16 out", "best of bf16, FP8, _int_mm"] == 1.0
    assert must["INT8 GEMM, M >= 12608, residual, fp16 out", "cuBLAS FP8 and the same work in Inductor"] == 1.1
    assert must["vit_base_patch16_224, batch 256, static", fastest] == 2.0
    assert must["vit_large_patch16_224, batch 256, static", fastest] == 1.7
    assert must["vit_large_patch16_224, batch 256, static", "FP32"] == 14
    assert must["vit_base_patch16_224, batch 256, dynamic", fastest] == 1.1
    assert must["vit_base_patch16_224, batch 1, latency under CUDA graphs", "FP16 under CUDA graphs"] == 0.6
    assert must["vit_base_patch16_224, first call, static", "FP16 torch.compile"] == 0.6
    assert must["vit_base_patch16_224, batch 256, static, peak memory", "FP16"] == 0.75
    assert {len(target.subjects) for target in TARGETS if ">= 12608" in target.what} == {len(LARGE_SHAPES)} == {20}
    assert len(must) == len(TARGETS)


@pytest.mark.parametrize(
    ("device", "hopper"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200", True), ("NVIDIA B200", False), ("AMD EPYC", False)],
)
def test_promises_are_for_hopper_or_any_device(device, hopper):
    assert {target.is_for(device) for target in TARGETS if "CPU" not in target.what} == {hopper}
    assert all(target.is_for(device) for target in TARGETS if "CPU" in target.what)


# The page and the command


def write(folder: Path, name: str, records: list[Record], **machine) -> Path:
    head = {"device": "NVIDIA H100", "commit": "abc123", "date": "2026-01-01", **machine}
    results = Results(records[0].benchmark, head, folder / f"{name}.json")
    for record in records:
        results.records.append(record)
    results.write()
    return results.path


def latency(ours: float, peer: float, **fields) -> list[Record]:
    base = Record(benchmark="vit_gpu", provider="", model="vit_base_patch16_224", batch=1, images_per_second=1.0)
    named = {"qframework_static_graphs": ours, "fp16_compiled_graphs": peer, "qframework_dynamic": 1.0}
    return [dataclasses.replace(base, provider=name, p50_ms=ms, **fields) for name, ms in named.items()]


TITLE = "vit_base_patch16_224, batch 1, latency under CUDA graphs"


def line(text: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {TITLE}")]
    return found


def test_the_page_holds_every_target_with_its_spread(tmp_path):
    write(tmp_path, "old", latency(2.0, 1.0), date="2025-01-01")
    write(tmp_path, "new", [*latency(0.5, 1.0), *latency(0.58, 1.0, run=2)])
    write(tmp_path, "elsewhere", latency(0.1, 1.0), device="Another chip", date="2027-01-01")
    page = tmp_path / "performance.md"
    assert report.main(["--results", str(tmp_path), "--page", str(page)]) == 0
    text = page.read_text()
    found = line(text)
    assert "| at most 0.6 | at most 0.5 | 0.539 (0.500 to 0.580 in 2 runs) | PASS |" in found
    assert found.endswith("| static INT8, CUDA graphs | FP16 compiled, CUDA graphs | new, `abc123` |")
    # One for each device: both runs are one row, and the older file is not shown.
    history = page.with_name(report.HISTORY).read_text()
    assert history.count("\n| static INT8, CUDA graphs |") == 2
    assert text.count("not measured") == len(TARGETS) - 1
    assert "spread %" in history


def test_a_complete_file_is_shown_before_a_newer_one(tmp_path):
    target = next(target for target in TARGETS if target.what == TITLE)
    write(tmp_path, "complete", latency(0.5, 1.0))
    newer = [record for record in latency(0.1, 1.0) if record.provider != "fp16_compiled_graphs"]
    newer.append(dataclasses.replace(newer[0], provider="fp16_max_autotune", p50_ms=1.0))
    write(tmp_path, "newer", newer, date="2026-02-02")
    runs = report.load_runs(tmp_path)
    assert newest(target, runs)[1] == "complete, `abc123`"
    assert newest(target, [run for run in runs if run.stem == "newer"])[0].verdict.startswith("open")


def test_a_newer_wrong_file_is_shown_before_a_complete_one(tmp_path):
    target = next(target for target in TARGETS if target.what == TITLE)
    write(tmp_path, "right", latency(0.5, 1.0))
    graphs, *others = latency(0.5, 1.0)
    write(tmp_path, "wrong", [dataclasses.replace(graphs, status="wrong"), *others], date="2026-02-02")
    outcome, where = newest(target, report.load_runs(tmp_path))
    assert (outcome.verdict, where) == ("wrong: qframework_static_graphs", "wrong, `abc123`")
    write(tmp_path, "mended", latency(0.6, 1.0), date="2026-03-03")
    assert newest(target, report.load_runs(tmp_path))[1] == "mended, `abc123`"


def test_runs_are_combined_into_one_record():
    (record,) = combined([gemm("a", 100, p50_ms=1.0), gemm("a", 400, p50_ms=4.0, run=2)])
    assert (record.tflops, record.p50_ms) == (pytest.approx(200), pytest.approx(2))
    assert record.spread == pytest.approx(0.75)
    assert record.run is None
    good, stopped = gemm("a", 100), gemm("a", None, run=2, status="timeout")
    assert [found.status for found in combined([good, stopped])] == ["ok"]
    assert [found.status for found in combined([good, dataclasses.replace(stopped, status="wrong")])] == ["wrong"]
    assert combined([good]) == [good]


def test_ratios_are_printed_and_written(tmp_path, capsys):
    """Without measuring anything: the files are read again."""
    write(tmp_path, "mine-vit_base_latency", latency(0.5, 1.0))
    arguments = ["--output-dir", str(tmp_path), "--name", "mine", "--parts", "none"]
    assert targets.main(arguments) == 0
    assert "| 0.500 | PASS, aim reached |" in line(capsys.readouterr().out)
    where = "mine-vit_base_latency, `abc123`"
    document = json.loads((tmp_path / "other" / "mine-targets.json").read_text())
    (row,) = [row for row in document["targets"] if row["what"] == TITLE]
    assert (row["ratios"], row["verdict"], row["where"]) == ([0.5], "PASS, aim reached", where)
    assert (tmp_path / "page" / "performance.md").read_text().startswith("# Performance")
    assert len(list((tmp_path / "page" / "assets").glob("*.svg"))) == 1


def test_smoke(tmp_path, capsys):
    assert targets.main(["--smoke", "--output-dir", str(tmp_path)]) == 0
    found = {path.name: Results.load(path) for path in tmp_path.glob("*.json")}
    assert set(found) == {f"targets-{part}.json" for part in targets.SMOKE_PARTS}
    assert all(results.smoke and results.records for results in found.values())
    assert {record.status for results in found.values() for record in results.records} <= {"ok", "unsupported"}
    assert "not measured" in line(capsys.readouterr().out)


def test_runs_are_added_part_by_part(tmp_path, monkeypatch):
    seen = []

    def add(results: Results, call: targets.Call) -> None:
        seen.append((results.path.name, results.run, call.smoke))
        results.add(Record(benchmark=results.benchmark, provider="peer", model="m", batch=1, p50_ms=1.0))

    monkeypatch.setenv("QFRAMEWORK_COMMIT", "abc123")
    monkeypatch.setattr(targets, "PARTS", {"a": ("vit_gpu", add), "b": ("vit_gpu", add)})
    monkeypatch.setattr(targets, "conclude", lambda folder, name: None)
    assert targets.main(["--smoke", "--parts", "a,b", "--output-dir", str(tmp_path), "--runs", "2"]) == 0
    assert targets.main(["--smoke", "--parts", "b", "--output-dir", str(tmp_path), "--add-run"]) == 0
    a, b = "targets-a.json", "targets-b.json"
    assert seen == [(a, None, True), (b, None, True), (a, 2, True), (b, 2, True), (b, 3, True)]


@pytest.mark.parametrize("several", [["--runs", "2"], ["--add-run"]])
def test_several_runs_need_committed_code(monkeypatch, several):
    monkeypatch.setenv("QFRAMEWORK_COMMIT", "abc123-dirty")
    monkeypatch.setattr(targets, "measure", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        targets.main(["--smoke", *several])
    assert ended.value.code == 2


def test_our_own_failure_sets_the_exit_status(monkeypatch):
    def add(results: Results, call: targets.Call) -> None:
        results.add(Record(benchmark="vit_gpu", provider="qframework_static", model="m", batch=1, status="failed"))

    monkeypatch.setattr(targets, "PARTS", {"a": ("vit_gpu", add)})
    assert targets.main(["--smoke", "--parts", "a"]) == 1
