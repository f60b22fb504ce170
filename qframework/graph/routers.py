"""Linear layers that choose: routers, whose largest outputs say which experts compute a token. They stay in float.

Rounding moves other layers' results a little. Where two outputs of a router are nearly equal, it sends the token to
another expert, whose result is an entirely different one. A router has few outputs, so that INT8 saves nothing.
"""

from __future__ import annotations

from torch.fx import Node

from qframework.graph.nodes import CASTS, COPIES, VIEWS, argument, fake_value, operation

MOST_OUTPUTS = 1024
"""More are those of a vocabulary, whose layer is worth its INT8, and whose nearly equal tokens are nearly as good."""

WHY = "it chooses, for example experts: rounding would change which of two nearly equal outputs is the largest"

_DIM = {"topk": 2, "argmax": 1, "sort": 1, "argsort": 1, "max": 1}  # which argument of what chooses is the dimension
# What a score goes through before the choice: it is scaled, shifted, masked, or only seen in another way.
_OF_SCORES = {"softmax", "log_softmax", "sigmoid", "sqrt", "tanh", "softplus", "add", "sub", "mul", "div", "relu"}
_PASSES = {*_OF_SCORES, *CASTS, *COPIES, *VIEWS, "masked_fill", "where", "transpose", "permute", "dropout", "detach"}
_MOST_STEPS = 12


def chooses(linear: Node) -> bool:
    """Whether the outputs of ``linear``, few, are what a choice is made among."""
    value = fake_value(linear)
    outputs = value.shape[-1] if value is not None and value.ndim else None
    if not isinstance(outputs, int) or outputs > MOST_OUTPUTS:
        return False
    seen, now = {linear}, [linear]
    for _ in range(_MOST_STEPS):
        users = {user: None for node in now for user in node.users if user not in seen}
        if any(_chooses_among(user, outputs) for user in users):
            return True
        now = [user for user in users if operation(user) in _PASSES]
        seen.update(now)
    return False


def _chooses_among(node: Node, outputs: int) -> bool:
    """Whether a node finds the largest of so many values, and where they are, as ``max`` of pooling does not."""
    name, source = operation(node), node.args[0] if node.args else None
    if name not in _DIM or not isinstance(source, Node) or (x := fake_value(source)) is None:
        return False
    dim = argument(node, _DIM[name], "dim", default=-1 if name in ("topk", "sort", "argsort") else None)
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        return False
    if not isinstance(x.shape[dim], int) or x.shape[dim] != outputs:  # comparing a symbolic size would add a guard
        return False
    places = [user for user in node.users if operation(user) == "getitem" and user.args[1] == 1 and user.users]
    return name in ("argmax", "argsort") or bool(places) or any(user.op == "output" for user in node.users)
