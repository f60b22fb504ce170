"""Vision transformers on a GPU: separate processes, first calls, and killed workers (vit_gpu*.py, boxed.py)."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import models, vit_gpu, vit_gpu_cases
from benchmarks.boxed import Answers, Limits, Worker, check_then_time
from benchmarks.harness import Record, Results, UnavailableError, WrongResultError
from benchmarks.machine import REPOSITORY
from benchmarks.vit_gpu import Measurement, Plan
from benchmarks.vit_gpu_cases import PROVIDERS

FP8 = {name for name in PROVIDERS if "fp8" in name}


def limits(seconds: float = 240.0) -> Limits:
    return Limits(seconds, seconds, time.monotonic() + seconds)


def test_smoke_measures_in_a_process_of_its_own(tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--providers", "fp32,qframework_dynamic,torchao_fp8_rowwise", "--batches", "2,1"]
    assert vit_gpu.main([*arguments, "--limit", "240", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert document["machine"]["torch"] == torch.__version__
    found = {(record["provider"], record["batch"]): record for record in document["records"]}
    names = ("fp32", "qframework_dynamic")
    for name in names:
        for batch in (2, 1):
            record = found.pop((name, batch))
            assert record["images_per_second"] == pytest.approx(1e3 * batch / record["p50_ms"], rel=2e-3)
            assert "first_call_s" not in record  # others compile at the same time
    if not torch.cuda.is_available():
        assert {record["status"] for record in found.values()} == {"unsupported"}


@pytest.mark.gpu
def test_every_provider_on_a_gpu(tmp_path):
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--check-limit", "500", "--limit", "580", "--output", str(output)]
    assert vit_gpu.main(arguments) == 0
    records = [Record.from_json(fields) for fields in json.loads(output.read_text())["records"]]
    assert {record.provider for record in records} == set(vit_gpu.default_providers())
    assert all(record.peak_mb for record in records if not record.provider.startswith("torchao"))


@pytest.mark.slow
@pytest.mark.full
def test_every_provider_in_a_smoke_run(tmp_path):
    output = tmp_path / "out.json"
    assert vit_gpu.main(["--smoke", "--batches", "2", "--limit", "500", "--output", str(output)]) == 0
    status = {record["provider"]: record["status"] for record in json.loads(output.read_text())["records"]}
    expected = "ok" if torch.cuda.is_available() else "unsupported"
    assert status == {name: expected if name in FP8 else "ok" for name in vit_gpu.default_providers()}


def test_first_calls_start_from_cold_caches(tmp_path, monkeypatch):
    """In temporary folders, which override the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "warm"))
    output = tmp_path / "out.json"
    arguments = ["--smoke", "--first-call", "--providers", "qframework_dynamic", "--batches", "2"]
    assert vit_gpu.main([*arguments, "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    (record,) = document["records"]
    assert document["benchmark"] == record["benchmark"] == "vit_first_call"
    assert record["first_call_s"] > 0
    assert record["prepare_s"] > 0
    assert "p50_ms" not in record
    assert not (tmp_path / "warm").exists()


def test_workers_see_the_environment_they_are_given(monkeypatch):
    """And the parent's environment is restored."""
    results = Results("vit_first_call", {"device": None})
    before = dict(os.environ)
    plan = Plan("m", (("fp32", 1),), "cpu", smoke=True, first_call=True)
    monkeypatch.setattr(vit_gpu, "Measurement", ReportsCache)
    vit_gpu.run_first_calls(results, "m", plan.cases, "cpu", limits())
    (record,) = results.records
    assert record.reason.endswith("/inductor 0")
    assert dict(os.environ) == before


class ReportsCache:
    """A worker that reports the path and size of its cache."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, phase: str) -> Iterator[Record]:
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        held = len(os.listdir(folder)) if os.path.exists(folder) else 0
        yield dataclasses.replace(self.plan.identities()[0], reason=f"{folder} {held}")


def test_a_wrong_provider_is_never_timed(monkeypatch):
    wrong = vit_gpu_cases.Provider(torch.float32, "float32", compile=lambda module: lambda images: 2 * module(images))
    monkeypatch.setitem(PROVIDERS, "fp16", wrong)
    measurement = Measurement(Plan(models.SMOKE_MODEL, (("fp32", 2), ("fp16", 2)), "cpu", smoke=True))
    assert [record.status for record in measurement("check")] == ["ok", "wrong"]
    assert [record.provider for record in measurement("time")] == ["fp32"]


def test_all_three_calls_are_checked():
    """CUDA graphs run the first call eagerly, record the second and replay the third."""
    reference = torch.randn(2, 10)
    for wrong in range(3):
        first, *rest = [reference * (2 if call == wrong else 1) for call in range(3)]
        with pytest.raises(WrongResultError):
            vit_gpu.check_three(lambda images, rest=rest: rest.pop(0), reference, first, reference, PROVIDERS["fp16"])


def test_too_exact_for_fp8_is_refused():
    logits = torch.randn(4, 10)
    with pytest.raises(WrongResultError, match="too exact for fp8"):
        models.accuracy(logits, logits, "fp8")


class Notes:
    """A worker that records when its phases begin and end."""

    def __init__(self, plan: tuple[str, str, float]) -> None:
        self.name, self.folder, self.seconds = plan

    def __call__(self, phase: str) -> Iterator[Record]:
        start = time.monotonic()
        time.sleep(self.seconds if phase == "check" else 0.05)
        with open(os.path.join(self.folder, f"{self.name}-{phase}"), "w") as file:
            file.write(f"{start} {time.monotonic()}")
        timed = 1.0 if phase == "time" else None
        threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
        yield Record(benchmark="b", provider=self.name, p50_ms=timed, reason=threads)


def test_timing_and_max_autotune_run_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    plans = [(name, str(tmp_path), 1.5) for name in ("first", "second", "alone")]
    answers = list(check_then_time(Notes, plans, limits(), jobs=2, alone=lambda plan: plan[0] == "alone"))
    assert [answer.plan[0] for answer in answers] == ["first", "second", "alone"]
    assert [record.p50_ms for answer in answers for record in answer.timed] == [1.0] * 3
    share = str(os.cpu_count() or 1)  # of two workers, twice the half
    assert [record.reason for answer in answers for record in answer.checked] == [share, share, None]
    spans = {path.name: tuple(map(float, path.read_text().split())) for path in tmp_path.iterdir()}

    def overlap(a: str, b: str) -> bool:
        return spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]

    assert overlap("first-check", "second-check")
    together = {("first-check", "second-check")}
    names = sorted(spans)
    assert not any(overlap(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if (a, b) not in together)


class FasterLater:
    """A worker whose second timing takes half of the first."""

    def __init__(self, name: str) -> None:
        self.name, self.timed = name, 0

    def __call__(self, phase: str) -> Iterator[Record]:
        self.timed += phase == "time"
        took = 4.0 / self.timed if phase == "time" else None
        yield Record(benchmark="b", provider=self.name, p50_ms=took)


def test_the_fastest_of_several_rounds_counts():
    for answers in check_then_time(FasterLater, ["a", "b"], limits(), jobs=2, rounds=2):
        assert [record.p50_ms for record in answers.timed] == [4.0, 2.0]
        (record,) = answers.complete([Record(benchmark="b", provider=answers.plan)])
        assert (record.p50_ms, record.spread) == (2.0, 0.5)


@pytest.mark.parametrize("alone", [False, True])
def test_a_late_check_does_not_use_up_the_time_of_others(alone, tmp_path, capsys):
    plans = [("punctual", str(tmp_path), 0.1), ("late", str(tmp_path), 600.0)]
    few = Limits(240.0, 240.0, time.monotonic() + 40.0, reserve=10.0)
    punctual, late = check_then_time(Notes, plans, few, jobs=2, alone=lambda plan: alone and plan[0] == "late")
    assert [record.p50_ms for record in punctual.timed] == [1.0]
    assert late.ended is not None
    assert late.ended[0] == "timeout"
    assert "punctual" in capsys.readouterr().err


class HasAChild:
    """A worker that starts a child process, reports its id, and runs for a minute."""

    def __call__(self, seconds: float) -> Iterator[Record]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        yield Record(benchmark="b", provider="child", shape=[child.pid])
        time.sleep(seconds)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not is_running(pid)


@pytest.mark.parametrize("late", [True, False])
def test_child_processes_of_a_worker_end_with_it(late):
    worker = Worker(HasAChild)
    (record,) = worker.request(0.0, 60)
    (pid,) = record.shape
    assert is_running(pid)
    if late:
        assert len(list(worker.request(60.0, 1.0))) == 1
        assert worker.status is not None
        assert worker.status[0] == "timeout"
    else:
        worker.close()
    assert ends(pid)
    worker.close()


def test_a_worker_ends_with_its_parent(tmp_path):
    """Even during its work, and when the parent is killed."""
    code = (
        "import os, signal\nfrom benchmarks.boxed import Worker\n"
        "from tests.benchmarks.test_benchmark_vit_gpu import HasAChild\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(HasAChild)\n"
        "    print(next(worker.request(60.0, 60.0)).shape[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert ends(int(parent.stdout))


def test_max_autotune_is_compiled_alone():
    assert {name for name, provider in PROVIDERS.items() if provider.alone} == {
        name for name in PROVIDERS if "max_autotune" in name
    }
    assert vit_gpu._alone(Plan("m", (("fp16_max_autotune", 1),), "cuda"))
    assert not vit_gpu._alone(Plan("m", (("fp16", 1),), "cuda"))


def test_a_killed_provider_has_the_reason():
    plan = Plan("m", (("fp16", 256), ("fp16", 1)), "cuda")
    done = dataclasses.replace(plan.identities()[0], p50_ms=1.0)
    answers = Answers(plan, plan.identities(), [done], ("timeout", "not done after 2 s"))
    assert [(record.batch, record.status) for record in answers.complete(plan.identities())] == [
        (256, "ok"),
        (1, "timeout"),
    ]


def test_only_smoke_runs_work_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vit_gpu.choose_device(smoke=True) == "cpu"
    with pytest.raises(Exception, match="vit_gpu needs a CUDA device"):
        vit_gpu.choose_device(smoke=False)


def test_blocks_are_compiled_once_and_the_rest_not_at_all():
    model = models.build_model(models.SMOKE_MODEL, smoke=True, depth=4)
    compiled = vit_gpu_cases._inductor_blocks(model)
    parts = {name for name, module in compiled.named_modules() if module._compiled_call_impl is not None}
    assert parts == {"blocks.0", "blocks.1", "blocks.2", "blocks.3"}
    images = models.random_images(model, 2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # reset() keeps those of earlier tests
    with torch.inference_mode():
        compiled(images)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_model_without_blocks_has_none_to_compile():
    with pytest.raises(UnavailableError, match="no list of at least four blocks"):
        vit_gpu_cases.blocks_of(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))))
