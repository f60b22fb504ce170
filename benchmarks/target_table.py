"""The targets of qframework as ratios of records of one run, and their outcomes.

A target compares the best of ``ours`` with the best of ``peers``, measured in the same run of the same file, case by
case (a subject, or an operation at one), and takes the geometric mean. ``must`` is required, ``aim`` is desired; they
are upper limits of a cost (time, memory) and lower limits of a speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.harness import Record
from benchmarks.int8_linear import LARGE_SHAPES, SMALL_SHAPES
from benchmarks.int8_linear_cases import FP8_TENSORWISE, Shape
from benchmarks.labels import label
from benchmarks.tables import speed, table

Measure = Literal["speed", "calls_per_ms", "p50_ms", "first_call_s", "peak_mb", "activation_mb"]


HOPPER = ("H100", "H200")  # the same processor; the H200 has faster memory


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target."""

    what: str
    against: str
    benchmark: str
    subjects: tuple[str, ...]
    ours: tuple[str, ...]
    peers: tuple[str, ...]  # all of them must have been tried
    also: tuple[str, ...] = ()  # optional peers, which count if measured
    measure: Measure = "speed"
    ops: tuple[str, ...] = ()  # each at every subject; empty: any op
    must: float | None = None
    aim: float | None = None
    devices: tuple[str, ...] = HOPPER  # parts of the names of the devices it applies to; empty: any device

    @property
    def is_cost(self) -> bool:
        return self.measure not in ("speed", "calls_per_ms")

    def is_for(self, device: str) -> bool:
        """Whether the target applies to the device of this name."""
        return not self.devices or any(name in device for name in self.devices)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Operation, empty for any, and subject of every case."""
        return [(op, subject) for op in self.ops or ("",) for subject in self.subjects]

    def case(self, record: Record) -> tuple[str, str]:
        """The case that ``record`` belongs to, if any."""
        return (record.op or "") if self.ops else "", record.subject

    def reached(self, ratio: float, limit: float | None) -> bool:
        return limit is not None and (ratio <= limit if self.is_cost else ratio >= limit)

    def best(self, records: Iterable[Record]) -> Record | None:
        """The fastest or cheapest record with a value."""
        valued = [record for record in records if self.value(record)]
        key = self.value
        return (min if self.is_cost else max)(valued, key=key, default=None)

    def value(self, record: Record) -> float:
        """The compared value; 0 if there is none."""
        if record.status != "ok":
            return 0.0
        if self.measure == "calls_per_ms":
            return 1 / record.p50_ms if record.p50_ms else 0.0
        return speed(record) if self.measure == "speed" else getattr(record, self.measure) or 0.0


@dataclass(frozen=True)
class Outcome:
    """A target's ratio in each run of a file, with the providers compared."""

    target: Target
    ratios: tuple[float, ...]  # one for each run
    which: tuple[str, ...]  # of ours, the best in some case
    rivals: tuple[str, ...]  # of the peers, the best in some case
    measured: int  # cases with a ratio in every run
    open: tuple[str, ...]  # peers without a value that may still get one: not measured, or timed out
    without: tuple[str, ...]  # peers without a value because they do not run or are wrong
    wrong: tuple[str, ...] = ()  # of ours, in cases where none of ours is right

    @property
    def worst(self) -> float:
        return max(self.ratios) if self.target.is_cost else min(self.ratios)

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    @property
    def is_complete(self) -> bool:
        """Whether no missing measurement can change the verdict: another peer cannot make a miss a success."""
        if self.wrong:
            return True
        missed = self.target.must is not None and not self.target.reached(self.worst, self.target.must)
        return self.measured == len(self.target.cases) and (missed or not self.open)

    @property
    def verdict(self) -> str:
        """PASS if every run meets the target with all subjects and peers, else what is missing."""
        target = self.target
        if self.wrong:
            return f"wrong: {', '.join(self.wrong)}"
        if target.must is None:
            return self._about_the_aim
        if not target.reached(self.worst, target.must):
            return f"short of {target.must:g} by {100 * abs(self.worst / target.must - 1):.2g} percent"
        if self.measured < len(target.cases):
            what = "operators" if target.ops else "shapes"
            return f"open: {self.measured} of {len(target.cases)} {what} measured"
        if self.open:
            return f"open: no figure of {', '.join(self.open)}"
        return "PASS, aim reached" if target.reached(self.worst, target.aim) else "PASS"

    @property
    def _about_the_aim(self) -> str:
        """Where nothing is promised."""
        aim = self.target.aim
        if aim is None:
            return ""
        if self.target.reached(self.worst, aim):
            return "aim reached"
        return f"short of the aim by {100 * abs(self.worst / aim - 1):.2g} percent"

    @property
    def range(self) -> str:
        """The mean, and the spread where there are several runs; empty where none has a ratio."""
        if not self.ratios:
            return ""
        if len(self.ratios) == 1:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({min(self.ratios):.3f} to {max(self.ratios):.3f} in {len(self.ratios)} runs)"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def evaluate(target: Target, records: Sequence[Record]) -> Outcome | None:
    """The outcome of ``target`` in one file's records; None where no subject has both ours, be it wrong, and a peer.

    A peer that a run has no value of counts with its best value of the file's other runs.
    """
    mine = [record for record in records if record.benchmark == target.benchmark]
    numbers = sorted({record.run or 1 for record in mine})
    runs = [[record for record in mine if (record.run or 1) == number] for number in numbers]
    with_peers = ([*run, *_peers_of_other_runs(target, run, mine)] for run in runs)
    compared = [pairs for pairs in (_compare(target, run) for run in with_peers) if pairs]
    wrong = tuple(dict.fromkeys(name for run in runs for name in _wrong(target, run)))
    if not compared and not wrong:
        return None
    pairs = [pair for run in compared for pair in run.values()]
    absent = {name: _why_absent(name, target, mine) for name in target.peers}
    return Outcome(
        target,
        tuple(geometric_mean([target.value(a) / target.value(b) for a, b in run.values()]) for run in compared),
        tuple(dict.fromkeys(ours.provider for ours, _ in pairs)),
        tuple(dict.fromkeys(peer.provider for _, peer in pairs)),
        min((len(run) for run in compared), default=0),
        tuple(name for name, why in absent.items() if why == "open"),
        tuple(f"{name} ({why})" for name, why in absent.items() if why not in ("", "open")),
        wrong,
    )


