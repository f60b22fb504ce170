"""The PT2E quantizer: rules that say how linears and attention are quantized, applied to an exported graph."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch.fx import GraphModule, Node

from qframework.arguments import described
from qframework.compat.torchao import EdgeOrNode, ObserverOrFakeQuantize, Quantizer
from qframework.errors import UnsupportedError
from qframework.fallbacks import Fallbacks
from qframework.graph.attention.replace import name_shapes
from qframework.graph.nodes import add_note
from qframework.graph.rewrites.cast_late import cast_late
from qframework.graph.rewrites.einsum_linears import expand_exported_einsum_linears
from qframework.graph.rewrites.expand_einsum import expand_einsum
from qframework.graph.rewrites.expand_products import expand_exported_products
from qframework.graph.rewrites.inline_grad_scopes import inline_scopes_of_layers
from qframework.graph.rewrites.missing_values import share_memory_again
from qframework.graph.rewrites.out_of_place import write_out_of_place
from qframework.graph.rewrites.read_after_writes import read_after_writes
from qframework.graph.rewrites.scalar_constants import write_out_scalars
from qframework.graph.rewrites.shorten import erase_unread_results
from qframework.graph.routers import chooses
from qframework.graph.small_linears import why_too_small
from qframework.graph.weight_rows import separate_weights
from qframework.quantizer.annotate_attention import (
    AttentionAnnotation,
    NoAttentionKernel,
    annotate_attention,
    check_attention,
    is_attention,
    is_softmax,
    is_variant,
    transform_attention,
)
from qframework.quantizer.annotate_linear import (
    LinearAnnotation,
    SharedObservers,
    annotate_linear,
    annotated,
    check_dtypes,
    check_linear,
    is_annotated,
    is_linear,
)
from qframework.quantizer.arguments import check_graph
from qframework.quantizer.attention_config import AttentionConfig
from qframework.quantizer.config import LinearConfig, check_bool
from qframework.quantizer.fake_quantize import wrap_observers
from qframework.quantizer.rules import Config, Kind, NodeFilter, Rule, RuleKind, qualified_name

fallbacks = Fallbacks()
"""How often an attention that ``set_global`` selects stayed in float, by reason. Each reason is logged once."""

# from weakest to strongest
_PRECEDENCE: tuple[RuleKind, ...] = ("global", "module_type", "filter", "module_name")

# Key of a linear's meta for the configuration that a step of a recipe chose for it.
_OVERRIDE = "qframework_config"


class QFrameworkQuantizer(Quantizer):
    """Quantizes linears and attention of an exported model, for torchao's ``prepare_pt2e`` and ``convert_pt2e``.

    Each layer takes the configuration of the strongest rule that selects it: module name, then filter, then module
    type, then global; of two rules of one kind, the later call. A LinearConfig applies to linears, an AttentionConfig
    to attention, a QuantizationConfig to both, and ``None`` leaves both in float. Nodes that another quantizer has
    annotated stay as they are, so that this one works with ``ComposableQuantizer``::

        quantizer = QFrameworkQuantizer().set_global(static_int8()).set_module_name("head", None)
        quantizer.set_global(static_attention())
        prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)

    It quantizes ``aten.linear`` whose weight is a parameter or buffer, and attention, as one node or spelled out as
    matmul, softmax, matmul. Everything else, and layers that no rule selects, stay in float. So do layers that choose,
    such as routers of experts, unless a rule for a module name selects them.

    Args:
        is_qat: for ``prepare_qat_pt2e``, which does not tell a quantizer about training: every observer becomes a
            FakeQuantize, so that the prepared model computes with quantized values and its weights can be trained.
    """

    def __init__(self, *, is_qat: bool = False) -> None:
        super().__init__()
        check_bool("QFrameworkQuantizer", "is_qat", is_qat)
        self.is_qat = is_qat
        self.rules: list[Rule] = []

    def set_global(self, config: Config | None) -> QFrameworkQuantizer:
        """Configure every linear, or every attention, that no other rule selects.

        Attention that no kernel computes then stays in float, is logged and counted in
        ``qframework.quantizer.fallbacks``; it is an error where another rule selects it.
        """
        return self._add("global", None, config)

    def set_module_name(self, pattern: str, config: Config | None) -> QFrameworkQuantizer:
        """Configure the modules whose qualified name matches ``pattern``, and everything inside them.

        ``"blocks.0"`` covers ``blocks.0.attn.qkv`` but not ``blocks.01``. ``*``, ``?`` and ``[...]`` are wildcards and
        match dots too (``"*.fc1"``). ``prepare_pt2e`` raises UnsupportedError if the pattern matches no module.
        """
        if not isinstance(pattern, str) or not pattern:
            raise UnsupportedError(f"set_module_name: pattern must be a module's qualified name, got {pattern!r}")
        return self._add("module_name", pattern, config)

    def set_module_type(self, module_type: type, config: Config | None) -> QFrameworkQuantizer:
        """Configure modules of this type or a subclass, and everything inside them.

        Only modules whose ``forward`` ran during the export count. ``prepare_pt2e`` raises UnsupportedError if none is
        of the type.
        """
        if not isinstance(module_type, type):
            raise UnsupportedError(f"set_module_type: module_type must be a subclass of nn.Module, got {module_type!r}")
        return self._add("module_type", module_type, config)

    def set_filter(self, function: NodeFilter, config: Config | None) -> QFrameworkQuantizer:
        """Configure the linears and attentions for whose ``aten`` node ``function(node)`` is true.

        With a LinearConfig the function gets ``linear`` nodes; with an AttentionConfig it gets
        ``scaled_dot_product_attention`` nodes and the ``softmax`` nodes of spelled-out attention.
        """
        if not callable(function):
            raise UnsupportedError(f"set_filter: function must be a function of a torch.fx.Node, got {function!r}")
        return self._add("filter", function, config)

    def _add(self, kind: RuleKind, selector: Any, config: Config | None) -> QFrameworkQuantizer:
        if config is not None and not isinstance(config, Config):
            raise UnsupportedError(
                f"set_{kind}: config must be a LinearConfig, an AttentionConfig, a QuantizationConfig of both, or None "
                f"for float, got {config!r}"
            )
        self.rules.append(Rule(kind, selector, config))
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether a rule has static scales."""
        kinds: tuple[Kind, ...] = (LinearConfig, AttentionConfig)
        return any(_is_static(rule.config_of(kind)) for rule in self.rules for kind in kinds if rule.says(kind))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description of the rules in the order of the calls; ``from_dict`` reads it back."""
        return {"quantizer": QFrameworkQuantizer.__name__, "rules": [rule.to_dict() for rule in self.rules]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QFrameworkQuantizer:
        """Inverse of ``to_dict``, except for filters. The modules of types must be imported.

        Raises:
            UnsupportedError: a filter, whose function cannot be restored from its name, or values that ``to_dict`` does
                not write.
        """
        if not isinstance(values, Mapping) or set(values) != {"quantizer", "rules"}:
            raise UnsupportedError(f"{cls.__name__}: values must be what to_dict() returns, got {values!r:.200}")
        if values["quantizer"] != QFrameworkQuantizer.__name__ or not isinstance(values["rules"], list):
            raise UnsupportedError(
                f"{cls.__name__}: values must hold a list of rules of a {QFrameworkQuantizer.__name__!r}, got rules of "
                f"type {type(values['rules']).__name__} of a {values['quantizer']!r}"
            )
        quantizer = cls()
        for rule in values["rules"]:
            read = Rule.from_dict(rule)
            if read.kind == "module_name":
                quantizer.set_module_name(read.selector, read.config)
            else:
                quantizer._add(read.kind, read.selector, read.config)
        return quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Rewrite every selected attention as one operator: of its variant, or ``scaled_dot_product_attention``.

        Layers inside ``torch.no_grad()`` become part of the graph. Products with a parameter, such as transformers'
        ``Conv1D`` and the ``einsum`` of XLNet, become linears, if a rule configures linears. Linears that read some
        rows of a parameter get a weight of their own. Layers read inputs behind all writes in place. Numbers that
        export kept as tensors are numbers again.

        Raises:
            UnsupportedError: no kernel supports the configuration.
        """
        self.expose_linears(model)
        if self._names(AttentionConfig):
            self._transform_attentions(model)
        read_after_writes(model)
        return model

    def expose_linears(self, model: GraphModule) -> None:
        """The rewrites of ``transform_for_annotation`` but those of attention and writes: what recipes need as well.

        Linears that they do not see would be quantized all the same.
        """
        check_graph(model)
        share_memory_again(model)
        inline_scopes_of_layers(model)
        write_out_scalars(model)
        if self._names(LinearConfig):
            expand_exported_einsum_linears(model)
            expand_exported_products(model)
            if not self.is_qat:  # copies of a parameter would be trained apart
                separate_weights(model)

    def check_dtypes(self, model: GraphModule) -> None:
        """Raise UnsupportedError if a linear to quantize has a dtype without a kernel, before a recipe computes it."""
        for node in model.graph.nodes:
            if is_linear(node) and self.config_for(node) is not None:
                check_dtypes(node, layer_name(node))

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every selected linear and attention of ``model``.

        Raises:
            UnsupportedError: no rule was set, a pattern or type selects no module, or no kernel supports the
                configuration.
        """
        check_graph(model)
        if not self.rules:
            raise UnsupportedError(
                "QFrameworkQuantizer: the quantizer must have rules, got none. Call set_global(static_int8()) or "
                "another set_ method"
            )
        _check_rules_match(self.rules, model)
        shared = SharedObservers()
        self._annotate_linears(model, shared)
        self._annotate_attentions(model, shared)
        return model

    def validate(self, model: GraphModule) -> None:
        """Raise UnsupportedError where no kernel supports an annotation."""
        check_graph(model)
        for node, linear in annotated(model, LinearAnnotation):
            check_linear(node, linear.layer, linear.config)
        for node, attention in annotated(model, AttentionAnnotation):
            check_attention(node, attention.layer, attention.config)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, ObserverOrFakeQuantize]
    ) -> None:
        """Called by torchao with all observers of ``model`` before it inserts them; wraps them for ``is_qat``."""
        if self.is_qat:
            wrap_observers(edge_or_node_to_obs_or_fq)

    def config_for(self, node: Node) -> LinearConfig | AttentionConfig | None:
        """Configuration of the linear or attention ``node``; None for float.

        Layers too small for INT8 stay in float. So do those that choose (graph/routers.py), unless a rule names them.
        """
        if not isinstance(node, Node):
            raise UnsupportedError(
                f"config_for: node must be a torch.fx.Node of an exported model, got {described(node)}"
            )
        kind: Kind = LinearConfig if is_linear(node) else AttentionConfig
        strongest = self._strongest_rule(node, kind)
        config = strongest.config_of(kind) if strongest else None
        if isinstance(config, LinearConfig) and _is_too_small(node, config):
            return None
        if isinstance(config, LinearConfig) and strongest and strongest.kind != "module_name" and chooses(node):
            return None
        return config if config is None else node.meta.get(_OVERRIDE, config)

    def _strongest_rule(self, node: Node, kind: Kind) -> Rule | None:
        selecting = [rule for rule in self.rules if rule.says(kind) and _selects(rule, node)]
        # max() returns the first of equal items, so the latest call must come first
        return max(reversed(selecting), key=lambda rule: _PRECEDENCE.index(rule.kind), default=None)

    def _attention_config(self, node: Node) -> AttentionConfig | None:
        config = self.config_for(node)
        assert config is None or isinstance(config, AttentionConfig)
        return config

    def _transform_attentions(self, model: GraphModule) -> None:
        write_out_of_place(model)
        name_shapes(model)
        erase_unread_results(model)
        expand_einsum(model)
        cast_late(model)
        left: dict[str, list[str]] = {}
        for node in list(model.graph.nodes):
            if is_attention(node) or is_softmax(node):
                config = self._attention_config(node)
                if config is None:
                    continue
                with self._left_in_float(node, left):
                    transform_attention(model, node, layer_name(node), config)
        _note_left_in_float(left)
        model.recompile()

    @contextmanager
    def _left_in_float(self, node: Node, left: dict[str, list[str]]) -> Iterator[None]:
        """Let an attention that no kernel computes stay in float if no rule names it, and add it to ``left``."""
        try:
            yield
        except NoAttentionKernel as error:
            rule = self._strongest_rule(node, AttentionConfig)
            if rule is None or rule.kind != "global":
                raise
            keep_in_float(node)
            add_note(node, error.reason)
            left.setdefault(error.reason, []).append(layer_name(node))

    def _annotate_linears(self, model: GraphModule, shared: SharedObservers) -> None:
        linears = [node for node in model.graph.nodes if is_linear(node)]
        if not linears and self._names(LinearConfig):
            warnings.warn("QFrameworkQuantizer found no aten.linear with a parameter as its weight", stacklevel=3)
        for node in linears:
            config = self.config_for(node)
            if isinstance(config, LinearConfig) and not is_annotated(node):
                annotate_linear(node, layer_name(node), config, shared)

    def _annotate_attentions(self, model: GraphModule, shared: SharedObservers) -> None:
        attentions = self._attentions(model)
        left = any(is_variant(node) or is_softmax(node) for node in model.graph.nodes)
        if not attentions and not left and self._names(AttentionConfig):
            warnings.warn("QFrameworkQuantizer found no attention", stacklevel=3)
        without_kernel: dict[str, list[str]] = {}
        for node in attentions:
            config = self._attention_config(node)
            if config is not None and not is_annotated(node):
                with self._left_in_float(node, without_kernel):
                    annotate_attention(node, layer_name(node), config, shared)
        _note_left_in_float(without_kernel)

    def _attentions(self, model: GraphModule) -> list[Node]:
        """The attentions of ``model``; none if no rule configures attention, so that filters for linears get none."""
        return [node for node in model.graph.nodes if is_attention(node)] if self._names(AttentionConfig) else []

    def _names(self, kind: Kind) -> bool:
        """Whether a rule has a configuration for linears or for attention."""
        return any(rule.config is not None and rule.says(kind) for rule in self.rules)


def _note_left_in_float(left: Mapping[str, list[str]]) -> None:
    """Count the attentions that ``set_global`` selects and no kernel computes, by reason; log each reason once."""
    for reason, layers in left.items():
        others = f" ({len(layers)} in all)" if len(layers) > 1 else ""
        message = f"QFrameworkQuantizer: attention such as {layers[0]!r} stays in float{others}: {reason}"
        for _ in layers:
            fallbacks.note(reason, message)


def _is_static(config: LinearConfig | AttentionConfig | None) -> bool:
    if isinstance(config, AttentionConfig):
        return config.is_static
    return config is not None and not config.activation.dynamic


def override_config(node: Node, config: LinearConfig | AttentionConfig | None) -> None:
    """Let every quantizer that quantizes the linear or attention ``node`` use ``config``, or with None its own again.

    A recipe chooses for each layer this way.
    """
    node.meta.pop(_OVERRIDE, None)
    if config is not None:
        node.meta[_OVERRIDE] = config


def keep_in_float(node: Node) -> None:
    """Let every quantizer leave the linear or attention ``node`` in float, until ``override_config`` says otherwise."""
    node.meta[_OVERRIDE] = None


def is_kept_in_float(node: Node) -> bool:
    """Whether ``keep_in_float`` was called for ``node``, in the exported graph or before it was prepared."""
    return node.meta.get(_OVERRIDE, node) is None


def check_quantizer(quantizer: object, what: str) -> None:
    """Raise UnsupportedError unless ``quantizer`` is a QFrameworkQuantizer."""
    if not isinstance(quantizer, QFrameworkQuantizer):
        raise UnsupportedError(f"{what}: quantizer must be a QFrameworkQuantizer, got {described(quantizer)}")


def _selects(rule: Rule, node: Node) -> bool:
    if rule.kind == "global":
        return True
    if rule.kind == "filter":
        return bool(rule.selector(node))
    if rule.kind == "module_type":
        return not _type_names(rule.selector).isdisjoint(kind for _, kind in module_stack(node))
    return any(fnmatchcase(name, rule.selector) for name in _enclosing(layer_name(node)))


def module_stack(node: Node) -> list[tuple[str, str]]:
    """Qualified name and type of each module around ``node``, outermost first; the model itself is ``""``."""
    if is_softmax(node):  # may be a module inside the one that computes attention
        node = node.all_input_nodes[0]
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (_plain_path(path), kind if isinstance(kind, str) else qualified_name(kind)) for path, kind in stack.values()
    ]


def _plain_path(path: str) -> str:
    return path.removeprefix("L['self']").lstrip(".")


def layer_name(node: Node) -> str:
    """Qualified name of the module that owns the linear or attention ``node``.

    This is the innermost module of the stack, or the owner of the weight if that is further inside: modules such as
    ``nn.MultiheadAttention`` use the parameters of a child without calling it.
    """
    stack = module_stack(node)
    module = stack[-1][0] if stack else ""
    if not is_linear(node):
        return module or node.name
    weight: Any = node.args[1]
    owner = str(weight.target).rpartition(".")[0]
    if not module or owner.startswith(f"{module}."):
        module = owner
    return module or str(weight.target)


def _enclosing(name: str) -> list[str]:
    """``a.b.c`` as ``a``, ``a.b``, ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _type_names(module_type: type) -> set[str]:
    """Names of a type and all its subclasses. Exported graphs hold types by name only."""
    names = {qualified_name(module_type)}
    return names.union(*map(_type_names, type.__subclasses__(module_type)))


