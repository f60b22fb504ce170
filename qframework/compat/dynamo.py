"""What Dynamo and AOTAutograd attach to graphs and compiled models, and the guards that a backend may add.

The keys of a node's ``meta`` are Dynamo's own. ``check_hints`` warns once if a graph lacks them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.compat.missing import explained, gone, note_missing, optional

with explained():
    from torch._guards import TracingContext

    _ = torch.compiler._is_exporting_flag  # checked here instead of at every call

VALUE_KEYS = ("example_value", "val")  # under which Dynamo and torch.export record values
_BUFFERS = "_buffers["  # in the source of a buffer's placeholder: L['self']._modules['fc1']._buffers['x']


@explained()
def is_tracing() -> bool:
    """Whether Dynamo is compiling, as it is while it calls a backend."""
    return TracingContext.try_get() is not None


def is_exporting() -> bool:
    """Whether torch.export runs; Dynamo reads it while it traces.

    Dynamo of PyTorch 2.11 answers ``torch.compiler.is_exporting()`` with True in every compilation.
    """
    return torch.compiler._is_exporting_flag


def check_hints(gm: GraphModule) -> None:
    """Warn once about keys that Dynamo no longer writes; ignores graphs that it did not capture."""
    inputs = gm.graph.find_nodes(op="placeholder")
    if not inputs or not is_tracing():
        return
    tensors = [node for node in inputs if isinstance(recorded_value(node), Tensor)]
    buffers = [node for node in tensors if reads_buffer(node) and "tensor_dict" in node.meta]
    for key, found in (
        ("grapharg", any(_source(node) is not None for node in inputs)),
        ("example_value", any("example_value" in node.meta for node in inputs)),
        ("tensor_dict", not tensors or any("tensor_dict" in node.meta for node in tensors)),
        ("_dynamo_static_input_type", not buffers or any(map(is_static_input, buffers))),
    ):
        if not found:
            note_missing(key)


def recorded_value(node: Node) -> Any:
    """The value that tracing recorded for a node, with fake tensors; None if it recorded none."""
    return node.meta.get("example_value", node.meta.get("val"))


def value_key(node: Node) -> str:
    """The meta key of a node's recorded value, which nodes added beside it also use."""
    return "example_value" if "example_value" in node.meta else "val"


def record_value(node: Node, value: Any) -> None:
    """Record the value of a node added to a graph of Dynamo."""
    node.meta["example_value"] = value


def is_static_input(node: Node) -> bool:
    """Whether a placeholder stands for a module's buffer, or another tensor with a fixed address."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


def reads_buffer(node: Node) -> bool:
    """Whether a placeholder stands for a module's buffer; False if its source is unknown."""
    return _BUFFERS in (source_name(node) or "")


def source_name(node: Node) -> str | None:
    """An input's source in the user's code, ``L['self']._modules['fc1']._parameters['weight']``; None if unknown."""
    source = _source(node)
    return None if source is None else source.name


def is_attribute(node: Node) -> bool:
    """Whether an input is an attribute of an object, ``L['self'].scale``; False for arguments and unknown sources."""
    return "." in re.sub(r"'[^']*'", "", source_name(node) or "")


@explained()
def guard_identity(node: Node) -> None:
    """Make Dynamo recompile if the input that ``node`` stands for is another object; a no-op for attributes.

    Backends may add guards because Dynamo builds them afterwards.
    """
    source = _source(node)
    if source is not None and is_tracing():
        from torch._dynamo.guards import GuardBuilder, install_guard

        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _source(node: Node) -> Any:
    return getattr(node.meta.get("grapharg"), "source", None)


def add_source(gm: GraphModule, name: str) -> None:
    """Register a source for the buffer ``name`` that a backend adds to a graph of Dynamo: AOTAutograd requires it."""
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        with explained():
            from torch._dynamo.source import ConstantSource

        sources[name] = ConstantSource(name)
    elif is_tracing():
        note_missing("_param_name_to_source")


def original_module(model: Any) -> Any:
    """The module that was passed to ``torch.compile``; any other object is returned unchanged."""
    original = getattr(model, "_orig_mod", None)
    if original is None and type(model).__name__ == "OptimizedModule":
        with explained():
            return model._orig_mod
    return model if original is None else original


def is_compiled(model: Any) -> bool:
    """Whether ``model`` is a module compiled by ``torch.compile``."""
    return original_module(model) is not model


@explained()
def backend_arguments(compiled: Any, name: str) -> dict[str, Any] | None:
    """``mode=`` and ``options=`` of a compiled module; None if its backend is not called ``name``."""
    return arguments_of(compiled.dynamo_ctx.callback, name)  # Dynamo's own, which wraps that of torch.compile


@explained()
def arguments_of(callback: Any, name: str) -> dict[str, Any] | None:
    """``mode=`` and ``options=`` of a callback of Dynamo; None if its backend is not called ``name``."""
    found = []
    while callback is not None:
        found.append(callback)
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    if len(found) == 1:
        raise gone("_torchdynamo_orig_backend")
    with_arguments = (each for each in found if hasattr(each, "kwargs"))
    return next((each.kwargs for each in with_arguments if getattr(each, "compiler_name", None) == name), None)


def switch_off_ddp_optimizer() -> bool:
    """Make Dynamo keep graphs whole in DistributedDataParallel; returns whether that changed anything."""
    import torch._dynamo.config as config

    if optional(config, "torch._dynamo.config.optimize_ddp", False) not in (True, "ddp_optimizer"):
        return False
    config.optimize_ddp = False
    return True


def switch_off_graph_cache() -> bool:
    """Make AOTAutograd compile every graph again that another process or call compiled; returns whether it changed."""
    import torch._functorch.config as config

    if not optional(config, "torch._functorch.config.enable_autograd_cache", False):
        return False
    config.enable_autograd_cache = False
    return True


def hashes_hide_local_tensors() -> bool:
    """Whether AOTAutograd's cache takes a DTensor for another one whose local tensor has another class (since 2.14)."""
    from torch.distributed.tensor import DTensor

    return "_stable_hash_for_caching" in vars(DTensor)
