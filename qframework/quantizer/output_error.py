"""The error of a model's output when some or all of its linears are quantized, measured on a float graph.

The graph runs without preparation: linears are computed from quantized operands where asked for. So steps of a recipe
that rewrite the float graph are judged by what they are for, and undone if they do not help.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat import pytree
from qframework.errors import CalibrationError
from qframework.graph.nodes import fake_value, linear_call
from qframework.graph.writes import writes_in_place
from qframework.numerics import dequantize, dynamic_scale, quantize
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.calibration import Batch, flat_inputs, run_batches
from qframework.quantizer.config import LinearConfig
from qframework.quantizer.observers import WeightObserver, activation_observer
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name
from qframework.quantizer.static_observer import StaticObserver

_EXAMPLES = 8
# The relative squared error of a token that counts as none.
_EXACT = 1e-12
# A token counts as at least this share of the mean squared size.
_SMALLEST_TOKEN = 0.01
# The share of tokens that are the worst ones, and how many times as large their squared error may become: which ones
# they are changes with every rounding, so that a smaller factor would be noise.
_WORST = 0.02
_WORSE = 2.0


class Errors(NamedTuple):
    """How wrong an output is.

    What clipping does to a few tokens is hidden in the typical error, and a decoder may attend to just these.

    Attributes:
        typical: ``typical_error``.
        worst: the mean of the largest fiftieth of ``token_errors``, of at least one token.
    """

    typical: float
    worst: float

    def ruins_few(self, others: Errors) -> bool:
        """Whether the worst tokens are more than twice as wrong as those of ``others``, or not finite."""
        return not self.worst <= _WORSE * others.worst


class OutputError:
    """Judges float graphs of one function by the error of their quantized output on a few examples.

    Args:
        exported: the graph, whose output now is the reference.
        quantizer: says which linears are quantized, and how. Attention stays in float.
        data: calibration batches as ``calibrate`` takes them, from which static scales come.
        judged: the batches of which the first examples are judged.
        rounding: the share of the error of weights rounded to nearest that is left in the end.
        corrects_bias: whether biases will take the mean error that rounded weights cause.
    """

    def __init__(
        self,
        exported: GraphModule,
        quantizer: QFrameworkQuantizer,
        data: Iterable[Batch],
        judged: Iterable[Batch],
        *,
        rounding: float = 1.0,
        corrects_bias: bool = False,
    ) -> None:
        self._exported, self._quantizer, self._data = exported, quantizer, data
        self._rounding, self._corrects_bias = rounding, corrects_bias
        self.example = first_examples(exported, judged)
        self._expected = floats(Run(exported).start(self.example).finish({}))

    def measure(self) -> float:
        """``typical_error`` of the output with all linears quantized."""
        return self.errors().typical

    @torch.no_grad()
    def errors(self) -> Errors:
        """Both errors of the output with all linears quantized."""
        linears = self._linears()
        scales = self._observe(linears)
        run = Run(self._exported).start(self.example)
        for node, config in linears.items():
            run.advance(node)
            x, call = run.value(node.args[0]), linear_call(node)  # type: ignore[arg-type]
            assert call is not None
            weight = run.value(call.weight)
            steps = WeightObserver(layer_name(node), config.weight).broadcast_scale(weight)
            bias = None if call.bias is None else run.value(call.bias)
            dynamic = Parameters(dynamic_scale(x, config.activation.granularity))
            rows = fake_quantized(x, scales.get(node, dynamic))
            rounded = rounded_linear(rows, weight, Parameters(steps), bias, self._rounding, self._corrects_bias)
            run.skip(node, rounded)
        return errors_of(floats(run.finish({})), self._expected)

    def _linears(self) -> dict[Node, LinearConfig]:
        found = {}
        for node in self._exported.graph.nodes:
            config = self._quantizer.config_for(node) if is_linear(node) else None
            if isinstance(config, LinearConfig):
                found[node] = config
        return found

    def _observe(self, linears: dict[Node, LinearConfig]) -> dict[Node, Parameters]:
        """The static scales from all data."""
        keys = {node: (node.args[0], config.activation) for node, config in linears.items()}
        observers: dict[Any, Any] = {}
        for node, key in keys.items():
            if not key[1].dynamic and key not in observers:
                positions = _positions(node) if key[1].granularity == "per_token" else ()
                observers[key] = activation_observer(key[1], layer_name(node), positions)()
        watched: dict[Node, list[Any]] = {}
        for (x, _), observer in observers.items():
            watched.setdefault(x, []).append(observer)
        if watched:
            observe(self._exported, watched, self._data)
        return {
            node: Parameters.of(observers[key])
            for node, key in keys.items()
            if key in observers and observers[key].has_scale()
        }


def _positions(node: Node) -> tuple[int, ...]:
    fake = fake_value(node.args[0])  # type: ignore[arg-type]
    return () if fake is None else tuple(fake.shape[1:-1])


class Snapshot:
    """A float graph as it is now, to which ``restore`` returns. Steps replace parameters, not values."""

    def __init__(self, exported: GraphModule) -> None:
        self._exported = exported
        self._graph = copy.deepcopy(exported.graph)
        self._tensors: dict[str, Tensor] = dict(exported.named_parameters(remove_duplicate=False))
        self._tensors.update(exported.named_buffers(remove_duplicate=False))

    def restore(self) -> None:
        """Undo what happened to the graph since."""
        for name, tensor in self._tensors.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self._exported.get_submodule(owner), leaf, tensor)
        self._exported.graph = self._graph  # recompiles


def observe(
    exported: GraphModule, watched: dict[Node, list[Any]], data: Iterable[Batch], batches: int | None = None
) -> None:
    """Run ``data`` through a float graph and pass the values of nodes to observers.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an observed value.
    """
    run_batches(exported, _Observed(exported, watched), data, batches)


def first_examples(exported: GraphModule, data: Iterable[Batch], count: int = _EXAMPLES) -> list[Any]:
    """The inputs of the first examples of the first batch, or of all of it where the model has a fixed batch size."""
    batch = next(iter(data), None)
    if batch is None:
        raise CalibrationError("Recipe: data must have at least one batch, got none")
    inputs = flat_inputs(exported, batch, 0)
    if not takes_any_number(exported):
        return inputs
    return [each[:count] if isinstance(each, Tensor) and each.dim() > 0 else each for each in inputs]


def held_out(exported: GraphModule, data: Iterable[Batch], batches: int | None) -> tuple[list[Batch], list[Batch]]:
    """The data split into what steps are judged on, and what they are fitted to.

    This is the first batch and the others. A single batch is divided where the model takes any number of examples;
    otherwise the first list is empty.
    """
    taken = list(islice(iter(data), batches))
    if len(taken) != 1:
        return taken[:1], taken[1:]
    batch = dict(taken[0]) if isinstance(taken[0], Mapping) else taken[0]
    sizes = {each.shape[0] if each.dim() else 0 for each in pytree.tree_leaves(batch) if isinstance(each, Tensor)}
    if len(sizes) != 1 or max(sizes) < 2 or not takes_any_number(exported):
        return [], taken
    half = max(sizes) // 2
    first = pytree.tree_map_only(Tensor, lambda each: each[:half], batch)
    rest = pytree.tree_map_only(Tensor, lambda each: each[half:], batch)
    return [first], [rest]


def takes_any_number(exported: GraphModule) -> bool:
    """Whether the first dimension of every input may vary."""
    fakes = [fake_value(node) for node in exported.graph.find_nodes(op="placeholder")]
    tensors = [fake for fake in fakes if fake is not None and fake.dim() > 0]
    return bool(tensors) and not any(isinstance(fake.shape[0], int) for fake in tensors)


class _Observed(fx.Interpreter):
    """Passes values to observers."""

    def __init__(self, exported: GraphModule, watched: dict[Node, list[Any]]) -> None:
        super().__init__(exported)
        self._watched = watched

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for observer in self._watched.get(n, ()):
            observer.to(value.device)(value)
            if bool(observer.nonfinite()):
                raise CalibrationError(
                    f"{n.name}: the activation of layer {observer.layer!r} must be finite, got NaN or infinity"
                )
        return value


class Parameters(NamedTuple):
    """How values are quantized: a scale that broadcasts, and an int32 zero point, None for symmetric quantization."""

    scale: Tensor
    zero_point: Tensor | None = None

    @classmethod
    def of(cls, observer: StaticObserver) -> Parameters:
        """Those that an observer found."""
        return cls(observer.scale(), observer.zero_point())


def fake_quantized(x: Tensor, by: Parameters) -> Tensor:
    """``x`` quantized and dequantized, in its dtype."""
    scale, zero_point = by.scale.to(x.device), None if by.zero_point is None else by.zero_point.to(x.device)
    return dequantize(quantize(x, scale, zero_point), scale, x.dtype, zero_point)


def floats(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order."""
    return [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]