def _check_rules_match(rules: list[Rule], model: GraphModule) -> None:
    names, types = _known_modules(model)
    for rule in rules:
        if rule.kind == "module_name" and not any(fnmatchcase(name, rule.selector) for name in names):
            raise UnsupportedError(_no_match(f"set_module_name: pattern {rule.selector!r}", rule.selector, names))
        if rule.kind == "module_type" and types.isdisjoint(_type_names(rule.selector)):
            name = qualified_name(rule.selector)
            raise UnsupportedError(_no_match(f"set_module_type: module_type {name}", name, types))


def module_names(model: GraphModule) -> set[str]:
    """The names that a rule for a module name can match."""
    return _known_modules(model)[0]


def _known_modules(model: GraphModule) -> tuple[set[str], set[str]]:
    names: set[str] = set()
    types: set[str] = set()
    for node in model.graph.nodes:
        for name, kind in module_stack(node):
            names.update(_enclosing(name))
            types.add(kind)
        if is_linear(node):
            names.update(_enclosing(layer_name(node)))
    return names - {""}, types


def _no_match(what: str, wanted: str, known: set[str]) -> str:
    close = difflib.get_close_matches(wanted, sorted(known), n=5, cutoff=0.5)
    shown = close or sorted(known, key=lambda name: (name.count("."), name))[:10]
    names = f"{'Close' if close else 'The model has'}: {', '.join(shown) or 'no modules'}"
    return f"{what} must match a module of the model, got none. {names}"


def _is_too_small(linear: Node, config: LinearConfig) -> bool:
    x, weight = linear.args[:2]
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    return why_too_small(x, weight, config.activation.dynamic) is not None
