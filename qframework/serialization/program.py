"""The exported program in a saved model: checked against a grammar, then passed to PyTorch as values, never as a file.

PyTorch's own reader unpickles, evaluates expressions, imports modules by name, and compiles Python source generated
from names, conditions and structures. The grammar here describes each of these. Anything else is refused (custom
objects, operators, containers) or dropped (metadata other than the modules' names).
"""

from __future__ import annotations

import ast
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import GraphModule

from qframework.compat import pytree
from qframework.compat.modules import share_forward_pre_hooks
from qframework.errors import FileFormatError, UnsupportedError
from qframework.files import parse_json
from qframework.graph.activation_scales import CarriesScales
from qframework.graph.none_inputs import check_none_inputs
from qframework.graph.rewrites.detached import detach_outputs
from qframework.graph.rewrites.late_dequantize import dequantize_late
from qframework.graph.source import look_up_once
from qframework.serialization.expressions import NOT_PLAIN, SYMBOL, condition
from qframework.serialization.grammar import (
    BOOL,
    DEVICE,
    DEVICE_TYPES,
    DTYPES,
    FLOAT,
    FQN,
    INT,
    NAME,
    PLAIN,
    SIZE,
    TENSOR_META,
    Rule,
    many,
    mapping,
    one_of,
    optional,
    parsed_by,
    record,
    refuse,
    symbolic,
    text,
    variant,
)
from qframework.serialization.operators import PYTHON_OPERATORS, TARGET

_LOADING = threading.Lock()  # PyTorch's reader keeps state in a global
_CONTAINERS = {"builtins.tuple": None, "builtins.list": None, "builtins.dict": dict, "collections.OrderedDict": dict}
_MODULE_STACK = text(r"[\w .,:;@<>\[\]'()+/=|-]{0,20000}", "names of modules and their types")


def check_program(document: Any) -> dict[str, Any]:
    """Check a program's JSON document and return the part of it that PyTorch may receive.

    Raises:
        FileFormatError: the document holds a value that the grammar does not accept.
    """
    return _PROGRAM(document, "the program")


