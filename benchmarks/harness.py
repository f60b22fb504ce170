"""The record format of all benchmarks, and the checks before timing: a wrong result is never timed.

A result file is ``{"schema", "benchmark", "smoke", "machine", "peaks", "records"}`` with an optional ``"note"``. A
record holds what ran (``op`` and ``shape``, or ``model`` and ``batch``; ``provider``, ``dtype``), its time (``p20_ms,
p50_ms, p80_ms`` over ``runs`` samples), the rate at the median, accuracy and memory. ``status`` is ``ok`` or the reason
for no time: with ``wrong`` and ``failed`` the benchmark exits with 1, with ``timeout`` and ``unsupported`` it does not.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.machine import describe_machine
from qframework.errors import FileFormatError, QFrameworkError
from qframework.files import write_text
from qframework.outputs import output_file

SCHEMA = 1
BROKEN = ("wrong", "failed")
THIRD_PARTY = ("sageattention", "torchao")  # their failures do not fail the benchmark
# Unit roundoff: the largest relative error of one rounding to the format.
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

Check = Callable[[Tensor], float]
"""Takes a provider's output; returns its relative error or raises WrongResultError."""


class WrongResultError(QFrameworkError):
    """A provider's result differs from the oracle; ``error`` is its relative error."""

    def __init__(self, message: str, error: float = float("inf")) -> None:
        super().__init__(message)
        self.error = error


