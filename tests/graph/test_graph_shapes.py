"""Shapes in messages."""

import pytest
import torch

from qframework.backend.report import LayerReport
from qframework.graph.shapes import short_shapes


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("got shape (s77, s0*s53, 32)", "got shape (s77, s0*s53, 32)"),
        ("got (s77*(((s0 - 1)//7)), 49, s53) and (2, 3)", "got (*, 49, s53) and (2, 3)"),
        ("got torch.Size([2, 3]), (Max(1, (s0 + 127)//128), u14)", "got torch.Size([2, 3]), (*, u14)"),
        ("a (logged, such as (s77, 4*FloorDiv(s0 + 3, 4)), once) b", "a (logged, such as (s77, *), once) b"),
        ("a function forward(input), of s77 sizes", "a function forward(input), of s77 sizes"),
        ("not closed (s77, s0*s1*s2*s3*s4", "not closed (s77, s0*s1*s2*s3*s4"),
        ("a long number (1234567890123456, 2)", "a long number (1234567890123456, 2)"),
    ],
)
def test_long_formulas_of_symbols_are_a_star(text, wanted) -> None:
    assert short_shapes(text) == wanted
    assert LayerReport("fc", False, "linear", text).reason == wanted


def test_sizes_of_an_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.unfold(x, 3).mT

    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        Model(), (torch.ones(2, 4, 16, 16),), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},)
    )
    shape = tuple(program.graph.output_node().args[0][0].meta["val"].shape)
    batch, tokens, channels = short_shapes(str(shape)).strip("()").split(", ")
    assert (batch[0], tokens, channels) == ("s", "*", "36")
