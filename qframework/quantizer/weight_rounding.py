"""Weight rounding that uses calibration data: GPTQ (Frantar et al. 2022) on the INT8 grid of each weight's observer.

Rounding every weight of ``W (N, K)`` to the nearest multiple of its scale ignores that inputs are correlated. GPTQ
minimizes the error of the output over calibration data instead, ``|W X - W' X|^2`` with ``X (K, samples)``: it rounds
one column after another, and the columns still in float compensate for each error (Algorithm 1)::

    H = X X^T + damping * mean(diag(X X^T)) * I           U = upper Cholesky factor of H^-1
    for each column j:   e = (w_j - round(w_j)) / U_jj ;   w_l -= e * U_jl for every l > j

The grid remains that of min-max or MSE, so that ``convert_pt2e`` yields exactly the integers chosen here, and the
converted model costs nothing more. Columns are processed in descending order of ``diag(H)``. A row is used only if its
output error ``(w - w') H (w - w')`` is smaller than with nearest rounding, which greedy rounding does not guarantee.

torchao's GPTQ (``torchao.prototype.gptq``) is not used: it replaces the weights of ``nn.Linear`` by quantized tensor
subclasses with their own scales and runs on CUDA only, whereas a prepared PT2E graph has attributes and observers.
AdaRound (Nagel et al. 2020) optimizes the same objective by gradient descent, at many times the cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.errors import CalibrationError
from qframework.graph.attributes import attribute, replace_attribute
from qframework.numerics import QMAX, QMIN, dequantize, exact_matmul, quantize
from qframework.quantizer.config import check_choice
from qframework.quantizer.layerwise import LayerwiseRun, ObservedLinear, quantized_linears, take_batches

WeightRounding = Literal["gptq"]
DAMPING = 0.01
_BLOCK = 128  # columns whose errors are propagated to later columns in one matrix product


def round_weights(
    prepared: GraphModule,
    data: Iterable[Any],
    *,
    method: WeightRounding = "gptq",
    batches: int | None = None,
    centered: bool = False,
) -> None:
    """Round the weights of all quantized linears of a calibrated model, in place.

    Each layer is rounded with the quantized inputs that the layers before it compute with rounded weights. Rows of
    float16 and bfloat16 weights stay unchanged where their dtype cannot represent the rounded values well enough.

    Args:
        prepared: from ``prepare_pt2e``, after ``calibrate``.
        data: batches as ``calibrate`` takes them; all of them stay in memory until the end.
        method: ``"gptq"``.
        batches: use only this many of them.
        centered: disregard errors of the mean output, which ``correct_bias`` removes afterwards; the weights then fit
            what varies. Inputs far from zero gain most.

    Raises:
        UnsupportedError: for another method.
        CalibrationError: no data, a batch that does not fit the model's inputs, an activation that was never
            calibrated, or inputs of a layer that hold NaN or infinity.
    """
    check_choice("round_weights", "method", method, ("gptq",))
    inputs = take_batches(prepared, data, batches, "round_weights")
    linears = quantized_linears(prepared)
    last_call = {linear.observed: linear.node for linear in linears}
    hessians = _Hessians(LayerwiseRun(prepared, inputs, quantized=True), centered)
    for linear in linears:
        hessians.add(linear)
        if linear.node is last_call[linear.observed]:  # linears that share one weight are rounded together
            _round(prepared, linear, hessians.pop(linear))
    prepared.recompile()


def gptq(weight: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    """Round ``weight (N, K)`` to int8 multiples of ``scale`` by GPTQ, without comparing to nearest rounding.

    Args:
        weight: any float dtype.
        scale: float32 ``(N, 1)`` or ``(1, 1)``.
        hessian: ``X X^T`` of the layer's inputs, ``(K, K)`` float64.
    """
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    upper = _inverse_factor(hessian[order][:, order])
    step = scale.double().reshape(-1)
    columns = weight.double().T[order].contiguous()  # (K, N): a column of the weight is a row in memory
    q = torch.empty_like(columns)
    for start in range(0, len(columns), _BLOCK):
        end = min(start + _BLOCK, len(columns))
        errors = torch.empty_like(columns[start:end])
        inside = upper[start:end, start:end]
        for j in range(end - start):
            column = columns[start + j] - inside[:j, j] @ errors[:j]
            q[start + j] = torch.round(column / step).clamp(QMIN, QMAX)
            errors[j] = (column - q[start + j] * step) / inside[j, j]
        columns[end:] -= upper[start:end, end:].T @ errors
    return torch.empty_like(q).index_copy_(0, order, q).T.to(torch.int8)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper triangular ``U`` with ``U^T U`` the inverse of the damped Hessian.

    With rows and columns reversed, ``H = R R^T`` for an upper triangular R, and ``U = R^-1``, which avoids inverting H.
    """
    one = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    # inputs may be zeros, or so small that float32 rounds their squares to a few bits
    damped = hessian + one * (DAMPING * hessian.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny)
    factor = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(factor, one, upper=True)