def _peers_of_other_runs(target: Target, run: Sequence[Record], file: Sequence[Record]) -> list[Record]:
    """The records of peers that ``run`` has no value of, in all runs of the file."""
    valued = {(record.provider, target.case(record)) for record in run if target.value(record)}
    peers = (record for record in file if record.provider in (*target.peers, *target.also))
    return [record for record in peers if (record.provider, target.case(record)) not in valued]


def _wrong(target: Target, run: Sequence[Record]) -> list[str]:
    """Our providers with wrong results, in cases where no other of ours is right."""
    names: list[str] = []
    for case in target.cases:
        ours = [record for record in run if record.provider in target.ours and target.case(record) == case]
        if target.best(ours) is None:
            names += [record.provider for record in ours if record.status == "wrong"]
    return names


def _compare(target: Target, run: Sequence[Record]) -> dict[tuple[str, str], tuple[Record, Record]]:
    """The best of ours and the best peer by case, if both exist."""
    pairs = {}
    for case in target.cases:
        records = [record for record in run if target.case(record) == case]
        ours = target.best(record for record in records if record.provider in target.ours)
        peer = target.best(record for record in records if record.provider in (*target.peers, *target.also))
        if ours and peer:
            pairs[case] = ours, peer
    return pairs


def _why_absent(peer: str, target: Target, records: Sequence[Record]) -> str:
    """Empty if ``peer``, or its form by blocks, has a value for every case, "open" if it may still get one, else its
    status.
    """
    cases = [record for record in records if target.case(record) in target.cases]
    by_blocks = {target.case(each) for each in cases if each.provider == f"{peer}_blocks" and target.value(each)}
    if by_blocks == set(target.cases):
        return ""
    seen = [record for record in cases if record.provider == peer]
    if {target.case(record) for record in seen} < set(target.cases):
        return "open"
    valueless = [record for record in seen if not target.value(record)]
    if any(record.status in ("timeout", "ok") for record in valueless):
        return "open"
    return valueless[0].status if valueless else ""