def build_model(checked: Mapping[str, Any], weights: dict[str, Tensor], constants: dict[str, Tensor]) -> GraphModule:
    """Build the model from a checked document and its tensors.

    Raises:
        FileFormatError: a name in the source that PyTorch generates hides one that the source needs.
    """
    from qframework.compat.export import program_of

    with _LOADING:
        program = program_of(checked, weights, constants, _example_inputs(checked))
    model = program.module()
    for name, part in model.named_modules():
        if (
            isinstance(part, GraphModule) and name != "_guards_fn"
        ):  # generated from checked conditions, which may call methods of inputs
            _check_source(part.code, name)
    constants_of = [spec.arg for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    check_none_inputs(model, [x.name for x in constants_of if isinstance(x, ConstantArgument) and x.value is None])
    dequantize_late(model)
    look_up_once(model)
    loaded = _LoadedModel.of(model)
    detach_outputs(loaded)
    return loaded


class _LoadedModel(CarriesScales, GraphModule):
    """A graph from a file, whose state dict holds its scales."""

    @classmethod
    def of(cls, model: GraphModule) -> GraphModule:
        """``model`` with its checks of inputs."""
        loaded = cls(model, model.graph, "LoadedModel")
        nn.Module.train(loaded, False)
        share_forward_pre_hooks(model, loaded)
        loaded.meta = model.meta
        for name in ("range_constraints", "validate_inputs"):  # what the checks read
            if name in model.__dict__:
                setattr(loaded, name, model.__dict__[name])
        return loaded

    def train(self, mode: bool = True) -> Self:
        """Only ``eval()``, which changes nothing. Raises UnsupportedError for ``train()``."""
        if mode:
            raise UnsupportedError(
                "load: mode must be False, got True: a quantized model cannot be trained. Train the float model, and "
                "quantize it again"
            )
        return self


def _check_source(source: str, where: str) -> None:
    """Refuse values with the names of objects that the source calls or reads attributes of: ``self``, ``torch``.

    ``self.tofile(...)`` calls a submodule only while ``self`` is the module.
    """
    tree = ast.parse(source)
    owners = {id(function.args.args[0]) for function in tree.body if isinstance(function, ast.FunctionDef)}
    bound, needed = set(), set()
    for each in ast.walk(tree):
        match each:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                bound.add(name)
            case ast.arg(arg=name) if id(each) not in owners:
                bound.add(name)
            case ast.Attribute(value=ast.Name(id=name)) | ast.Call(func=ast.Name(id=name)):
                needed.add(name)
    if hidden := sorted(bound & needed):
        refuse(hidden[0], f"the name of a value in the graph {where!r}", "a name that the source does not need itself")


def _example_inputs(checked: Mapping[str, Any]) -> Any:
    """Empty inputs of the right structure: PyTorch generates checks of inputs only if there are example inputs."""
    signature = checked["graph_module"]["module_call_graph"][0]["signature"]
    spec = pytree.treespec_loads(signature["in_spec"])
    return pytree.tree_unflatten([torch.empty(0)] * spec.num_leaves, spec)


# Values in the graph


_SUBGRAPH = ".as_graph.graph"
_DEEPEST = 4


def _graph(value: Any, where: str) -> dict[str, Any]:
    # PyTorch's message on a faulty node doubles with each level of nesting.
    if where.count(_SUBGRAPH) > _DEEPEST:
        raise FileFormatError(f"graphs must be nested at most {_DEEPEST} deep, got {_DEEPEST + 1}")
    return _GRAPH(value, where)


_ARGUMENT_NAME = text(re.compile(r"(?:(?!__)[A-Za-z_]\w{0,200})?", re.ASCII), "the name of an argument")
_NAMED = record(name=NAME)
_NAME_OR_INT = variant(as_name=NAME, as_int=INT)
_NAME_OR_FLOAT = variant(as_name=NAME, as_float=FLOAT)
_NAME_OR_BOOL = variant(as_name=NAME, as_bool=BOOL)
_TENSOR_OR_NONE = variant(as_tensor=_NAMED, as_none=BOOL)
_SCALARS: dict[str, Rule] = {
    "as_none": BOOL,
    "as_int": INT,
    "as_float": FLOAT,
    "as_bool": BOOL,
    "as_sym_int": _NAME_OR_INT,
    "as_sym_float": _NAME_OR_FLOAT,
    "as_sym_bool": _NAME_OR_BOOL,
}
_VALUES: dict[str, Rule] = dict(
    **_SCALARS,
    as_tensor=_NAMED,
    as_tensors=many(_NAMED),
    as_optional_tensor=_TENSOR_OR_NONE,
    as_optional_tensors=many(_TENSOR_OR_NONE),
    as_nested_tensors=many(many(_NAMED)),
    as_ints=many(INT),
    as_int_lists=many(many(INT)),
    as_floats=many(FLOAT),
    as_float_lists=many(many(FLOAT)),
    as_bools=many(BOOL),
    as_complex=record(real=FLOAT, imag=FLOAT),
    as_string=PLAIN,
    as_strings=many(PLAIN),
    as_sym_ints=many(_NAME_OR_INT),
    as_sym_floats=many(_NAME_OR_FLOAT),
    as_sym_bools=many(_NAME_OR_BOOL),
    as_scalar_type=one_of(DTYPES),
    as_memory_format=one_of(range(1, 5)),
    as_layout=one_of([7]),
    as_device=DEVICE,
)
_ARGUMENT = variant(**_VALUES)
_WRAPPED = variant(as_graph=record(name=text(r"submod_[0-9]{1,9}", "a name like submod_1"), graph=_graph))
_KIND = optional(one_of(range(3)))
_OPERAND = record(name=_ARGUMENT_NAME, arg=_ARGUMENT, kind=_KIND)
_SCOPE_INPUT = variant(**_SCALARS, as_tensor=_NAMED)


def _any(value: Any, where: str) -> Any:
    return value


def _scope(*settings: Rule) -> Rule:
    """The operands of a scope, all positional: its settings, the graph that it wraps, that graph's inputs."""
    operand = record(name=one_of([""]), arg=_any, kind=_KIND)

    def rule(value: Any, where: str) -> list[dict[str, Any]]:
        operands = many(operand)(value, where)
        rules = [*settings, _WRAPPED]
        if len(operands) < len(rules):
            refuse(len(operands), f"the number of {where}", f"at least {len(rules)}")
        rules += [_SCOPE_INPUT] * (len(operands) - len(rules))
        return [
            {**operand, "arg": rule(operand["arg"], f"{where}[{index}].arg")}
            for index, (rule, operand) in enumerate(zip(rules, operands, strict=True))
        ]

    return rule


def _operand(value: Any, where: str) -> dict[str, Any]:
    match value:
        case {"name": "assert_msg", "arg": {"as_string": str(message)}}:  # for people to read; quotes names
            value = {**value, "arg": {"as_string": NOT_PLAIN.sub(" ", message)[:1000]}}
    return _OPERAND(value, where)


def _call_of(operands: Rule) -> Rule:
    return record(
        target=TARGET,
        inputs=operands,
        outputs=many(_ARGUMENT),
        metadata=record(nn_module_stack=optional(_MODULE_STACK)),
        is_hop_single_tensor_return=optional(BOOL),
        name=optional(NAME),
    )


_NODE = _call_of(many(_operand))
_SETTING = variant(as_bool=BOOL)
_SCOPES = {
    "torch.ops.higher_order.wrap_with_set_grad_enabled": _call_of(_scope(_SETTING)),
    "torch.ops.higher_order.wrap_with_autocast": _call_of(
        _scope(
            variant(as_string=one_of(DEVICE_TYPES)),
            variant(as_scalar_type=one_of(DTYPES), as_none=BOOL),
            _SETTING,
            variant(as_bool=BOOL, as_none=BOOL),
        )
    ),
}


def _node(value: Any, where: str) -> dict[str, Any]:
    target = value.get("target") if isinstance(value, dict) else None
    node = (_SCOPES.get(target, _NODE) if isinstance(target, str) else _NODE)(value, where)
    if node["target"] in PYTHON_OPERATORS:
        for each in node["inputs"]:
            variant(**_SCALARS)(each["arg"], f"{where}: an operand of {node['target']}")
    return node


_GRAPH = record(
    inputs=many(_ARGUMENT),
    outputs=many(_ARGUMENT),
    nodes=many(_node),
    tensor_values=mapping(NAME, TENSOR_META),
    sym_int_values=mapping(NAME, SIZE),
    sym_bool_values=mapping(NAME, symbolic(as_bool=BOOL)),
    is_single_tensor_return=optional(BOOL),
    sym_float_values=optional(mapping(NAME, symbolic(as_float=FLOAT))),
)

# Inputs and outputs

_CONSTANT = variant(as_none=BOOL, as_int=INT, as_float=FLOAT, as_string=PLAIN, as_bool=BOOL)
_INPUT = variant(
    user_input=record(arg=_ARGUMENT),
    parameter=record(arg=_NAMED, parameter_name=FQN),
    buffer=record(arg=_NAMED, buffer_name=FQN, persistent=BOOL),
    tensor_constant=record(arg=_NAMED, tensor_constant_name=FQN),
    constant_input=record(name=NAME, value=_CONSTANT),
)
_OUTPUT = variant(
    user_output=record(arg=_ARGUMENT),
    loss_output=record(arg=_NAMED),
    buffer_mutation=record(arg=_NAMED, buffer_name=FQN),
    parameter_mutation=record(arg=_NAMED, parameter_name=FQN),
    user_input_mutation=record(arg=_NAMED, user_input_name=NAME),
)


def _structure(value: Any, where: str) -> str:
    """Nested tuples, lists and dictionaries, as ``pytree`` writes them: a JSON document inside a string."""
    if not isinstance(value, str):
        refuse(value, where, "a structure of containers")
    protocol = parse_json(value)
    if not isinstance(protocol, list) or len(protocol) != 2 or protocol[0] != 1:
        refuse(value, where, "a structure of containers in protocol 1")
    return json.dumps([1, _container(protocol[1], where)])


def _container(value: Any, where: str) -> dict[str, Any]:
    node = record(type=optional(PLAIN), context=optional(lambda text, _: text), children_spec=many(_container))(
        value, where
    )
    kind, context, children = node.get("type"), node.get("context"), node["children_spec"]
    if kind is None and context is None and not children:
        return {"type": None, "context": None, "children_spec": []}
    if context == "null" and (_CONTAINERS.get(kind, dict) is None or _has_fields(kind, len(children))):
        return {"type": kind, "context": "null", "children_spec": children}
    keyed = _CONTAINERS.get(kind) is dict or _is_output_class(kind)
    keys = parse_json(context) if keyed and isinstance(context, str) else None
    if not isinstance(keys, list) or len(keys) != len(children):
        refuse(kind, where, f"one of {', '.join(_CONTAINERS)} with as many names as elements")
    rule = PLAIN if kind in _CONTAINERS else NAME
    return {
        "type": kind,
        "context": json.dumps([key if type(key) is int else rule(key, where) for key in keys]),
        "children_spec": children,
    }


def _has_fields(kind: str | None, count: int) -> bool:
    """Whether ``kind`` is one of PyTorch's own tuples of ``count`` fields, such as ``torch.return_types.topk``."""
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(kind or "")
    return getattr(known, "__module__", None) == "torch.return_types" and getattr(known, "n_fields", None) == count


def _is_output_class(kind: str | None) -> bool:
    """Whether ``kind`` is a dictionary class registered in this process, such as transformers' ``ModelOutput``."""
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(kind or "")
    plain = known is not None and pytree.SUPPORTED_SERIALIZED_TYPES[known].from_dumpable_context is None
    return plain and isinstance(known, type) and issubclass(known, OrderedDict)


def _input_structure(value: Any, where: str) -> str:
    """The structure of ``(args, kwargs)``; the names of ``kwargs`` become names of parameters."""
    written = _structure(value, where)
    top = json.loads(written)[1]
    kinds = [child["type"] for child in top["children_spec"]]
    if top["type"] != "builtins.tuple" or kinds != ["builtins.tuple", "builtins.dict"]:
        refuse(value, where, "a tuple of a tuple and a dictionary")
    many(NAME)(json.loads(top["children_spec"][1]["context"]), where)
    return written


_CALL = record(
    inputs=many(_ARGUMENT),
    outputs=many(_ARGUMENT),
    in_spec=_input_structure,
    out_spec=_structure,
    forward_arg_names=optional(many(NAME)),
)
_MODULE_CALL = record(fqn=lambda value, where: "" if value == "" else FQN(value, where), signature=optional(_CALL))


def _module_calls(value: Any, where: str) -> list[dict[str, Any]]:
    calls = many(_MODULE_CALL)(value, where)
    if not calls or calls[0]["fqn"] != "" or calls[0].get("signature") is None:
        refuse(value, where, "a list whose first entry describes the model itself")
    return calls


# Sizes and conditions


def _range_name(value: Any, where: str) -> str:
    """A symbol, or an expression of symbols; for one that starts with u, PyTorch counts up to its number."""
    PLAIN(value, where)
    if SYMBOL.fullmatch(value) is None and re.match(r"u|zuf", value):
        refuse(value, where, "a symbol like s0 or u0")
    return value


_PROGRAM = record(
    graph_module=record(
        graph=_graph,
        signature=record(input_specs=many(_INPUT), output_specs=many(_OUTPUT)),
        module_call_graph=_module_calls,
    ),
    opset_version=mapping(NAME, INT),
    range_constraints=mapping(_range_name, record(min_val=optional(INT), max_val=optional(INT))),
    schema_version=record(major=INT, minor=INT),
    verifiers=lambda value, where: (
        many(one_of(["TRAINING", "ATEN"]))(value, where) or refuse(value, where, "a list of at least one element")
    ),
    torch_version=optional(PLAIN),
    guards_code=optional(many(parsed_by(condition, "a condition on inputs"))),
)
