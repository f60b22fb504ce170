"""torchao's own PT2E test utilities, and composition with torchao's quantizers."""

import pytest
import torch
from quantizer_models import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNEL,
    LINEAR,
    OUR_DEQUANTIZE,
    OUR_DYNAMIC_QUANTIZE,
    OUR_QUANTIZE,
    QUANTIZE,
    Attention,
    Mlp,
    count,
    linears,
    quantized,
)
from torch import nn
from torchao.quantization.pt2e.quantizer import ComposableQuantizer
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torchao.testing.pt2e.utils import PT2EQuantizationTestCase

from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, dynamic_int8, qattn_paper, static_int8

# XNNPACKQuantizer, torchao's reference for other quantizers, announces that it moved to ExecuTorch.
pytestmark = pytest.mark.filterwarnings("ignore:XNNPACKQuantizer is deprecated:UserWarning")
FOLDED = torch.ops.quantized_decomposed.quantize_per_channel.default


class TestTorchAO(PT2EQuantizationTestCase):
    """Export, prepare, calibrate, convert and count nodes as torchao's tests do."""

    def check(self, model, config, occurrence, order=None, dynamic=False):
        self._test_quantizer(
            model.eval(),
            (torch.randn(3, 5, 8),),
            QFrameworkQuantizer().set_global(config),
            {LINEAR: occurrence.pop("linears"), FOLDED: 0, **occurrence},
            order,
            export_with_dynamic_shape=dynamic,
        )

    def test_static_per_tensor(self):
        occurrence = {"linears": 2, QUANTIZE: 2, DEQUANTIZE: 2, DEQUANTIZE_CHANNEL: 2}
        gelu = torch.ops.aten.gelu.default
        order = [QUANTIZE, DEQUANTIZE, LINEAR, gelu, QUANTIZE, DEQUANTIZE, LINEAR]
        self.check(Mlp(), static_int8(), occurrence, order)

    def test_static_per_tensor_weights_per_tensor(self):
        # two activations and two weights are dequantized, the quantization of the weights is folded
        occurrence = {"linears": 2, QUANTIZE: 2, DEQUANTIZE: 4, DEQUANTIZE_CHANNEL: 0}
        self.check(Mlp(), static_int8(weight="per_tensor"), occurrence)

    def test_static_per_token(self):
        occurrence = {"linears": 2, OUR_QUANTIZE: 2, OUR_DEQUANTIZE: 2, DEQUANTIZE_CHANNEL: 2, QUANTIZE: 0}
        order = [OUR_QUANTIZE, OUR_DEQUANTIZE, LINEAR, OUR_QUANTIZE, OUR_DEQUANTIZE, LINEAR]
        self.check(Mlp(), static_int8("per_token"), occurrence, order, dynamic=True)

    def test_dynamic(self):
        occurrence = {"linears": 2, OUR_DYNAMIC_QUANTIZE: 2, OUR_DEQUANTIZE: 2, DEQUANTIZE_CHANNEL: 2, QUANTIZE: 0}
        order = [OUR_DYNAMIC_QUANTIZE, OUR_DEQUANTIZE, LINEAR, OUR_DYNAMIC_QUANTIZE, OUR_DEQUANTIZE, LINEAR]
        self.check(Mlp(), dynamic_int8(), occurrence, order, dynamic=True)

    def test_paper(self):
        occurrence = {"linears": 2, QUANTIZE: 4, DEQUANTIZE: 4, DEQUANTIZE_CHANNEL: 2}
        self.check(Mlp(), qattn_paper(), occurrence, [QUANTIZE, DEQUANTIZE, LINEAR, QUANTIZE, DEQUANTIZE])

    def test_shared_input(self):
        # one quantize; torchao gives each consumer a dequantize of its own
        occurrence = {"linears": 3, QUANTIZE: 1, DEQUANTIZE: 3, DEQUANTIZE_CHANNEL: 3}
        self.check(Attention(), static_int8(), occurrence)


class Embedder(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(12, 8), nn.Linear(8, 12)
        if tied:
            self.linear.weight = self.embedding.weight

    def forward(self, tokens):
        return self.linear(self.embedding(tokens))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mlp, self.head = nn.Conv2d(3, 8, 4, 4), Mlp(), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.mlp(self.proj(x).flatten(2).transpose(1, 2)))


def test_composes_with_a_convolution_quantizer():
    """torchao's quantizer takes the remaining layers, the convolution and the head, with its range -128..127."""
    torch.manual_seed(0)
    model, x = Patches(), torch.randn(2, 3, 16, 16)
    theirs = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    ours = QFrameworkQuantizer().set_global(static_int8()).set_module_name("head", None)
    converted = quantized(model, ComposableQuantizer([ours, theirs]), x)
    [convolution] = [n for n in converted.graph.nodes if n.target == torch.ops.aten.conv2d.default]
    assert convolution.args[0].target == DEQUANTIZE
    ranges = [(n.args[0].target, n.args[0].args[3]) for n in linears(converted)]
    assert ranges == [(DEQUANTIZE, -127)] * 2 + [(DEQUANTIZE, -128)]
    assert sqnr_db(model(x), converted(x)) > 20


@pytest.mark.parametrize("order", [1, -1])
def test_linears_of_another_quantizer_are_left_alone(order):
    model, x = Mlp(), torch.randn(3, 5, 8)
    theirs = XNNPACKQuantizer().set_module_name("fc1", get_symmetric_quantization_config())
    ours = QFrameworkQuantizer().set_global(dynamic_int8())
    nodes = count(quantized(model, ComposableQuantizer([theirs, ours][::order]), x))
    assert nodes[OUR_DYNAMIC_QUANTIZE] == (1 if order == 1 else 2)


@pytest.mark.parametrize("tied", [False, True])
def test_composes_with_embeddings(tied):
    model, tokens = Embedder(tied), torch.randint(0, 12, (2, 5))
    ours = QFrameworkQuantizer().set_global(static_int8())
    converted = quantized(model, ComposableQuantizer([EmbeddingQuantizer(), ours]), tokens)
    [embedding] = [n for n in converted.graph.nodes if n.target == torch.ops.aten.embedding.default]
    assert embedding.args[0].target == DEQUANTIZE_CHANNEL
    assert sqnr_db(model(tokens), converted(tokens)) > 25