def rows(outcomes: Sequence[tuple[Target, Outcome | None, str]]) -> str:
    """A Markdown table of targets, their outcomes and their files."""
    header = ["what", "against", "must", "aim", "measured", "verdict", "which of ours", "best peers", "where"]
    lines = []
    for target, outcome, where in outcomes:
        sign = "at most " if target.is_cost else ""
        limits = [f"{sign}{limit:g}" if limit is not None else "" for limit in (target.must, target.aim)]
        found = ["", "not measured", "", "", ""]
        if outcome is not None:
            rivals = "; ".join([*map(label, outcome.rivals), *(f"without {label(name)}" for name in outcome.without)])
            found = [outcome.range, outcome.verdict, "; ".join(map(label, outcome.which)), rivals, where]
        lines.append([target.what, target.against, *limits, *found])
    return table(header, lines)


# The table ------------------------------------------------------------------------------------------------------------


def _subjects(shapes: Iterable[Shape]) -> tuple[str, ...]:
    return tuple(",".join(map(str, shape)) for shape in shapes)


def _linear(
    what: str, ours: str, against: str, peers: Iterable[str], shapes: Iterable[Shape], *limits: float
) -> Target:
    must, aim = limits or (None, None)
    return Target(
        what=f"INT8 GEMM, {what}",
        against=against,
        benchmark="int8_linear",
        subjects=_subjects(shapes),
        ours=(ours,),
        peers=tuple(peers),
        must=must,
        aim=aim,
    )


def _linear_targets() -> list[Target]:
    fp8, with_bias = tuple(FP8_TENSORWISE), tuple(name for name in FP8_TENSORWISE if "bias" in name)
    small = ("torch_bf16", "torch_int_mm", *fp8)
    measured: tuple[tuple[str, tuple[str, ...], Iterable[Shape]], ...] = (
        ("M >= 12608", with_bias, LARGE_SHAPES),
        ("M = 197 and 1576", ("torch_bf16", *with_bias), SMALL_SHAPES),
    )
    targets = []
    for words, ours in (("fp16 out", "qframework_static"), ("int8 out", "qframework_int8_out")):
        targets += [
            _linear(f"M >= 12608, {words}", ours, "cuBLAS FP8 tensor-wise", fp8, LARGE_SHAPES, 1.0, 1.1),
            _linear(f"M >= 12608, {words}", ours, "cuBLAS bf16 + bias", ("torch_bf16",), LARGE_SHAPES, 1.45, 1.6),
            _linear(f"M = 197 and 1576, {words}", ours, "best of bf16, FP8, _int_mm", small, SMALL_SHAPES, 1.0, 1.2),
        ]
        for m in (197, 1576):
            shapes = [shape for shape in SMALL_SHAPES if shape[0] == m]
            targets.append(_linear(f"M = {m}, {words}", ours, "best of bf16, FP8, _int_mm", small, shapes, 1.0, 1.2))
        for where, peers, of in measured:
            targets.append(_linear(f"{where}, {words}", ours, "the same with bias", peers, of))
    token = "qframework_per_token"
    targets.append(_linear("M >= 12608, per token, fp16 out", token, "cuBLAS FP8 tensor-wise", fp8, LARGE_SHAPES))
    for words, ours, peer in (
        ("residual, fp16 out", "qframework_residual", "scaled_mm_fp8_residual"),
        ("GELU, int8 out", "qframework_gelu_int8_out", "scaled_mm_fp8_gelu_fp8"),
    ):
        against = "cuBLAS FP8 and the same work in Inductor"
        targets.append(_linear(f"M >= 12608, {words}", ours, against, (peer,), LARGE_SHAPES, 1.1, 1.2))
    return targets


