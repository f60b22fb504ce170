"""sage_attention where ``"auto"`` takes PyTorch's attention, since that is faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from qframework import sage_attention, use_sage_attention
from qframework.attention import fallbacks, left_to_pytorch
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention import auto
from qframework.kernels.attention.auto import Hopper, gradient_in_pytorch_is_faster, pytorch_is_faster


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("none",), True),
        (("float",), True),
        (("factors",), False),
        (("bool", True), True),
        (("float", True), False),
    ],
)
def test_on_a_cpu_pytorch_is_faster(given: tuple, expected: bool) -> None:
    """But for relative positions, and gradients of rows of the lowest float, which PyTorch's kernels get wrong."""
    masking, *gradients = given
    assert pytorch_is_faster(torch.zeros(1, 2, 9, 16), 9, 16, masking, None, *gradients) == expected


HOPPER = Hopper(132, True)
# (batch, heads, key heads, tokens, channels), causal, bfloat16, whether "mixed" was the faster one, on an H200
MEASURED = [
    ((4, 16, 16, 4096, 128), False, False, True),
    ((4, 16, 16, 4096, 128), True, False, False),
    ((4, 16, 16, 4096, 128), False, True, True),
    ((4, 16, 16, 4096, 128), True, True, False),
    ((4, 32, 32, 4096, 64), True, False, True),
    ((8, 16, 16, 2048, 128), False, False, False),
    ((8, 32, 32, 2048, 64), True, False, False),
    ((2, 16, 16, 8192, 128), True, False, True),
    ((1, 32, 32, 16384, 64), True, False, True),
    ((5, 16, 16, 3072, 128), True, False, False),
    ((5, 32, 32, 3072, 64), True, False, False),
    ((5, 32, 32, 3072, 64), False, False, True),
    ((4, 32, 8, 4096, 128), True, True, True),
    ((8, 32, 8, 2048, 128), False, True, True),
    ((8, 32, 8, 2048, 128), True, True, False),
    ((4, 16, 16, 4096, 96), False, False, True),
    ((4, 16, 16, 4096, 96), True, False, False),
    ((3, 20, 5, 5000, 80), True, True, True),
]


def gradient_is_pytorchs(sizes, causal, bfloat16, chip=HOPPER, values=None) -> bool:
    batch, heads, key_heads, tokens, channels = sizes
    dtype = torch.bfloat16 if bfloat16 else torch.float16
    query = torch.empty(batch, heads, tokens, channels, dtype=dtype, device="meta")
    key = torch.empty(batch, key_heads, tokens, channels, dtype=dtype, device="meta")
    value = key if values is None else key[..., :values]
    return gradient_in_pytorch_is_faster(query, key, value, causal, chip)


class TestGradientLeftToPyTorch:
    """``backward="mixed"`` with ``"auto"`` on Hopper, where its forward pass must pay for a pass over all data."""

    @pytest.fixture(autouse=True)
    def gluon(self, monkeypatch):
        monkeypatch.setattr(auto.specialized, "HAS_GLUON", True)

    @pytest.mark.parametrize(("sizes", "causal", "bfloat16", "faster"), MEASURED, ids=str)
    def test_as_measured(self, sizes, causal, bfloat16, faster):
        assert gradient_is_pytorchs(sizes, causal, bfloat16) == (not faster)

    def test_calls_that_have_no_fast_forward_or_backward_pass(self):
        sizes = (4, 32, 32, 8192, 64)
        assert not gradient_is_pytorchs(sizes, True, False)
        assert gradient_is_pytorchs((*sizes[:4], 192), True, False)
        assert gradient_is_pytorchs((*sizes[:4], 60), True, False)
        assert gradient_is_pytorchs((1, 1, 1, 8192, 64), True, False)  # too few tiles
        assert gradient_is_pytorchs(sizes, True, False, Hopper(132, cudnn=False))

    def test_elsewhere_it_is_this_packages(self):
        """On other chips and a CPU, and for calls that PyTorch's fused kernels do not take."""
        sizes = (8, 16, 16, 2048, 128)
        assert gradient_is_pytorchs(sizes, False, False)
        assert not gradient_is_pytorchs(sizes, False, False, None)
        assert not gradient_is_pytorchs(sizes, False, False, values=64)
        query = torch.empty(1, 2048, 128, dtype=torch.float16, device="meta")
        assert not gradient_in_pytorch_is_faster(query, query, query, False, HOPPER)
        single = torch.empty(8, 16, 2048, 128, device="meta")
        assert not gradient_in_pytorch_is_faster(single, single, single, False, HOPPER)

    @pytest.mark.parametrize("causal", [False, True])
    def test_pytorch_computes_both_passes(self, causal, monkeypatch):
        """Counted as without a gradient; a named variant, dropout and a log-sum-exp are not left to it."""
        monkeypatch.setattr(left_to_pytorch, "hopper_of", lambda device: HOPPER)
        fallbacks.clear()
        leaves = [torch.randn(2, 3, 9, 16, dtype=torch.float16).requires_grad_() for _ in range(3)]
        out = sage_attention(*leaves, is_causal=causal, backward="mixed")
        expected = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        assert torch.equal(out, expected)
        pairs = [torch.autograd.grad(x.float().square().sum(), leaves) for x in (out, expected)]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*pairs, strict=True))
        assert sum(fallbacks.values()) == 1
        for more in ({"variant": "sage_b"}, {"dropout_p": 0.1}, {"return_lse": True}, {"backward": "int8"}):
            sage_attention(*leaves, is_causal=causal, **({"backward": "mixed"} | more))
        assert sum(fallbacks.values()) == 1


