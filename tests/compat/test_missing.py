"""A private name that is gone gives an error that explains it, or a replacement that is logged once (missing.py)."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import runpy
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before a name is gone: an import that then fails would leave it half imported
from names_helpers import needed, resolve
from torch import nn

import qframework.compat
from qframework.backend.release import release_prepared_models
from qframework.compat import dynamo, functions, graphs, inductor, memos, missing, modules, operators
from qframework.compat import triton as compat_triton
from qframework.compat.cpp_compiler import cpp_compiler
from qframework.compat.names import NAMES, Name
from qframework.errors import QFrameworkError

ROOM = Path(qframework.compat.__file__).parent
SOURCES = {path: path.read_text() for path in ROOM.glob("*.py") if path.name not in ("names.py", "missing.py")}


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings of this test, with no name logged before."""
    monkeypatch.setattr(missing, "replaced", Counter())
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    missing.logger.addHandler(handler)
    yield messages
    missing.logger.removeHandler(handler)


# Imported inside functions: their modules are heavy, or other versions do not need them.
LATE = (
    "torch._C._aoti.",
    "torch._dynamo.",
    "torch._functorch.config.",
    "torch._inductor.aoti_",
    "torch._inductor.async_compile.",
    "torch._inductor.config.",
    "torch._inductor.lowering",
    "torch._library.utils",
    "torch.export.pt2_archive.",
    "triton.backends.nvidia.driver.",
)
LATE_NAMES = (
    "diffusers.hooks.layerwise_casting.DEFAULT_SKIP_MODULES_PATTERN",
    "diffusers.quantizers.quantization_config.QuantizationConfigMixin",  # if transformers is not installed
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel",
    "torch._inductor.compile_fx.compile_fx",
    "torch._inductor.cpp_builder.get_cpp_compiler",
    "torch._inductor.exc.InvalidCxxCompiler",
    "torch.fx.node._side_effectful_functions",
    "torchao.quantization.pt2e.quantize_pt2e._fold_conv_bn_qat",
    "transformers.models.sam.modeling_sam.SAM_VISION_ATTENTION_CLASSES",
    "transformers.models.sam_hq.modeling_sam_hq.SAM_HQ_VISION_ATTENTION_CLASSES",
    "triton.AsyncCompileMode",
    "triton.runtime.driver.set_active",
)


def bound_at_import() -> list[Name]:
    """Names that a module of compat/ imports from another module, so that the test can remove them."""
    found = []
    for name in needed():
        module = name.path.rpartition(".")[0].rpartition(".")[2]
        others = ("active", "aten", "assert_and_get_unique_device", "shared_memory_descriptor")  # no modules
        of_a_module = module.islower() and module not in others
        cached = name.path.endswith("cache_clear")
        late = name.path.startswith(LATE) or name.path in LATE_NAMES
        if not (name.source or cached or late) and of_a_module:
            found.append(name)
    return found


def importers(name: Name) -> list[Path]:
    last = name.path.rpartition(".")[2]
    return [path for path, text in SOURCES.items() if last in text]


@pytest.mark.parametrize(
    "name",
    bound_at_import(),
    ids=lambda name: name.path,
)
def test_importing_names_what_is_gone(name: Name, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    pytest.importorskip(name.library)
    owner, _, last = name.path.rpartition(".")
    if not name.older:
        resolve(name.path)  # imports what is a module
    module = importlib.import_module(owner)
    for each in filter(None, (last, name.older)):
        monkeypatch.delattr(module, each, raising=each == last and not name.older)
    if name.path in sys.modules:
        monkeypatch.setitem(sys.modules, name.path, None)  # type: ignore[arg-type]
    errors = []
    for path in importers(name):
        try:
            runpy.run_path(str(path))
        except QFrameworkError as error:
            errors.append(str(error))
    if "torch" in name.library and name.instead:
        assert not errors
    told = errors or said
    assert told
    assert all(name.path in text and name.breaks in text for text in told), told


def test_other_errors_pass() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), missing.explained():
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(AttributeError, match="no_such_name"), missing.explained():
        _ = torch.no_such_name
    with pytest.raises(ImportError, match="no_such_name"), missing.explained():
        from torch import no_such_name  # noqa: F401