STATIC = tuple(
    f"qframework_static{form}"
    for form in ("", "_sage", "_int8_attention", "_graphs", "_sage_graphs", "_int8_attention_graphs")
)
DYNAMIC = tuple(f"qframework_dynamic{form}" for form in ("", "_sage", "_graphs", "_sage_graphs"))
BEFORE = ("_attention_off", "_attention_off_graphs")  # in older files, when "auto" quantized attention on Hopper
ANY_STATIC = (*STATIC, *(f"qframework_static{form}" for form in BEFORE))
ANY_DYNAMIC = (*DYNAMIC, *(f"qframework_dynamic{form}" for form in BEFORE))
FAST_16_BIT = ("fp16_compiled", "fp16_max_autotune")
TORCHAO_FP8 = ("torchao_fp8_rowwise", "torchao_fp8_tensorwise")
# FP16 under max-autotune is no required peer at batch 256: FP8 was 1.04 to 1.2 times as fast in every run with both.
ALSO = (
    "fp16", "fp16_max_autotune", "fp16_compiled_graphs", "torchao_int8_dynamic",
    *(f"{name}_{form}" for name in TORCHAO_FP8 for form in ("blocks", "max_autotune")),
)  # fmt: skip


def _model_targets(model: str, must: float, aim: float) -> list[Target]:
    """The targets of a vision transformer at batch 256; ``must`` and ``aim`` are those of static INT8."""
    subjects, what = (f"{model}, batch 256",), f"{model}, batch 256"

    def faster(mode: str, ours: tuple[str, ...], must: float, aim: float) -> Target:
        return Target(
            what=f"{what}, {mode}", against="best of FP16 compiled and torchao FP8", benchmark="vit_gpu",
            subjects=subjects, ours=ours, peers=("fp16_compiled", *TORCHAO_FP8), also=ALSO, must=must, aim=aim,
        )  # fmt: skip

    memory = Target(
        what=f"{what}, static, peak memory", against="FP16", benchmark="vit_gpu", subjects=subjects,
        ours=tuple(name for name in ANY_STATIC if "graphs" not in name), peers=("fp16", "fp16_compiled"),
        measure="peak_mb", must=0.75, aim=0.6,
    )  # fmt: skip
    return [faster("static", ANY_STATIC, must, aim), faster("dynamic", ANY_DYNAMIC, 1.1, 1.25), memory]


BASE, LARGE = "vit_base_patch16_224", "vit_large_patch16_224"
TARGETS: tuple[Target, ...] = (
    *_linear_targets(),
    *_model_targets(BASE, 2.0, 2.2),
    *_model_targets(LARGE, 1.7, 1.9),
    Target(
        what=f"{LARGE}, batch 256, static", against="FP32", benchmark="vit_gpu", subjects=(f"{LARGE}, batch 256",),
        ours=ANY_STATIC, peers=("fp32",), must=14.0, aim=16.0,
    ),
    Target(
        what=f"{BASE}, batch 1, latency under CUDA graphs", against="FP16 under CUDA graphs", benchmark="vit_gpu",
        subjects=(f"{BASE}, batch 1",), ours=tuple(name for name in ANY_STATIC if "graphs" in name),
        peers=("fp16_compiled_graphs",), also=("fp16_max_autotune",), measure="p50_ms", must=0.6, aim=0.5,
    ),
    Target(
        what=f"{BASE}, first call, static", against="FP16 torch.compile", benchmark="vit_first_call",
        subjects=(f"{BASE}, batch 256",), ours=("qframework_static",), peers=("fp16_compiled",),
        measure="first_call_s", must=0.6, aim=0.5,
    ),
    Target(
        what=f"{BASE}, first call, dynamic", against="FP16 torch.compile", benchmark="vit_first_call",
        subjects=(f"{BASE}, batch 256",), ours=("qframework_dynamic",), peers=("fp16_compiled",),
        measure="first_call_s",
    ),
    Target(
        what=f"{BASE}, batch 8, on a CPU, static", against="FP32 eager", benchmark="vit_cpu",
        subjects=(f"{BASE}, batch 8",), ours=("qframework_static",), peers=("fp32_eager",), must=2.5, devices=(),
    ),
    Target(
        what=f"{BASE}, batch 8, on a CPU, static", against="BF16 autocast under Inductor", benchmark="vit_cpu",
        subjects=(f"{BASE}, batch 8",), ours=("qframework_static",), peers=("bf16_autocast_inductor",), must=1.0,
        devices=(),
    ),
)  # fmt: skip