class UnavailableError(QFrameworkError):
    """This machine or this version of a library lacks something that a provider needs."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row. Absent values are None and are left out of the file."""

    benchmark: str
    provider: str
    run: int | None = None  # 2 for the second run in one file; absent for the first
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
    kernels_ms: float | None = None  # of a call, the time of all its GPU kernels: without the host's
    tflops: float | None = None
    gbps: float | None = None
    images_per_second: float | None = None
    percent_of_peak: float | None = None
    peak_mb: float | None = None
    activation_mb: float | None = None  # kept from forward to backward
    cache_mb: float | None = None  # keys and values of earlier tokens
    gather_mb: float | None = None  # MiB of weights that a process has after the all-gathers of a step
    reduce_mb: float | None = None  # MiB of gradients that it gives to the reduce-scatters of a step
    error: float | None = None  # relative L2 error against the FP64 or FP32 oracle on the operands the provider sees
    quantization_error: float | None = None  # relative L2 error against the product of the float operands
    relative_l1: float | None = None  # against float attention
    sqnr_db: float | None = None
    worst_sqnr_db: float | None = None  # the image with the lowest
    prepare_s: float | None = None  # export, calibrate, convert
    first_call_s: float | None = None  # compilation included
    compile_s: float | None = None  # of the first call, the phase compile_inner of PyTorch
    spread: float | None = None  # of several rounds or runs, 1 - fastest / slowest time

    def to_json(self) -> dict[str, Any]:
        return {key: _round(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """The record that ``to_json`` wrote."""
        finite: dict[str, Any] = {key: _number(value) for key, value in fields.items()}
        return cls(**finite)

    @property
    def key(self) -> tuple[Any, ...]:
        """The measured case, equal for the same provider and subject in all runs."""
        return self.benchmark, self.op, self.provider, tuple(self.shape or ()), self.causal, self.model, self.batch

    @property
    def subject(self) -> str:
        """The shape, or the model and its batch."""
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
        took = "" if self.p50_ms is None else f"{self.p50_ms:10.3f} ms "
        first = "" if self.first_call_s is None else f"  first call {self.first_call_s:.3g} s"
        return f"{head} {took}{rate}{error}{first}"


@dataclass
class Results:
    """The records of one run; the file is rewritten after every record, so an interrupted run keeps its records."""

    benchmark: str
    machine: dict[str, Any]
    path: Path | None = None
    smoke: bool = False
    peaks: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    note: str | None = None  # added by hand, shown on the page
    run: int | None = None  # the number of this run in the file; None for the first

    @classmethod
    def start(cls, benchmark: str, device: str, arguments: argparse.Namespace) -> Results:
        """Results for ``arguments`` of ``argument_parser``: empty, or with the runs in the file."""
        results = cls(benchmark, describe_machine(device), arguments.output, arguments.smoke)
        if arguments.add_run and results.path is not None and results.path.exists():
            results.follow(cls.load(results.path))
        return results

    def follow(self, old: Results) -> None:
        """Keep the records of ``old`` and number new ones as the next run; see require_same_code."""
        require_same_code(old, self)
        self.records, self.note, self.peaks = list(old.records), old.note, old.peaks
        self.run = 1 + max((record.run or 1 for record in old.records), default=0)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file of ``write``. Raises FileFormatError for other files."""
        try:
            document = json.loads(path.read_text())
            if document["schema"] != SCHEMA:
                raise FileFormatError(f"{path}: schema must be {SCHEMA}, got {document['schema']!r}")
            records = [Record.from_json(fields) for fields in document["records"]]
            head = document["benchmark"], document["machine"], path, document["smoke"], document["peaks"]
            return cls(*head, records, document.get("note"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise FileFormatError(f"{path} is not a result file of benchmarks.harness: {error!r}") from error

    def attempt(self, identity: Record, measure: Callable[[], Record]) -> None:
        """Add the record that ``measure`` returns, or a record of its error."""
        self.add(guarded(identity, measure))

    def add(self, *records: Record) -> None:
        """Append, print and write."""
        for record in records:
            self.records.append(replace(record, run=self.run))
            print(record, flush=True)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        write_text(self.path, _dump(self.to_json()))

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
        """1 if a provider other than THIRD_PARTY failed or was wrong in this run, else 0."""
        mine = [record for record in self.records if record.run == self.run]
        return int(any(record.status in BROKEN and not record.provider.startswith(THIRD_PARTY) for record in mine))


def require_same_code(old: Results, new: Results) -> None:
    """Raise FileFormatError unless both runs used the same committed code on the same machine."""
    if new.machine.get("dirty"):
        raise FileFormatError(f"{new.path}: the code must be committed, got a tree with local changes")
    apart = [key for key in new.machine if key != "date" and old.machine.get(key) != new.machine[key]]
    if apart or (old.benchmark, old.smoke) != (new.benchmark, new.smoke):
        differences = ", ".join(f"{key} {old.machine.get(key)!r} and {new.machine[key]!r}" for key in apart)
        raise FileFormatError(
            f"{new.path}: both runs must be of the same benchmark, code and machine, got "
            f"{differences or 'another benchmark'}"
        )


def guarded(identity: Record, measure: Callable[[], Record]) -> Record:
    """The record that ``measure`` returns, or ``identity`` with the status and reason of its error."""
    try:
        return measure()
    except WrongResultError as error:
        return replace(identity, status="wrong", reason=str(error), error=error.error)
    except UnavailableError as error:
        return replace(identity, status="unsupported", reason=str(error))
    except Exception as error:  # noqa: BLE001  a failure is a row of the table
        return replace(identity, status="failed", reason=_one_line(error))


def argument_parser(
    benchmark: str, description: str | None, output: Literal["records", "document", "none"] = "records"
) -> argparse.ArgumentParser:
    """The options of every benchmark: ``--smoke``; ``--output`` unless it is "none"; ``--add-run`` with records."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="a quick check with tiny sizes")
    if output != "none":
        parser.add_argument(
            "--output", type=output_file, metavar="FILE.json", help="where to write results (default: print only)"
        )
    if output == "records":
        parser.add_argument(
            "--add-run", action="store_true", help="add a run to those in --output, of the same code and machine"
        )
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option ``--device``: CUDA where there is a GPU."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")


def integers(text: str) -> list[int]:
    """An argparse type: positive integers separated by commas."""
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must hold positive integers, got {text!r}")
    return numbers


def shapes_of(dimensions: str) -> Callable[[str], list[Any]]:
    """An argparse type: shapes separated by spaces, each with these ``dimensions``, such as ``"M,N,K"``."""

    def parse(text: str) -> list[Any]:
        shapes = [tuple(integers(part)) for part in text.split()]
        for shape in shapes:
            if len(shape) != dimensions.count(",") + 1:
                raise argparse.ArgumentTypeError(f"a shape must be {dimensions}, got {','.join(map(str, shape))}")
        return shapes

    return parse


def comma_separated(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: names separated by commas, each one of ``known``."""
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"must be chosen from {', '.join(names)}, got {', '.join(unknown)}")
        return chosen

    return parse


# Checks -------------------------------------------------------------------------------------------------------------


def relative_error(value: Tensor, reference: Tensor) -> float:
    """``||value - reference|| / ||reference||`` in FP64 over the whole tensor; inf if ``value`` holds NaN."""
    difference = (value.double() - reference.double()).norm()
    error = float(difference / reference.double().norm().clamp(min=torch.finfo(torch.float64).tiny))
    return error if not math.isnan(error) else float("inf")


def worst_row_error(value: Tensor, reference: Tensor) -> float:
    """The largest ``relative_error`` of a row (last dimension), which detects a single wrong row."""
    value, reference = value.double(), reference.double()
    norms = reference.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    error = float(((value - reference).norm(dim=-1) / norms).amax())
    return error if not math.isnan(error) else float("inf")


def require_shape(value: Tensor, reference: Tensor) -> None:
    if value.shape != reference.shape:
        raise WrongResultError(f"shape must be {tuple(reference.shape)}, got {tuple(value.shape)}")


def rows_within(oracle: Callable[[], Tensor], tolerance: float) -> Check:
    """Check that every row's relative L2 error is at most ``tolerance``; ``oracle`` computes the FP64 result."""

    def check(value: Tensor) -> float:
        reference = oracle()
        require_shape(value, reference)
        worst = worst_row_error(value, reference)
        if worst > tolerance:
            raise WrongResultError(
                f"relative error of the worst row must be at most {tolerance:.3g}, got {worst:.3g}", worst
            )
        return relative_error(value, reference)

    return check


def require_quantized(error: float, least: float) -> float:
    """``error``; raises WrongResultError if it is too small for INT8, because nothing was quantized."""
    if error < least:
        raise WrongResultError(
            f"not quantized: INT8's relative error must be {least:.3g} or more, got {error:.3g}", error
        )
    return error


def elements_within(oracle: Callable[[], Tensor], bound: Callable[[Tensor], Tensor]) -> Check:
    """Check that every element is within ``bound(reference)`` of the FP64 ``oracle``."""

    def check(value: Tensor) -> float:
        reference = oracle()
        require_shape(value, reference)
        excess = (value.double() - reference).abs() > bound(reference)
        outside = int((excess | value.isnan()).sum())
        if outside:
            message = f"elements must be within rounding of FP64, but {outside} of {value.numel()} are not"
            raise WrongResultError(message, worst_row_error(value, reference))
        return relative_error(value, reference)

    return check


def exactly(oracle: Callable[[], Tensor]) -> Check:
    """Check that every element equals the FP64 ``oracle``."""
    return elements_within(oracle, torch.zeros_like)


def one_step_apart(oracle: Callable[[], Tensor], fraction: float) -> Check:
    """Check that INT8 values equal the rounded ``oracle``, or are one step off (a tie) on at most ``fraction``."""

    def check(value: Tensor) -> float:
        reference = oracle()
        require_shape(value, reference)
        steps = (value.double() - reference).abs()
        apart = float((steps > 0).double().mean())
        if not float(steps.amax()) <= 1 or apart > fraction:  # also NaN
            message = (
                f"elements may differ by at most 1 step, on at most {fraction:g} of them, "
                f"got up to {float(steps.amax()):g} steps on {apart:.3g}"
            )
            raise WrongResultError(message, worst_row_error(value, reference))
        return relative_error(value, reference)

    return check


# Files ---------------------------------------------------------------------------------------------------------------


def _round(value: Any) -> Any:
    """Round to four significant digits; infinity and NaN, which JSON lacks, become strings."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _number(value: Any) -> Any:
    """The inverse of ``_round`` for infinity and NaN."""
    return float(value) if value in ("inf", "-inf", "nan") else value


def _dump(document: dict[str, Any]) -> str:
    """JSON with one key or record per line, for readable diffs."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items() if key != "records"]
    rows = ",\n".join(f"  {json.dumps(record)}" for record in document["records"])
    return "{\n" + ",\n".join([*lines, f' "records": [\n{rows}\n ]']) + "\n}\n"


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = 2 if lines and lines[0].endswith(":") else 1  # Dynamo names the backend before its error
    return f"{type(error).__name__}: {' '.join(lines[:first])}"[:300]
