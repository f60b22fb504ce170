"""sage_attention where ``"auto"`` takes PyTorch's attention, since that is faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from qframework import sage_attention, use_sage_attention
from qframework.attention import fallbacks, left_to_pytorch
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.auto import pytorch_is_faster


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
