"""Adaptive quantization: measure every variant in every attention layer and keep the fastest that is accurate enough.

SageAttention section 4.5 chooses vB or vT where their cosine similarity with float attention exceeds 99.8 percent. Here
all variants that may be fast are candidates. On a GPU their times decide which is fastest, and PyTorch's attention is
a candidate too, as ``"off"``. Layers in which no variant passes stay in float.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qframework.arguments import check_batches, check_module, check_number_of_batches, described, no_data
from qframework.attention.choice import AttentionChoice
from qframework.attention.layer_choice import OFF, LayerChoice, passes
from qframework.attention.layer_scope import join_name, split_name
from qframework.attention.measure import Clock, RecordedLayer, Recorder, named_calls
from qframework.attention.model_inputs import call_model
from qframework.attention.speed import median_seconds
from qframework.batches import device_of, move, progress_bar
from qframework.compat import pytree
from qframework.compat.dynamo import is_compiled
from qframework.devices import checked_device
from qframework.errors import CalibrationError
from qframework.kernels.attention.variants import AttentionVariant, resolve

PAPER_ORDER = ("sage_vb", "sage_vt", "sage_b", "sage_t")
HOPPER_ORDER = ("integer_exp", "unquantized", "sage2_int8", "sage_b", "sage_vb", "sage_t", "sage_vt")


def speed_order(device: torch.device | str) -> tuple[str, ...]:
    """The variants to try on a device, the one expected to be fastest first.

    On a GPU ``calibrate_attention`` measures which is. The paper's order is vB, vT, B, T. On Hopper the order is that
    of long sequences on an H100, where INT8 values are slower than 16 bit. On other chips with FP8 SageAttention2 comes
    first. Where FP16 accumulation doubles the rate of FP8 (compute capability 8.9 and 12), SageAttention2++ does, and
    SageAttention2, whose P V runs at half the rate of INT8, comes after the INT8 variants. On Hopper and data-center
    Blackwell SageAttention2++ gains nothing and is left out, as is INT4, which Triton multiplies as INT8. Pass
    ``variants`` to try others or another order.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return PAPER_ORDER
    return order_for(torch.cuda.get_device_capability(device))


def order_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """:func:`speed_order` of an NVIDIA chip."""
    if capability < (8, 9):
        return PAPER_ORDER
    if capability[0] == 9:
        return HOPPER_ORDER
    if capability[0] == 10:
        return ("sage2_int8", *PAPER_ORDER)
    return ("sage2pp_int8", "sage_vb", "sage_vt", "sage2_int8", "sage_b", "sage_t")


def calibrate_attention(
    model: nn.Module,
    data: Iterable[Any],
    threshold: float = 0.998,
    variants: Sequence[str | AttentionVariant] | None = None,
    *,
    max_relative_l1: float | None = None,
    max_rmse: float | None = None,
    batches: int | None = None,
    device: torch.device | str | None = None,
    forward: Callable[[nn.Module, Any], object] | None = None,
    progress: bool = True,
    verbose: bool = True,
    timed: bool | None = None,
) -> AttentionChoice:
    """Choose a variant for each attention layer of a float model (SageAttention section 4.5).

    ``data`` runs through the model in eval mode, without gradients, with its own attention. Each call of
    ``F.scaled_dot_product_attention`` is repeated with every variant on the same inputs, to compare the outputs. A
    layer takes the fastest variant that passes in all of its calls, or ``"off"``. The model does not change.

    On a GPU the fastest is what took the least time in the layer's calls, on their shapes and masks, among the variants
    and PyTorch's attention, which is ``"off"``. Times differ a little from run to run, and so may the choice between
    two that are about equally fast. Without times it is the first variant, and the result is deterministic.

    Args:
        model: any module whose attention is ``F.scaled_dot_product_attention`` (timm, ``nn.MultiheadAttention`` without
            weights, transformers with ``attn_implementation="sdpa"``) or a graph of ``torch.export``.
        data: an iterable of batches. A batch is a tensor, a mapping of keyword arguments, or a tuple or list, of which
            the model gets as many leading items as its forward requires (at least one), so that ``(images, labels)``
            works.
        threshold: cosine similarity that a variant must exceed to pass; the paper's is 0.998.
        variants: names, specs or variants, without times in order of speed; default: :func:`speed_order` of the device,
            with times ``unquantized`` and ``integer_exp`` too.
        max_relative_l1: largest relative L1 error with which a variant passes.
        max_rmse: largest RMSE with which a variant passes.
        batches: maximum number of batches; default: all of ``data``.
        device: where to run; the model is moved there. Default: the model's device.
        forward: called as ``forward(model, batch)``, with the batch on the device, instead of the rules above, e.g. to
            run ``model.generate``.
        progress: show a progress bar if standard error is a terminal.
        verbose: print a table of the result.
        timed: whether to measure times, which needs a GPU; by default it does where the model runs on one.

    Returns:
        The choice, with all measurements; each number is the worst over all calls of the layer.

    Raises:
        CalibrationError: no data, no attention, invalid criteria or variants, a batch that does not match the model, or
            NaN or infinity in a batch or in an attention layer.
        UnsupportedError: an unknown variant.
    """
    criteria = _criteria(threshold, max_relative_l1, max_rmse)
    check_module(model, "calibrate_attention: model")
    check_batches(data, "calibrate_attention")
    check_number_of_batches(batches)
    if forward is not None and not callable(forward):
        raise CalibrationError(f"calibrate_attention: forward must be None or a function, got {forward!r}")
    if is_compiled(model):
        raise CalibrationError(
            "calibrate_attention: model must not be compiled, got a compiled one. Pass the original model"
        )
    target = checked_device(device, "calibrate_attention: device") if device is not None else device_of(model)
    if device is not None:
        model.to(target)
    clock = _clock(timed, target)
    candidates = _checked_variants(variants, target)
    if variants is None and clock is not None:
        candidates = (*candidates, *(name for name in ("unquantized", "integer_exp") if name not in candidates))
    recorder = Recorder(candidates, clock)
    bar = progress_bar("measuring attention", data, batches, progress)
    with torch.no_grad(), _eval_mode(model), named_calls(model, recorder), bar as advance:
        seen = 0
        for batch in islice(iter(data), batches):
            _record(model, move(batch, target), recorder, forward or call_model, seen)
            seen += 1
            advance()
    if seen == 0:
        raise no_data("calibrate_attention", data)
    _check_seen(model, recorder)
    choice = _choose(recorder, criteria, _paths(model))
    if verbose:
        _print(choice)
    return choice