def token_errors(actual: list[Tensor], expected: list[Tensor]) -> Tensor:
    """The squared error of each token relative to its squared size, ``(n,)`` float64; without tokens that are zero.

    Tokens are the vectors along the last dimension, those of all outputs. They count alike: what reads a model's output
    mostly reads directions of tokens, and a few large ones would hide what happens to the others. A token counts as at
    least a hundredth of the mean size, since the direction of a tiny one means little.
    """
    found = []
    for a, b in zip(actual, expected, strict=True):
        size = token_sizes(b)
        wrong = (a.double() - b.double()).reshape(size.numel(), -1).square().sum(1)
        kept = size > 0
        found += [wrong[kept] / size[kept]] if kept.any() else []
    return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)


def token_sizes(expected: Tensor) -> Tensor:
    """What the squared error of each token of an output is relative to, ``(n,)`` float64; 0 for tokens of zeros."""
    size = expected.double().reshape(-1, expected.shape[-1] if expected.dim() else 1).square().sum(1)
    kept = size > 0
    return size.clamp(min=_SMALLEST_TOKEN * float(size[kept].mean())) * kept if kept.any() else size


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The mean of ``token_errors``, in which errors of different layers nearly add up; 0 without tokens."""
    errors = token_errors(actual, expected)
    return float(errors.mean()) if errors.numel() else 0.0


def typical_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The geometric mean of ``token_errors``; 0 without tokens.

    In a model with everything quantized, a few examples have errors ten times those of the others, and which ones these
    are changes with every rounding: a token just becomes an outlier, or does not. A sum would judge little else.
    """
    return errors_of(actual, expected).typical


