"""One record format, one way to time, and checks that come first: a wrong result is never timed.

A result file is ``{"schema", "benchmark", "smoke", "machine", "peaks", "records"}``, and a ``"note"`` where needed. A
record names what ran (``op`` and ``shape``, or ``model`` and ``batch``; ``provider``, ``dtype``), how long it took
(``p20_ms, p50_ms, p80_ms`` over ``runs`` samples), the rate at the median, and what it cost in accuracy and memory.
``status`` is ``ok``, or says why there is no time: ``wrong`` and ``failed`` make the benchmark exit with 1, ``timeout``
and ``unsupported`` do not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from qframework.errors import FileFormatError, QFrameworkError

SCHEMA = 1
BROKEN = ("wrong", "failed")
THIRD_PARTY = ("sageattention", "torchao")  # what they get wrong is a row of the table, not a failure of the benchmark
# Unit roundoff: the largest relative error of one rounding to the format.
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

Check = Callable[[Tensor], float]
"""Takes a provider's output; returns its relative error or raises WrongResultError."""


class WrongResultError(QFrameworkError):
    """A provider's result is not what the oracle says; ``error`` is its relative error."""

    def __init__(self, message: str, error: float = float("inf")) -> None:
        super().__init__(message)
        self.error = error


class UnavailableError(QFrameworkError):
    """This machine or this version of a library does not have what a provider needs."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row. Absent values are None and are left out of the file."""

    benchmark: str
    provider: str
    op: str | None = None
    shape: list[int] | None = None  # of a linear M, N, K; of attention B, H, N, D
    causal: bool | None = None
    model: str | None = None
    batch: int | None = None
    dtype: str | None = None
    status: str = "ok"
    reason: str | None = None
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    runs: int | None = None
    tflops: float | None = None
    gbps: float | None = None
    images_per_second: float | None = None
    percent_of_peak: float | None = None
    peak_mb: float | None = None
    error: float | None = None  # relative L2 error against the FP64 or FP32 oracle on the operands the provider sees
    quantization_error: float | None = None  # relative L2 error against the product of the float operands
    relative_l1: float | None = None  # against float attention
    sqnr_db: float | None = None
    worst_sqnr_db: float | None = None  # the image with the lowest
    prepare_s: float | None = None  # export, calibrate, convert
    first_call_s: float | None = None  # compilation included

    def to_json(self) -> dict[str, Any]:
        return {key: _round(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """The record that ``to_json`` wrote."""
        finite: dict[str, Any] = {key: _number(value) for key, value in fields.items()}
        return cls(**finite)

    @property
    def subject(self) -> str:
        """What was measured: a shape, or a model and its batch."""
        if not self.shape:
            return f"{self.model}, batch {self.batch}"
        return ",".join(map(str, self.shape)) + (" causal" if self.causal else "")

    def __str__(self) -> str:
        what = self.op or self.model
        size = self.subject if self.shape else f"batch {self.batch}"
        head = f"{what:<24} {size:<18} {self.provider:<28}"
        if self.status != "ok":
            return f"{head} {self.status}: {self.reason}"
        rates = {"images/s": self.images_per_second, "TFLOP/s": self.tflops, "GB/s": self.gbps}
        rate = "".join(f"{value:10.4g} {unit}" for unit, value in rates.items() if value is not None)
        error = "" if self.error is None else f"  error {self.error:.2e}"
        return f"{head} {self.p50_ms:10.3f} ms {rate}{error}"


@dataclass(frozen=True)
class Timing:
    """Samples of one provider, in milliseconds."""

    samples_ms: tuple[float, ...]

    def fields(self) -> dict[str, Any]:
        """The timing fields of a Record."""
        p20, p50, p80 = np.quantile(self.samples_ms, [0.2, 0.5, 0.8]).tolist()
        return {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "runs": len(self.samples_ms)}

    @property
    def median_s(self) -> float:
        return float(np.median(self.samples_ms)) / 1e3


@dataclass
class Results:
    """The rows of one run; the file is rewritten after every row, so a run that is cut off keeps what it has."""

    benchmark: str
    machine: dict[str, Any]
    path: Path | None = None
    smoke: bool = False
    peaks: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    note: str | None = None  # what a reader must know about this run; added by hand, shown on the page

    @classmethod
    def start(cls, benchmark: str, device: str, arguments: argparse.Namespace) -> Results:
        """Empty results for ``arguments`` as ``argument_parser`` reads them."""
        return cls(benchmark, describe_machine(device), arguments.output, arguments.smoke)

    @classmethod
    def load(cls, path: Path) -> Results:
        """What ``write`` wrote to ``path``. Raises FileFormatError on any other file."""
        try:
            document = json.loads(path.read_text())
            if document["schema"] != SCHEMA:
                raise FileFormatError(f"{path} has schema {document['schema']!r}; accepted: {SCHEMA}")
            records = [Record.from_json(fields) for fields in document["records"]]
            head = document["benchmark"], document["machine"], path, document["smoke"], document["peaks"]
            return cls(*head, records, document.get("note"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise FileFormatError(f"{path} is no result file of benchmarks.harness: {error!r}") from error

    def attempt(self, identity: Record, measure: Callable[[], Record]) -> None:
        """Add what ``measure`` returns, or what its error stands for."""
        self.add(guarded(identity, measure))

    def add(self, *records: Record) -> None:
        """Append, print and write."""
        for record in records:
            self.records.append(record)
            print(record, flush=True)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(_dump(self.to_json()))
        os.replace(partial, self.path)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "smoke": self.smoke,
            "machine": self.machine,
            **({"note": self.note} if self.note else {}),
            "peaks": {key: _round(value) for key, value in self.peaks.items()},
            "records": [record.to_json() for record in self.records],
        }

    @property
    def exit_code(self) -> int:
        """1 when a provider failed, or one of ours or PyTorch's was wrong."""
        return int(any(record.status in BROKEN and not _wrong_elsewhere(record) for record in self.records))


def _wrong_elsewhere(record: Record) -> bool:
    return record.status == "wrong" and (record.provider or "").startswith(THIRD_PARTY)


def guarded(identity: Record, measure: Callable[[], Record]) -> Record:
    """What ``measure`` returns, or ``identity`` with the status and reason its error stands for."""
    try:
        return measure()
    except WrongResultError as error:
        return replace(identity, status="wrong", reason=str(error), error=error.error)
    except UnavailableError as error:
        return replace(identity, status="unsupported", reason=str(error))
    except Exception as error:  # noqa: BLE001  a provider's failure is a row of the table and the exit status
        return replace(identity, status="failed", reason=_one_line(error))


def argument_parser(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, seconds: does everything still run?")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results here (default: print only)")
    return parser


def comma_separated(accepted: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: names separated by commas, each one of ``accepted``."""
    names = list(accepted)

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; accepted: {', '.join(names)}")
        return chosen

    return parse


# Checks -------------------------------------------------------------------------------------------------------------


def relative_error(value: Tensor, reference: Tensor) -> float:
    """``||value - reference|| / ||reference||`` in FP64 over the whole tensor; inf where ``value`` holds NaN."""
    difference = (value.double() - reference.double()).norm()
    error = float(difference / reference.double().norm().clamp(min=torch.finfo(torch.float64).tiny))
    return error if not math.isnan(error) else float("inf")


def worst_row_error(value: Tensor, reference: Tensor) -> float:
    """The largest ``relative_error`` of a row (last dimension): one wrong row cannot hide among many right ones."""
    value, reference = value.double(), reference.double()
    norms = reference.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    error = float(((value - reference).norm(dim=-1) / norms).amax())
    return error if not math.isnan(error) else float("inf")


def require_shape(value: Tensor, reference: Tensor) -> None:
    if value.shape != reference.shape:
        raise WrongResultError(f"shape {tuple(value.shape)} instead of {tuple(reference.shape)}")


def rows_within(oracle: Callable[[], Tensor], tolerance: float) -> Check:
    """Every row's relative L2 error is at most ``tolerance``; ``oracle`` computes the FP64 result when needed."""

    def check(value: Tensor) -> float:
        reference = oracle()
        require_shape(value, reference)
        worst = worst_row_error(value, reference)
        if worst > tolerance:
            raise WrongResultError(
                f"relative error of the worst row is {worst:.3g}, at most {tolerance:.3g} accepted", worst
            )
        return relative_error(value, reference)

    return check


def elements_within(oracle: Callable[[], Tensor], bound: Callable[[Tensor], Tensor]) -> Check:
    """Every element is at most ``bound(reference)`` away from the FP64 ``oracle``."""

    def check(value: Tensor) -> float:
        reference = oracle()
        require_shape(value, reference)
        excess = (value.double() - reference).abs() > bound(reference)
        outside = int((excess | value.isnan()).sum())
        if outside:
            message = f"{outside} of {value.numel()} elements are further from the FP64 oracle than rounding explains"
            raise WrongResultError(message, worst_row_error(value, reference))
        return relative_error(value, reference)

    return check


def exactly(oracle: Callable[[], Tensor]) -> Check:
    """Equal to the FP64 ``oracle``, element for element."""
    return elements_within(oracle, torch.zeros_like)


def one_step_apart(oracle: Callable[[], Tensor], fraction: float) -> Check:
    """INT8 values equal to the rounded ``oracle``, or one step away (a tie) on at most ``fraction`` of them."""

    def check(value: Tensor) -> float:
        reference = oracle()
        require_shape(value, reference)
        steps = (value.double() - reference).abs()
        apart = float((steps > 0).double().mean())
        if not float(steps.amax()) <= 1 or apart > fraction:  # also NaN
            message = (
                f"up to {float(steps.amax()):g} steps apart, on {apart:.3g} of the elements; 1 on {fraction:g} accepted"
            )
            raise WrongResultError(message, worst_row_error(value, reference))
        return relative_error(value, reference)

    return check


# Timing -------------------------------------------------------------------------------------------------------------


def time_provider(fn: Callable[[], Any], device: str, *, rep_ms: float = 200.0, min_runs: int = 10) -> Timing:
    """Time ``fn`` for about ``rep_ms`` and at least ``min_runs`` calls: CUDA events on a GPU, wall clock on a CPU."""
    return time_cuda(fn, rep_ms, min_runs) if device == "cuda" else time_cpu(fn, rep_ms, min_runs)


def time_cuda(fn: Callable[[], Any], rep_ms: float, min_runs: int) -> Timing:
    """CUDA events around each call, the L2 cache flushed before it (``triton.testing.do_bench``)."""
    from triton.testing import do_bench

    once_ms = _wall_ms(fn, torch.cuda.synchronize)
    samples = do_bench(fn, warmup=rep_ms / 4, rep=max(rep_ms, 1.2 * min_runs * once_ms), return_mode="all")
    return Timing(tuple(samples))


def time_cpu(fn: Callable[[], Any], rep_ms: float, min_runs: int) -> Timing:
    """Wall clock of each call, after two that do not count."""
    once_ms = min(_wall_ms(fn), _wall_ms(fn))
    runs = max(min_runs, int(rep_ms / max(once_ms, 1e-6)))
    return Timing(tuple(_wall_ms(fn) for _ in range(runs)))


def time_interleaved(providers: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Wall clock, ``A B C A B C ...``: drift of the machine hits all alike. One round before them does not count."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for fn in providers.values():
        fn()
    for _ in range(rounds):
        for name, fn in providers.items():
            samples[name].append(_wall_ms(fn))
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def check_then_time(fn: Callable[[], Tensor], check: Check, device: str) -> tuple[float, Timing, float | None]:
    """Error, timing and peak memory in MB (GPU only) of ``fn``; raises WrongResultError before timing a wrong one."""
    error = check(fn())
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timing = time_provider(fn, device)
    return error, timing, torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None


def _wall_ms(fn: Callable[[], Any], synchronize: Callable[[], None] = lambda: None) -> float:
    synchronize()
    start = time.perf_counter()
    fn()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def _round(value: Any) -> Any:
    """Four significant digits: more would only be noise in a tracked file. JSON has no infinity and no NaN."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _number(value: Any) -> Any:
    """The inverse of ``_round`` for what JSON has no number for."""
    return float(value) if value in ("inf", "-inf", "nan") else value


def _dump(document: dict[str, Any]) -> str:
    """JSON with one key or record to a line, so that a difference between two runs can be read."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items() if key != "records"]
    rows = ",\n".join(f"  {json.dumps(record)}" for record in document["records"])
    return "{\n" + ",\n".join([*lines, f' "records": [\n{rows}\n ]']) + "\n}\n"


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