def _record(
    model: nn.Module, batch: Any, recorder: Recorder, forward: Callable[[nn.Module, Any], object], number: int
) -> None:
    """Measure every attention of the model on one batch; errors name its number."""
    _check_finite_inputs(batch, number)
    try:
        with recorder:
            forward(model, batch)
    except CalibrationError as error:
        raise CalibrationError(_with_batch(error, number)) from error


def _choose(recorder: Recorder, criteria: Mapping[str, float], paths: Mapping[str, list[str]]) -> AttentionChoice:
    layers: dict[str, LayerChoice] = {}
    for name, layer in recorder.layers.items():
        chosen = _chosen(layer, criteria)
        path, index = split_name(name)
        layers |= {join_name(other, index): chosen for other in paths.get(path, [path])}
    return AttentionChoice(layers, criteria)


def _chosen(layer: RecordedLayer, criteria: Mapping[str, float]) -> LayerChoice:
    measured = layer.fastest_first()
    passing = [name for name, numbers in measured.items() if passes(numbers, criteria)]
    return LayerChoice(passing[0] if passing else OFF, layer.calls, layer.query, layer.keys, measured)


def _clock(timed: bool | None, device: torch.device | None) -> Clock | None:
    """What measures times on ``device``, or None. Raises CalibrationError."""
    on_gpu = device is not None and device.type == "cuda"
    if timed and not on_gpu:
        raise CalibrationError(
            f"calibrate_attention: timed must be None or False where the model runs on a CPU, got True on {device}"
        )
    return median_seconds if timed or (timed is None and on_gpu) else None


def _paths(model: nn.Module) -> dict[str, list[str]]:
    """All paths of each module, by its first path; graphs name a shared module after the path of the call."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return {names[0]: names for names in paths.values()}


def _criteria(threshold: float, max_relative_l1: float | None, max_rmse: float | None) -> dict[str, float]:
    if not 0.0 < threshold < 1.0:
        raise CalibrationError(
            f"calibrate_attention: threshold must be a cosine similarity between 0 and 1, got {threshold}"
        )
    criteria = {"threshold": float(threshold)}
    for name, bound in (("max_relative_l1", max_relative_l1), ("max_rmse", max_rmse)):
        if bound is None:
            continue
        if not (bound > 0.0 and math.isfinite(bound)):
            raise CalibrationError(f"calibrate_attention: {name} must be None or a positive number, got {bound}")
        criteria[name] = float(bound)
    return criteria


def _checked_variants(
    variants: Sequence[str | AttentionVariant] | None, device: torch.device | None
) -> tuple[str, ...]:
    if variants is None:
        return speed_order(device or "cpu")
    if isinstance(variants, str) or not isinstance(variants, Sequence) or not variants:
        raise CalibrationError(f"calibrate_attention: variants must be None or a list of names, got {variants!r}")
    unknown = [each for each in variants if not isinstance(each, str | AttentionVariant)]
    if unknown:
        raise CalibrationError(
            f"calibrate_attention: variants must be names or AttentionVariants, got {described(unknown[0])}"
        )
    names = tuple(variant if isinstance(variant, str) else variant.spec for variant in variants)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CalibrationError(f"calibrate_attention: variants must be different, got {', '.join(twice)} twice")
    for name in names:
        resolve(name)
    return names


def _check_finite_inputs(batch: Any, index: int) -> None:
    for leaf in pytree.tree_leaves(batch):
        # -inf may stand in an additive attention mask
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool((leaf < math.inf).all()):
            raise CalibrationError(f"batch {index}: inputs must be finite, got NaN or infinity")


def _check_seen(model: nn.Module, recorder: Recorder) -> None:
    if not recorder.layers:
        raise CalibrationError(
            f"calibrate_attention: model must call F.scaled_dot_product_attention, got {type(model).__name__}, which "
            "never does. timm: turn fused attention on; transformers: attn_implementation='sdpa'; "
            "nn.MultiheadAttention: need_weights=False"
        )


def _with_batch(error: CalibrationError, index: int) -> str:
    message = str(error)
    return message if message.startswith("batch ") else f"batch {index}: {message}"


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch every module to eval mode and back; exported graphs have no mode."""
    training = [] if isinstance(model, GraphModule) else [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _print(choice: AttentionChoice) -> None:
    from rich.console import Console

    Console().print(choice.table())
