"""What leaves PyTorch's dispatcher reads the values of a BlockTensor, or says that it has no float memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from qframework.errors import UnsupportedError
from qframework.training import BlockTensor, quantize_blocks

LEAVING: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "numpy force": lambda x: x.numpy(force=True),
    "asarray": np.asarray,
    "another dtype": lambda x: np.asarray(x, dtype=np.float64),
    "tolist": lambda x: x.tolist(),
    "DLPack to NumPy": np.from_dlpack,
    "DLPack to PyTorch": lambda x: torch.from_dlpack(x).numpy(),
}


@pytest.mark.parametrize("scope", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("way", LEAVING)
def test_values_leave_as_floats(way: str, scope: Any) -> None:
    with scope():
        x = quantize_blocks(torch.randn(2, 5, 64))
        wanted = x.dequantize().numpy()
        for each, part in ((x, wanted), (x[:, 1:], wanted[:, 1:])):
            assert np.array_equal(np.asarray(LEAVING[way](each)), part)


@pytest.mark.parametrize("way", ["numpy", "DLPack to NumPy"])
def test_tensors_with_a_gradient_are_refused_as_floats_are(way: str) -> None:
    x = torch.randn(2, 64, requires_grad=True)
    for each in (x, quantize_blocks(x)):
        with pytest.raises((RuntimeError, BufferError), match=r"require.{0,2} grad"):
            LEAVING[way](each)


def test_shared_memory_holds_the_blocks() -> None:
    x = quantize_blocks(torch.randn(2, 64))
    wanted = x.dequantize()
    assert x.share_memory_() is x
    assert x.q.is_shared()
    assert x.scale.is_shared()
    assert torch.equal(x.dequantize(), wanted)


def test_foreign_kernels_get_an_error_instead_of_a_null_pointer() -> None:
    """Triton's launcher and C++ extensions ask for the address."""
    x = quantize_blocks(torch.randn(2, 64))
    for each in (x, copy.deepcopy(x), x.detach(), torch.zeros_like(x)):
        assert isinstance(each, BlockTensor)
        with pytest.raises(UnsupportedError, match=r"no float memory, got one of shape \(2, 64\).*x.dequantize\(\)"):
            each.data_ptr()
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            to_dlpack(each)
