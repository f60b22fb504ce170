"""Arithmetic in place gets a result of its own only where nothing else sees the write."""

from __future__ import annotations

import operator

import pytest
import torch

from qframework.graph.rewrites.out_of_place import write_out_of_place
from qframework.graph.writes import writes_in_place


def rewritten(function, *inputs):
    """The graph of a function that Dynamo captured, rewritten, and how often it writes in place; results are equal."""
    found = []

    def backend(gm, example_inputs):
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in example_inputs]
        expected = gm(*copies)
        write_out_of_place(gm)
        gm.graph.lint()
        gm.recompile()
        again = [x.clone() if isinstance(x, torch.Tensor) else x for x in example_inputs]
        for ours, wanted in zip(gm(*again), expected, strict=True):
            assert torch.equal(ours, wanted)
            assert ours.dtype == wanted.dtype
            assert ours.stride() == wanted.stride()
        assert all(torch.equal(one, other) for one, other in zip(copies, again, strict=True)), "writes to inputs"
        found.append(gm)
        return gm.forward

    torch.compile(function, backend=backend, dynamic=False)(*inputs)
    (gm,) = found
    return gm, sum(writes_in_place(node) for node in gm.graph.nodes)


def chain(x, y):
    score = x * 2
    score += y
    score -= y.cos()
    score *= 3
    score /= 2
    return score


def by_an_operator_without_its_overload(x, y):
    return torch.ops.aten.mul_(x * 2, y) + 1


def transposed(x, y):
    score = x @ x
    score += y.T
    return score


def test_arithmetic_on_a_result_that_nothing_else_reads_gets_a_result_of_its_own():
    gm, writes = rewritten(chain, torch.randn(4, 4), torch.randn(4, 4))
    assert writes == 0
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert [each for each in targets if each in (operator.add, operator.sub, operator.mul, operator.truediv)] == [
        operator.mul, operator.add, operator.sub, operator.mul, operator.truediv
    ]  # fmt: skip


def test_an_operand_in_another_order_changes_no_strides():
    _, writes = rewritten(transposed, torch.randn(4, 4), torch.randn(4, 4))
    assert writes == 0


def to_an_input(x, y):
    x += y
    return x * 2


def to_what_is_read_again(x, y):
    score = x * 2
    other = score.view(-1)
    score += y
    return score, other


def to_a_view(x, y):
    score = x * 2
    row = score[0]
    row += y[0]
    return row, score


def to_a_narrower_dtype(x, y):
    score = x.half() * 2
    score += y
    return score


def to_a_larger_shape(x, y):
    score = x * 2
    score += y[0]
    return score


def without_reading_the_result(x, y):
    score = x * 2
    size = score.cos()
    score.masked_fill_(y > 0, -1e9)
    score.view(-1).clamp_(-3, 3)
    return score, size + score


def to_what_was_read_by_a_view_before(x, y):
    score = x * 2
    size = score.view(-1).cos()
    score += y
    return score, size


def to_rows_then_to_all(x, y):
    score = x * 2
    row = score.view(2, -1)[0]
    score *= y
    row.neg_()
    return score, row


def without_gradients(x, y):
    score = x * y
    with torch.no_grad():
        score.mul_(2)
    return (score * 3,)


def replaced(x, y):
    """As MViTv2 adds its relative positions."""
    score = x @ y
    score[:, 0:] = (score[:, 0:].view(2, 2, 4) + y.view(2, 2, 4)).view(4, 4)
    copied = y * 2
    copied[...] = score
    copied += 1
    return score.softmax(-1), copied


def copied_into_another_order(x, y):
    score = (x @ y).t()
    score.copy_(y)
    return (score + x,)


def copied_into_a_part(x, y):
    score = x @ y
    score[:, 1:] = y[:, 1:]
    return (score + x,)


def copied_after_a_part_was_kept(x, y):
    score = x @ y
    whole = score[:]
    score.copy_(y)
    return (whole + x,)


def to_a_view_with_gaps(x, y):
    """As Funnel hides relative positions of its first token."""
    part = (x @ x).view(2, 8)[:, 1:].view(2, 7)[:, :6]
    part *= y[:2, :1]
    return (part + x.view(2, 8)[:, :6],)


def to_a_view_with_gaps_that_is_returned(x, y):
    part = (x @ x)[:, :3]
    part *= 2
    return (part,)


def to_a_view_with_gaps_that_is_read_again(x, y):
    whole = x @ x
    part = whole[:, :3]
    again = whole.T
    part *= 2
    return part + 1, again + 1


def to_a_view_with_gaps_and_then_below_a_view(x, y):
    part = (x @ x)[:, :3]
    part *= 2
    row = part[0]
    part += y[:, :3]
    return part + x[:, :3], row + 1


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (to_a_view_with_gaps, 0),
        (to_a_view_with_gaps_that_is_returned, 1),
        (to_a_view_with_gaps_that_is_read_again, 1),
        (to_a_view_with_gaps_and_then_below_a_view, 2),
        (by_an_operator_without_its_overload, 1),
        (replaced, 0),
        (copied_into_another_order, 1),
        (copied_into_a_part, 1),
        (copied_after_a_part_was_kept, 0),
        (without_reading_the_result, 1),
        (to_what_was_read_by_a_view_before, 0),
        (to_rows_then_to_all, 2),
        (without_gradients, 0),
        (to_an_input, 1),
        (to_what_is_read_again, 1),
        (to_a_view, 1),
        (to_a_narrower_dtype, 1),
        (to_a_larger_shape, 0),
    ],
)
def test_only_writes_that_nothing_else_sees_are_replaced(function, writes):
    assert rewritten(function, torch.randn(4, 4), torch.randn(4, 4))[1] == writes


def test_operators_of_exports_are_replaced():
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return chain(x, y)

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    exported = torch.export.export(Model(), (x, y)).module()
    assert any(node.target is torch.ops.aten.add_.Tensor for node in exported.graph.nodes)
    assert rewritten(exported, x, y)[1] == 0


def test_what_a_scope_without_gradients_writes_keeps_its_gradient():
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert rewritten(without_gradients, x, y)[1] == 1


def test_sizes_may_be_symbols():
    found = []

    def backend(gm, example_inputs):
        write_out_of_place(gm)
        found.append(sum(writes_in_place(node) for node in gm.graph.nodes))
        return gm.forward

    x, y = torch.randn(4, 5), torch.randn(4, 5)
    assert torch.equal(torch.compile(chain, backend=backend, dynamic=True)(x, y), chain(x, y))
    assert found == [0]