def errors_of(actual: list[Tensor], expected: list[Tensor]) -> Errors:
    """Both errors of the outputs, one tensor or several; zeros without tokens."""
    errors = token_errors(actual, expected)
    if not errors.numel():
        return Errors(0.0, 0.0)
    worst = errors.topk(max(1, round(_WORST * errors.numel()))).values
    return Errors(float(errors.clamp(min=_EXACT).log().mean().exp()), float(worst.mean()))


def rounded_linear(
    rows: Tensor, weight: Tensor, by: Parameters, bias: Tensor | None, rounding: float, corrects_bias: bool
) -> Tensor:
    """A linear with ``rounding`` times the error of its weight rounded to nearest.

    With ``corrects_bias``, the bias takes the mean error of the output.
    """
    wrong = (fake_quantized(weight, by) - weight) * rounding
    output = nn.functional.linear(rows, weight + wrong, bias)
    return output - wrong @ rows.reshape(-1, rows.shape[-1]).mean(0) if corrects_bias else output


class Run:
    """A run of a graph that stops at nodes, from each of which it can be finished several times.

    Values are kept as long as a later node needs them, so a run holds what the model's forward holds.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._interpreter = fx.Interpreter(graph)
        self._nodes = list(graph.graph.nodes)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._dead = self._last_reads()
        self._clone = any(writes_in_place(node) for node in self._nodes)
        self._env: dict[Node, Any] = {}
        self._at = 0

    def start(self, inputs: list[Any]) -> Run:
        """From the values of the placeholders."""
        placeholders = (node for node in self._nodes if node.op == "placeholder")
        self._env = dict(zip(placeholders, inputs, strict=True))
        self._at = 0
        return self

    def advance(self, node: Node) -> None:
        """Run up to ``node``, without it."""
        self._at = self._run(self._env, self._index[node], {})[0]

    def value(self, node: Node) -> Any:
        """The value of a node that has run."""
        return self._env[node] if node in self._env else self._interpreter.fetch_attr(str(node.target))

    def skip(self, node: Node, value: Any) -> None:
        """Give ``node``, which is next, this value."""
        self._at = self._run(self._env, self._index[node] + 1, {node: value})[0]

    def finish(self, given: dict[Node, Any]) -> Any:
        """The graph's output, with the values of some nodes given; the run itself stays where it is."""
        env = dict(self._env)
        if self._clone:
            env = {node: pytree.tree_map_only(Tensor, torch.clone, value) for node, value in env.items()}
        return self._run(env, len(self._nodes), given)[1]

    def _run(self, env: dict[Node, Any], end: int, given: dict[Node, Any]) -> tuple[int, Any]:
        output = None
        for node in self._nodes[self._at : end]:
            if node.op == "output":
                output = map_arg(node.args[0], lambda each: env[each])
            elif node in given:
                env[node] = given[node]
            elif node.op != "placeholder":
                env[node] = self._call(node, lambda each: env[each])
            for dead in self._dead.get(node, ()):
                env.pop(dead, None)
        return end, output

    def _call(self, node: Node, value: Callable[[Node], Any]) -> Any:
        args: Any = map_arg(node.args, value)
        kwargs: Any = map_arg(node.kwargs, value)
        return getattr(self._interpreter, node.op)(node.target, args, kwargs)

    def _last_reads(self) -> dict[Node, list[Node]]:
        last: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(self._nodes):
            for read in [*node.all_input_nodes, node]:
                if read not in seen and read.op != "output":
                    seen.add(read)
                    last.setdefault(node, []).append(read)
        return last
