"""PyTorch's dispatcher, functorch and tensor subclasses; names used at every call are looked up once, at import."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from qframework.compat.missing import explained, optional

with explained():
    from torch._C import DispatchKey
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch import eager_transforms
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.autograd import forward_ad
    from torch.nested._internal.nested_tensor import NestedTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    # Whether a transform of torch.func is running, and how it wrapped a tensor.
    functorch_transforms_active = torch._C._are_functorch_transforms_active
    peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
    is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
    get_unwrapped = torch._C._functorch.get_unwrapped
    is_gradtrackingtensor = torch._C._functorch.is_gradtrackingtensor
    is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
    is_batchedtensor = torch._C._functorch.is_batchedtensor
    # Forward-mode derivatives: whether they are enabled, and whether the dispatcher excludes a key.
    is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
    is_key_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
    # With False, the dispatcher includes a key again, below the operator that excluded it.
    exclude_dispatch_key: Any = torch._C._SetExcludeDispatchKeyGuard
    AUTOGRAD_KEYS = (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView)
    set_grad_enabled: Any = torch._C._set_grad_enabled  # called in captured graphs for torch.no_grad
    # Called in captured graphs for a ``with torch.autocast``.
    AUTOCAST_SCOPES: tuple[Any, ...] = (torch.amp._enter_autocast, torch.amp._exit_autocast)
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    make_subclass: Any = torch.Tensor._make_subclass
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl  # for subclasses without their own
    # Within it, subclasses of Tensor are ordinary tensors; function modes stay in force.
    without_subclasses: Any = torch._C.DisableTorchFunctionSubclass

    _ = forward_ad._current_level, eager_transforms.JVP_NESTING  # checked here instead of at every call


# What AOTAutograd captures inside of a level of forward-mode AD computes no tangents there before PyTorch 2.12.
LOSES_TANGENTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


def forward_level() -> int:
    """How many levels of forward-mode derivatives are open, minus one."""
    return forward_ad._current_level


def in_jvp() -> bool:
    """Whether ``torch.func.jvp`` is running."""
    return eager_transforms.JVP_NESTING > 0


_refuse_pointer: Callable[[Tensor], None] = optional(
    torch._C, "torch._C._set_throw_on_mutable_data_ptr", lambda x: None
)


def without_memory(x: Any) -> Any:
    """``x``, a subclass whose storage is empty, so that C++ that asks for its memory raises instead of reading it."""
    _refuse_pointer(x)
    return x


below_autograd = optional(torch._C, "torch._C._AutoDispatchBelowAutograd", contextlib.nullcontext)
# -1 outside a backward pass.
current_graph_task = optional(torch._C, "torch._C._current_graph_task_id", lambda: -1)
# The fast allocation of Inductor's own code: (size, stride, dtype) on the current device; None without CUDA.
empty_strided_cuda: Any = None


def current_stream(device: int) -> int:
    """The current stream of a GPU by its number, as an integer; 0 is the default stream."""
    return torch.cuda.current_stream(device).cuda_stream


if torch.version.cuda is not None:
    current_stream = optional(torch._C, "torch._C._cuda_getCurrentRawStream", current_stream)
    empty_strided_cuda = optional(
        getattr(torch._C._dynamo, "guards", None), "torch._C._dynamo.guards._empty_strided_cuda", None
    )
profiler_enabled: Callable[[], bool] = optional(
    torch._C._autograd, "torch._C._autograd._profiler_enabled", lambda: False
)
# How many dispatch modes and function modes are active in this thread; one where that is unknown.
dispatch_modes: Callable[[], int] = optional(torch._C, "torch._C._len_torch_dispatch_stack", lambda: 1)
function_modes: Callable[[], int] = optional(torch._C, "torch._C._len_torch_function_stack", lambda: 1)
_included: Any = optional(torch._C, "torch._C._dispatch_tls_local_include_set", None)
_key_set: Any = optional(torch._C, "torch._C.DispatchKeySet", None)
_TensorGuards: Any = optional(getattr(torch._C._dynamo, "guards", None), "torch._C._dynamo.guards.TensorGuards", None)
is_traceable_wrapper_subclass = optional(
    torch.utils._python_dispatch,
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    lambda x: hasattr(type(x), "__tensor_flatten__"),
)


@explained()
def only_usual_keys() -> bool:
    """Whether this thread adds no key to those of tensors: no transform, no tracing, no dispatch mode.

    False where that cannot be known.
    """
    if _included is None or _key_set is None:
        return False
    usual = _key_set(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView)
    return bool((_included() - usual).raw_repr() == 0)


def metadata_check(xs: list[Tensor]) -> Callable[..., bool] | None:
    """A function of as many tensors that tells, in C++, whether all have the metadata of ``xs``; None if there is none.

    Metadata: type, dtype, device, sizes, strides, ``requires_grad``, and what the dispatcher sees. Keeps no tensor.
    """
    if _TensorGuards is None or not xs:
        return None
    sizes, strides = [list(x.shape) for x in xs], [list(x.stride()) for x in xs]
    check: Callable[..., bool] = _TensorGuards(*xs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@explained()
def writes(x: Tensor) -> int:
    """How often ``x`` was written to."""
    return x._version


_version = operator.attrgetter("_version")


@explained()
def writes_of_all(xs: Iterable[Tensor]) -> list[int]:
    """How often each tensor was written to, without a Python call for each; none may be an inference tensor."""
    return list(map(_version, xs))


@explained()
def memory_of(x: Tensor) -> int:
    """Identifies the storage of ``x``, which its views share; fake tensors have one too."""
    return x.untyped_storage()._cdata


def static_layout(x: Tensor) -> tuple[Any, ...] | None:
    """Shape, strides, dtype and device; None if a size is a symbol."""
    known = all(type(size) is int for size in (*x.shape, *x.stride()))
    return (tuple(x.shape), x.stride(), x.dtype, x.device) if known else None


__all__ = [
    "AUTOCAST_SCOPES",
    "AUTOGRAD_KEYS",
    "LOSES_TANGENTS",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "NestedTensor",
    "TorchDispatchMode",
    "below_autograd",
    "current_graph_task",
    "current_stream",
    "disabled_torch_function",
    "dispatch_modes",
    "empty_strided_cuda",
    "enable_python_dispatcher",
    "exclude_dispatch_key",
    "forward_level",
    "function_modes",
    "functorch_transforms_active",
    "get_unwrapped",
    "in_jvp",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "is_fwd_grad_enabled",
    "is_gradtrackingtensor",
    "is_key_excluded",
    "is_legacy_batchedtensor",
    "is_traceable_wrapper_subclass",
    "make_subclass",
    "make_wrapper_subclass",
    "memory_of",
    "metadata_check",
    "only_usual_keys",
    "peek_interpreter_stack",
    "profiler_enabled",
    "set_grad_enabled",
    "static_layout",
    "without_memory",
    "without_subclasses",
    "writes",
    "writes_of_all",
]
