"""Errors at the output of a float graph that errors at linears' inputs make, by gradients instead of runs.

An error ``e`` of the input of a linear with the weight W changes the output by about ``J W e`` with the Jacobian J of
the output with respect to the linear's result. For random vectors v of independent elements with mean 0 and variance 1,

    E (v . J W e)^2 = |J W e|^2          v . J W e = (J^T v) W . e

and one backward pass from v gives ``J^T v`` for all linears at once. To run the rest of the model for each input and
candidate takes many times as long, so that few examples can be judged; and which of them are sensitive differs a lot.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node

from qframework.graph.nodes import linear_call
from qframework.quantizer.calibration import Batch, flat_inputs
from qframework.quantizer.output_error import floats, takes_any_number, token_sizes

logger = logging.getLogger(__name__)

# How often a graph had no gradients, by reason.
without_gradients: Counter[str] = Counter()
_EXAMPLES = 32
_PROBES = 2  # for each example
_SEED = 0
# Of all values of one example, which a backward pass needs.
_LARGEST_BYTES = 4 << 30

# Which only training tells from their input.
_DETACHES = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}

Errors = dict[str, float]
Changed = Callable[[Tensor], Mapping[str, Tensor]]


def errors_by_gradients(
    exported: GraphModule, data: Iterable[Batch], groups: Sequence[tuple[Sequence[Node], Changed]]
) -> list[Errors] | None:
    """Estimates of ``relative_error`` of the output for each way to change the input of each group of linears.

    Args:
        exported: the graph, whose parameters no gradient reaches.
        data: batches of examples; the mean over at most 32 is taken.
        groups: linears that read one tensor, and what gives its values after each change, by name.

    Returns:
        The errors by name for each group; None where the graph has no gradients or would need too much memory.
    """
    total: list[Errors] = [{} for _ in groups]
    count = 0
    generator = torch.Generator().manual_seed(_SEED)
    try:
        for inputs in itertools.islice(_examples(exported, data), _EXAMPLES):
            count += 1
            for sums, errors in zip(total, _of_one(exported, inputs, groups, generator), strict=True):
                for name, error in errors.items():
                    sums[name] = sums.get(name, 0.0) + error
    except RuntimeError as error:
        _note_without_gradients(error)
        return None
    return [{name: error / count for name, error in sums.items()} for sums in total]


def _examples(exported: GraphModule, data: Iterable[Batch]) -> Iterator[list[Any]]:
    """The inputs of single examples, or of whole batches where the model has a fixed batch size."""
    for index, batch in enumerate(data):
        inputs = flat_inputs(exported, batch, index)
        if not takes_any_number(exported):
            yield inputs
            continue
        for i in range(min(each.shape[0] for each in inputs if isinstance(each, Tensor) and each.dim())):
            yield [each[i : i + 1] if isinstance(each, Tensor) and each.dim() else each for each in inputs]


def _note_without_gradients(error: RuntimeError) -> None:
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    without_gradients[reason] += 1
    if without_gradients[reason] == 1:
        logger.warning(
            "qframework: inputs of linears are judged by runs of few examples, which takes longer, since gradients "
            "cannot estimate the error of the model's output: %s (logged once, counted in without_gradients)",
            reason,
        )


def _of_one(
    exported: GraphModule,
    inputs: list[Any],
    groups: Sequence[tuple[Sequence[Node], Changed]],
    generator: torch.Generator,
) -> list[Errors]:
    run = _Run(exported, [linear for linears, _ in groups for linear in linears])
    with torch.inference_mode(False), torch.enable_grad():
        outputs = [each for each in floats(run.run(*inputs, enable_io_processing=False)) if each.requires_grad]
        if not outputs:
            raise RuntimeError("no output depends on a linear")
        nodes = list(run.results)
        results = [run.results[node] for node in nodes]
        backs: list[dict[Node, Tensor]] = []
        for probe in range(_PROBES):
            vectors = [_vectors(each.detach(), generator) for each in outputs]
            more = probe < _PROBES - 1
            found = torch.autograd.grad(outputs, results, vectors, retain_graph=more, allow_unused=True)
            backs.append({node: each for node, each in zip(nodes, found, strict=True) if each is not None})
    tokens = sum(int((token_sizes(each.detach()) > 0).sum()) for each in outputs)
    return [_group_errors(run, linears, changed, backs, max(tokens, 1)) for linears, changed in groups]


def _group_errors(
    run: _Run, linears: Sequence[Node], changed: Changed, backs: list[dict[Node, Tensor]], tokens: int
) -> Errors:
    x = run.inputs[linears[0]]
    wrong = {name: value - x for name, value in changed(x).items()}
    errors = dict.fromkeys(wrong, 0.0)
    for back in backs:
        gradients = [back[node] @ run.weights[node] for node in linears if node in back]
        for name, each in wrong.items():
            effect = sum(float((gradient * each).double().sum()) for gradient in gradients)
            if not math.isfinite(effect):
                raise RuntimeError("gradients hold NaN or infinity")
            errors[name] += effect**2 / tokens / len(backs)
    return errors


def _vectors(output: Tensor, generator: torch.Generator) -> Tensor:
    """Random vectors that stand for errors relative to the size of each token."""
    sizes = token_sizes(output)
    scale = torch.where(sizes > 0, sizes.clamp(min=torch.finfo(sizes.dtype).tiny).rsqrt(), 0.0)
    rows = torch.randn(sizes.numel(), output.numel() // max(sizes.numel(), 1), generator=generator).to(output.device)
    return (rows * scale.unsqueeze(-1)).to(output.dtype).reshape(output.shape)


class _Run(fx.Interpreter):
    """A run of a graph that keeps inputs, weights and results of linears; the results have gradients."""

    def __init__(self, exported: GraphModule, linears: Sequence[Node]) -> None:
        super().__init__(exported)
        self._linears, self._bytes = frozenset(linears), 0
        self.inputs: dict[Node, Tensor] = {}
        self.weights: dict[Node, Tensor] = {}
        self.results: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if not isinstance(value, Tensor) or n.op in ("get_attr", "placeholder"):
            return value.detach() if isinstance(value, Tensor) else value
        self._bytes += value.nbytes
        if self._bytes > _LARGEST_BYTES:
            raise RuntimeError(f"an example needs more than {_LARGEST_BYTES >> 30} GiB")
        if n in self._linears:
            call = linear_call(n)
            assert call is not None
            self.inputs[n], self.weights[n] = (self.env[each].detach() for each in (call.input, call.weight))
            value = value if value.requires_grad else value.detach().requires_grad_()
            self.results[n] = value
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _DETACHES:
            return args[0]
        return super().call_function(target, args, kwargs)