class _Hessians:
    """``X X^T`` of each weight's inputs, summed over batches and over the linears that share the weight.

    ``centered``: of the inputs minus their mean.
    """

    def __init__(self, run: LayerwiseRun, centered: bool) -> None:
        self._run, self._centered = run, centered
        self._sums: dict[Node, Tensor] = {}
        self._input: Node | None = None
        self._latest: Tensor

    def add(self, linear: ObservedLinear) -> None:
        """Advance to a linear and count its inputs."""
        if linear.input is not self._input:  # the projections of queries, keys and values read one tensor
            self._run.advance(linear.node)
            self._input, self._latest = linear.input, self._product(linear)
        known = self._sums.get(linear.observed)
        self._sums[linear.observed] = self._latest if known is None else known + self._latest

    def _product(self, linear: ObservedLinear) -> Tensor:
        return _outer_product(self._run.values(linear.input), linear, self._centered)

    def pop(self, linear: ObservedLinear) -> Tensor:
        """The sum for the weight of a linear, ``(K, K)`` float64."""
        return self._sums.pop(linear.observed)


def _outer_product(inputs: Iterable[Tensor], linear: ObservedLinear, centered: bool) -> Tensor:
    """A sum of squares, not a difference of sums, of which constant inputs leave rounding errors without a factor."""
    total: Any = 0.0
    means, counts = [], []
    for x in inputs:
        rows = x.reshape(-1, x.shape[-1]).float()
        if centered and len(rows):
            means.append(rows.mean(0, dtype=torch.float64))
            counts.append(len(rows))
            rows = (rows - means[-1]).float()
        total = total + exact_matmul(rows.T, rows).double()
    if means:  # between batches
        each, weights = torch.stack(means), means[0].new_tensor(counts).unsqueeze(1)
        apart = (each - (each * weights).sum(0) / weights.sum()) * weights.sqrt()
        total = total + apart.T @ apart
    if not bool(torch.isfinite(total).all()):
        raise CalibrationError(f"layer {linear.observer.layer!r}: the inputs and their squares must be finite")
    return total


def _round(prepared: GraphModule, linear: ObservedLinear, hessian: Tensor) -> None:
    observer = linear.observer
    weight = attribute(prepared, linear.weight).detach() if observer.float_weight is None else observer.float_weight
    if weight.numel() == 0:
        return
    observer.check(weight)
    scale = observer.current_scale(weight)
    steps = scale.unsqueeze(-1)
    nearest, chosen = quantize(weight, steps), gptq(weight, steps, hessian)
    better = _row_errors(weight, chosen, steps, hessian) < _row_errors(weight, nearest, steps, hessian)
    q = torch.where(better.unsqueeze(1), chosen, nearest)
    rounded = dequantize(q, steps, weight.dtype)
    held = (quantize(rounded, steps) == q).all(1, keepdim=True)  # float16 cannot below its normal range
    replace_attribute(prepared, linear.weight, linear.observed, torch.where(held, rounded, weight))
    observer.keep_rounding(scale, weight)


def _row_errors(weight: Tensor, q: Tensor, steps: Tensor, hessian: Tensor) -> Tensor:
    """``(w - w') H (w - w')`` of each row, ``(N,)`` float64."""
    error = weight.double() - q.double() * steps.double()
    return ((error @ hessian) * error).sum(1)