@pytest.mark.parametrize("wrap", [lambda f: f, missing.explained()], ids=["block", "decorator"])
def test_a_missing_name_is_an_error_with_a_sentence(wrap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_grad_enabled")
    found = r"torch 2\.\d+.* has no torch\._C\._set_grad_enabled, without which .*"
    with pytest.raises(QFrameworkError, match=found), missing.explained():
        wrap(lambda: torch._C._set_grad_enabled)()


def test_a_replacement_is_logged_once_and_counted(said: list[str]) -> None:
    for _ in range(3):
        assert missing.optional(torch, "torch._int_mm", None) is torch._int_mm
    assert not said
    for _ in range(3):
        assert missing.optional(object(), "torch._int_mm", "instead") == "instead"
    assert missing.replaced == {"torch._int_mm": 3}
    (message,) = said
    assert "torch._int_mm" in message
    assert "float product" in message


# Memos ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "function"), memos._MEMOS)
@pytest.mark.parametrize("left", ["nothing", "a function without a memo"])
def test_a_memo_that_cannot_be_emptied_is_logged(
    module: str, function: str, left: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    for each, _ in memos._MEMOS:
        __import__(each)
    if left == "nothing":
        monkeypatch.delattr(sys.modules[module], function)
    else:
        monkeypatch.setattr(sys.modules[module], function, lambda model: None)
    release_prepared_models()
    release_prepared_models()
    (message,) = said
    assert f"{module}.{function}" in message


def test_present_and_unloaded_memos_log_nothing(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    for module, _ in memos._MEMOS:
        __import__(module)
    release_prepared_models()
    for module, _ in memos._MEMOS:
        monkeypatch.delitem(sys.modules, module)
    release_prepared_models()
    assert not said


# Dynamo's hints -------------------------------------------------------------------------------------------------------


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def compiled_without(*keys: str, model: Callable[..., Any] | None = None) -> None:
    """Compile a model with a backend that sees a graph without these hints."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        metas = [node.meta for node in inputs]  # which Dynamo goes on with
        for node, meta in zip(inputs, metas, strict=True):
            node.meta = {key: value for key, value in meta.items() if key not in keys}
            if "tensor_dict" in node.meta:
                node.meta["tensor_dict"] = {k: v for k, v in meta["tensor_dict"].items() if k not in keys}
        dynamo.check_hints(gm)
        for node, meta in zip(inputs, metas, strict=True):
            node.meta = meta
        return gm.forward

    with torch.no_grad():
        torch.compile(model or WithBuffer(), backend=backend)(torch.ones(2, 4))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("model", [None, nn.Linear(4, 4), lambda x: x + 1, nn.BatchNorm1d(4).eval()])
def test_complete_graphs_log_nothing(model: Any, said: list[str]) -> None:
    compiled_without(model=model)
    assert not said


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("key", ["grapharg", "example_value", "tensor_dict", "_dynamo_static_input_type"])
def test_a_missing_key_of_dynamo_is_logged_once(key: str, said: list[str]) -> None:
    compiled_without(key)
    torch._dynamo.reset()
    compiled_without(key)
    messages = [message for message in said if f"has no {key}, " in message]
    assert len(messages) == 1
    assert NAMES[key].instead in messages[0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_backend_checks_the_keys_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr("qframework.backend.compile.check_hints", looked.append)
    with torch.no_grad():
        torch.compile(nn.Linear(8, 8), backend="qframework")(torch.ones(2, 8))
    assert len(looked) == 1


def test_graphs_that_dynamo_did_not_capture_need_no_keys(said: list[str]) -> None:
    gm = torch.fx.symbolic_trace(nn.Linear(4, 4))
    dynamo.check_hints(gm)
    dynamo.add_source(gm, "buffer")
    assert not said


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_without_a_list_of_sources_is_logged(said: list[str]) -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        dynamo.add_source(gm, "one")
        assert "one" in gm._param_name_to_source
        del gm._param_name_to_source
        dynamo.add_source(gm, "another")
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    (message,) = said
    assert "_param_name_to_source" in message


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("last", ["install_guard", "GuardBuilder"])
def test_a_weight_that_cannot_be_guarded_is_an_error(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.guards

    errors = []

    def backend(gm: Any, inputs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.delattr(torch._dynamo.guards, last)
            with pytest.raises(QFrameworkError, match="frozen weights") as caught:
                dynamo.guard_identity(gm.graph.find_nodes(op="placeholder")[0])
        errors.append(caught)
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert errors


# A stand-in for a compiled module, without the attributes that the package reads.
OPTIMIZED = type("OptimizedModule", (), {"__module__": "torch._dynamo.eval_frame"})()


def test_compiled_modules_are_recognised() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    assert dynamo.original_module(compiled) is model
    assert dynamo.is_compiled(compiled)
    assert not dynamo.is_compiled(model)
    assert not dynamo.is_compiled(None)
    with pytest.raises(QFrameworkError, match="compiled model cannot be distinguished"):
        dynamo.is_compiled(OPTIMIZED)


def test_the_arguments_of_a_backend_are_found_or_raise() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="qframework", options={"linear": "int8_dynamic"})
    found = dynamo.backend_arguments(compiled, "qframework")
    assert found is not None
    assert found["options"] == {"linear": "int8_dynamic"}
    assert dynamo.backend_arguments(torch.compile(nn.Linear(2, 2)), "qframework") is None
    with pytest.raises(QFrameworkError, match=r"OptimizedModule\.dynamo_ctx"):
        dynamo.backend_arguments(OPTIMIZED, "qframework")
    compiled.dynamo_ctx = types.SimpleNamespace(callback=lambda *_: None)  # with nothing inside
    with pytest.raises(QFrameworkError, match="no _torchdynamo_orig_backend"):
        dynamo.backend_arguments(compiled, "qframework")


def test_ddp_optimizer_without_its_option_is_logged(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", types.ModuleType("config"))
    monkeypatch.setattr("torch._dynamo.config", types.ModuleType("config"), raising=False)
    assert not dynamo.switch_off_ddp_optimizer()
    assert "DDPOptimizer" in said[0]


def test_the_cache_of_graphs_without_its_option_is_logged(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch._functorch.config", types.ModuleType("config"))
    monkeypatch.setattr("torch._functorch.config", types.ModuleType("config"), raising=False)
    assert not dynamo.switch_off_graph_cache()
    assert "AOTAutograd's cache" in said[0]


def test_inductor_without_the_start_of_its_processes_is_logged(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.delattr("torch._inductor.async_compile.maybe_warm_pool")
    inductor.start_processes()
    (message,) = said
    assert "maybe_warm_pool" in message
    assert "start late" in message


# Functions, graphs, modules, operators --------------------------------------------------------------------------------


def test_a_function_without_the_check_has_no_copy(said: list[str]) -> None:
    name = "torch.autograd.grad"
    assert functions.without_handover(lambda x: x, name) is None
    assert functions.without_handover(len, name) is None
    (message,) = said
    assert "its attention stays in PyTorch" in message


def test_erased_nodes_are_recognised_without_the_flag(said: list[str]) -> None:
    graph = torch.fx.Graph()
    kept, erased = graph.placeholder("x"), graph.placeholder("y")
    graph.erase_node(erased)
    assert (graphs.is_erased(kept), graphs.is_erased(erased)) == (False, True)
    assert not said
    found = [graphs.is_erased(types.SimpleNamespace(graph=graph)), graphs.is_erased(Flagless(kept))]  # type: ignore[arg-type]
    assert found == [True, True]
    assert len(said) == 1


class Flagless:
    """A node that is not in its graph, and has no flag for it."""

    def __init__(self, node: torch.fx.Node) -> None:
        self.graph = node.graph


def test_a_graph_without_a_code_generator_is_an_error() -> None:
    exported: Any = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module()
    assert graphs.input_structure(exported).orig_args
    del exported.graph.__dict__["_codegen"]
    with pytest.raises(QFrameworkError, match="inputs cannot be read"):
        graphs.input_structure(exported)


def test_the_cpu_without_an_int8_product_uses_floats() -> None:
    from qframework.kernels.linear.cpu import _reason_against

    assert "not available" in str(_reason_against(operators._no_int_mm))


@pytest.mark.parametrize(
    "path", ["torch._inductor.cpp_builder.get_cpp_compiler", "torch._inductor.exc.InvalidCxxCompiler"]
)
def test_doctor_shows_no_compiler_if_inductor_has_no_finder(
    path: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    owner, _, last = path.rpartition(".")
    monkeypatch.delattr(importlib.import_module(owner), last)
    assert cpp_compiler() is None
    assert path in said[0]


def test_hooks_are_found_and_removed() -> None:
    class Hook:
        def __call__(self, *arguments: Any, **named: Any) -> None: ...

    model = nn.Linear(2, 2)
    assert not modules.has_hooks(model)
    model.register_forward_pre_hook(Hook(), with_kwargs=True)
    model.register_forward_hook(Hook())
    model.register_forward_hook(lambda *_: None)
    modules.remove_hooks(model, Hook)
    assert modules.has_hooks(model)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    assert len(model._forward_hooks) == 1


# Triton's descriptors -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Checked:
    base: Any
    shape: list[int]

    def __post_init__(self) -> None:
        CHECKS.append(self.shape)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("base", "shape")
    base: Any
    shape: list[int]

    def __post_init__(self) -> None:
        CHECKS.append(self.shape)


CHECKS: list[Any] = []


@pytest.mark.parametrize("kind", [Checked, Slotted])
def test_descriptors_are_copied_for_other_tensors(kind: Any, said: list[str]) -> None:
    CHECKS.clear()
    x, y = torch.zeros(4), torch.ones(4)
    make, alive = compat_triton.descriptor_maker(kind(x, [4])), weakref.ref(x)
    assert compat_triton.is_descriptor(kind(y, [4]))
    assert not compat_triton.is_descriptor(y)
    CHECKS.clear()
    made = make(y)
    assert type(made) is kind
    assert (made.base is y, made.shape) == (True, [4])
    assert (len(said), len(CHECKS)) == ((0, 0) if kind is Checked else (1, 1))  # checked anew where it must be
    del x
    gc.collect()
    assert alive() is None