class TestLeftToPyTorch:
    """``"auto"`` where PyTorch's attention is said to be the faster one."""

    @pytest.fixture(autouse=True)
    def faster(self, monkeypatch):
        seen = []
        monkeypatch.setattr(left_to_pytorch, "pytorch_is_faster", lambda *call: seen.append(call) or True)
        return seen

    def operands(self, dtype=torch.float16):
        return [torch.randn(2, 3, 9, 16, dtype=dtype) for _ in range(3)]

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_is_pytorchs(self, layout):
        operands = self.operands()
        given = [x.transpose(1, 2) for x in operands] if layout == "NHD" else operands
        out = sage_attention(*given, is_causal=True, scale=0.2, tensor_layout=layout)
        expected = F.scaled_dot_product_attention(*operands, is_causal=True, scale=0.2)
        assert torch.equal(out, expected.transpose(1, 2) if layout == "NHD" else expected)

    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_a_query_without_keys_gives_zeros(self, kind, faster):
        mask = torch.rand(2, 1, 9, 9) > 0.3
        mask[0, 0, 4] = False
        given = mask if kind == "bool" else torch.zeros(2, 1, 9, 9).masked_fill(~mask, -torch.inf)
        out = sage_attention(*self.operands(), attn_mask=given)
        assert [call[3] for call in faster] == [kind]
        assert (out[0, :, 4] == 0).all()
        assert out.isfinite().all()

    @pytest.mark.parametrize("mask", [torch.linspace(-2, 2, 9), torch.arange(9) > 2, torch.tensor(1.0)], ids=str)
    def test_masks_of_fewer_than_two_dimensions(self, mask):
        operands = self.operands(torch.float32)
        expected = sage_attention(*operands, attn_mask=mask.expand(2, 3, 9, 9))
        torch.testing.assert_close(sage_attention(*operands, attn_mask=mask), expected)

    def test_a_repeated_call_is_not_decided_again(self, faster):
        """And is counted, until something that may decide it changes."""
        fallbacks.clear()
        query, key, value = self.operands(torch.float32)
        expected = F.scaled_dot_product_attention(query, key, value, scale=0.2)
        for _ in range(3):
            assert torch.equal(sage_attention(query, key, value, scale=0.2), expected)
        assert len(faster) == 1
        assert sum(fallbacks.values()) == 3
        fewer = value[:, :, :7]
        with pytest.raises(QFrameworkError, match="tokens"):
            sage_attention(query, key, fewer)
        changes = [
            lambda: sage_attention(query, key, value, is_causal=True),
            lambda: sage_attention(query.half(), key.half(), value.half()),
            lambda: sage_attention(query[:, :, :5], key, value),
            lambda: sage_attention(query, key, value, torch.ones(9, 9, dtype=torch.bool)),
            lambda: sage_attention(query.requires_grad_(), key, value),
        ]
        for made, change in enumerate(changes, start=2):
            change()
            assert len(faster) == made + 1  # one for the call that was refused

    def test_repeated_calls_see_what_surrounds_them(self, faster):
        """Autocast, which changes what is decided on, transforms and forward derivatives."""
        query, key, value = self.operands(torch.float32)
        sage_attention(query, key, value)
        with torch.autocast("cpu", torch.bfloat16):
            assert sage_attention(query, key, value).dtype == torch.bfloat16
        assert [call[0].dtype for call in faster] == [torch.float32, torch.bfloat16]
        with pytest.raises(UnsupportedError, match="transform"):
            torch.func.vmap(lambda x: sage_attention(x, key, value))(query[None])
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="derivative"):
            sage_attention(forward_ad.make_dual(query, query), key, value)

    def test_only_so_many_kinds_are_remembered(self, monkeypatch):
        monkeypatch.setattr(left_to_pytorch, "MAX_KINDS", 2)
        for tokens in range(1, 9):
            sage_attention(*[x[:, :, :tokens] for x in self.operands()])
        assert len(left_to_pytorch.known_kinds) <= 2

    def test_scopes_do_not_intercept_it(self):
        operands = self.operands()
        with use_sage_attention():
            out = F.scaled_dot_product_attention(*operands)
        assert torch.equal(out, F.scaled_dot_product_attention(*operands))

    def test_gradients_are_pytorchs(self, faster):
        operands = [x.requires_grad_() for x in self.operands(torch.float32)]
        sage_attention(*operands).square().sum().backward()
        assert faster[0][5] is True
        assert all(x.grad is not None for x in operands)

    def test_is_said_once_and_counted(self, caplog, no_fallbacks_yet):
        for _ in range(3):
            sage_attention(*self.operands())
        assert dict(fallbacks) == {"PyTorch's attention is faster on this cpu device": 3}
        assert len([record for record in caplog.records if "'auto' takes it" in record.getMessage()]) == 1

    def test_arguments_are_checked_as_ever(self):
        query, key, value = self.operands()
        with pytest.raises(QFrameworkError, match="key must have query's head dimension 16, got 8"):
            sage_attention(query, key[..., :8], value)

    @pytest.mark.parametrize("given", [{"variant": "sage_b"}, {"return_lse": True}])
    def test_variants_and_sums_are_not(self, given, faster):
        sage_attention(*self.operands(), **given)
        assert not faster
