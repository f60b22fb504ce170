"""observers.py and histogram_observers.py against NumPy and FP64: thresholds, growth, zeros, NaN, dtypes, copying."""

import copy
import pickle

import numpy as np
import pytest
import torch

from qframework.errors import CalibrationError
from qframework.numerics import MIN_AMAX, MIN_SCALE, affine_parameters, dequantize, quantize, weight_scale
from qframework.quantizer.config import ActivationConfig
from qframework.quantizer.observers import activation_observer, mse_weight_scale
from qframework.quantizer.output_error import Parameters, fake_quantized

HISTOGRAMS = ["percentile", "mse", "entropy"]
PER_TENSOR = ["minmax", "moving_average", *HISTOGRAMS]
PER_TOKEN = ["minmax", "moving_average"]
KINDS = [("per_tensor", name) for name in PER_TENSOR] + [("per_token", name) for name in PER_TOKEN]
# What torchao hands to the constructor besides our own arguments.
SPEC = {"dtype": torch.int8, "quant_min": -127, "quant_max": 127, "is_dynamic": False}


def make(granularity="per_tensor", observer="minmax", positions=(5,), **args):
    config = ActivationConfig(granularity, False, observer, args)
    qscheme = torch.per_tensor_symmetric if granularity == "per_tensor" else None
    return activation_observer(config, "blocks.0.fc1", positions).with_args(**SPEC, qscheme=qscheme)()


def observe(observer, *batches):
    for batch in batches:
        assert observer(batch) is batch
    return observer


def heavy_tailed(n=20_000, seed=0):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x[::997] *= 12
    return x


def test_minmax_is_the_largest_magnitude():
    observer = observe(make(), torch.tensor([1.0, -3.0]), torch.tensor([2.0]))
    assert float(observer.scale()) == np.float32(3) / np.float32(127)


def affine(observer="minmax", **args):
    config = ActivationConfig(observer=observer, observer_args=args, symmetric=False)
    return activation_observer(config, "blocks.0.fc1", ()).with_args(**SPEC, qscheme=torch.per_tensor_affine)()


def test_a_zero_point_uses_the_whole_range():
    observer = observe(affine(), torch.tensor([-0.17, 3.0]), torch.tensor([1.0, 5.0]))
    scale, zero_point = observer.scale(), observer.zero_point()
    assert float(scale) == pytest.approx(5.17 / 254, rel=1e-6)
    assert zero_point.dtype == torch.int32
    assert int(zero_point) == round(-127 + 0.17 / float(scale))
    assert observer.calculate_qparams()[1].tolist() == [int(zero_point)]
    q = quantize(torch.tensor([-0.17, 0.0, 5.0]), scale, zero_point)
    assert q.tolist() == [-127, int(zero_point), 127]


@pytest.mark.parametrize(
    ("values", "zero_point"), [([2.0, 4.0], -127), ([-4.0, -2.0], 127), ([-3.0, 3.0], 0), ([0.0, 0.0, 1e-3], -127)]
)
def test_a_range_always_holds_zero(values, zero_point):
    observer = observe(affine(), torch.tensor(values))
    assert int(observer.zero_point()) == zero_point
    largest = max(map(abs, values))
    back = dequantize(quantize(torch.tensor(values), observer.scale(), observer.zero_point()), observer.scale())
    assert (
        dequantize(torch.tensor(zero_point, dtype=torch.int8), observer.scale(), zero_point=observer.zero_point()) == 0
    )
    assert float(back.abs().max()) <= 2.01 * largest


def test_a_moving_average_with_a_zero_point_averages_both_ends():
    observer = observe(
        affine("moving_average", averaging_constant=0.5), torch.tensor([-1.0, 4.0]), torch.tensor([0.0, 8.0])
    )
    assert float(observer.scale()) == pytest.approx((6.0 + 0.5) / 254)
    assert int(observer.zero_point()) == round(-127 + 0.5 / (6.5 / 254))


@pytest.mark.parametrize("observer", ["percentile", "mse"])
def test_clipping_with_a_zero_point(observer):
    """One value in 20,000 is large; both ends stay where values end, or at the threshold."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.gelu(torch.randn(20_000, generator=generator))
    x[7] = 1000.0 if observer == "percentile" else 40.0
    made = observe(affine(observer, **({"percentile": 99.99} if observer == "percentile" else {})), x[:9000], x[9000:])
    scale, zero_point = made.scale(), made.zero_point()
    assert int(zero_point) > -127
    low, high = (torch.tensor(float(q)) - zero_point for q in (-127, 127))
    assert float(low * scale) == pytest.approx(float(x.min()), abs=float(scale))
    ordinary = x.sort().values[-10:-1]
    largest = float(ordinary[-1]) * 1.2 if observer == "percentile" else 39.0
    assert float(ordinary[0]) - float(scale) <= float(high * scale) <= largest


def test_mse_with_a_zero_point_is_minimal_over_a_scan():
    x = torch.nn.functional.gelu(4 * heavy_tailed())
    made = observe(affine("mse"), x)
    found = fake_quantized(x, Parameters(made.scale(), made.zero_point()))
    errors = []
    for share in torch.linspace(0.05, 1.0, 60):
        scale, zero_point = affine_parameters(x.min(), x.max() * share)
        errors.append(float((fake_quantized(x, Parameters(scale, zero_point)) - x).square().sum()))
    assert float((found - x).square().sum()) <= 1.03 * min(errors)


def test_a_zero_point_needs_data():
    with pytest.raises(CalibrationError, match=r"blocks\.0\.fc1.*never observed"):
        affine().zero_point()
    with pytest.raises(CalibrationError, match="finite"):
        observe(affine(), torch.tensor([1.0, float("nan")])).zero_point()


def test_moving_average_follows_the_definition():
    observer = observe(
        make(observer="moving_average", averaging_constant=0.25), *map(torch.tensor, ([-4.0, 1], [2.0, 3]))
    )
    low, high = -4 + 0.25 * (2 - -4), 1 + 0.25 * (3 - 1)
    assert float(observer.scale()) == pytest.approx(max(-low, high) / 127, rel=2**-22)


def test_per_token_has_one_scale_for_each_position():
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    observer = observe(make("per_token", positions=(4, 5)), x[:1], x[1:])
    expected = np.abs(x.numpy()).max(axis=(0, 3))[..., None] / np.float32(127)
    assert observer.scale().shape == (4, 5, 1)
    assert np.array_equal(observer.scale().numpy(), expected)


def test_per_token_without_batch():
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    scale = observe(make("per_token", positions=(5,)), x).scale()
    assert torch.equal(scale, x.abs().amax(1, keepdim=True) / 127)


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9, 100.0])
def test_percentile_against_numpy(percentile):
    x = heavy_tailed()
    observer = observe(make(observer="percentile", percentile=percentile), *x.chunk(4))
    magnitude = np.abs(x.double().numpy())
    # The histogram knows a value to one of its bins, at most 2 max / bins wide; NumPy interpolates between neighbours.
    width = 2 * magnitude.max() / 16384
    low = np.percentile(magnitude, percentile, method="lower") - width
    high = np.percentile(magnitude, percentile, method="higher") + width
    assert low <= float(observer.scale()) * 127 <= high


def squared_error(x, threshold):
    scale = threshold / 127
    return float((x - np.clip(np.round(x / scale), -127, 127) * scale).__pow__(2).sum())


@pytest.mark.parametrize("distribution", ["normal", "heavy_tailed", "uniform", "one_sided"])
def test_mse_is_minimal_over_a_scan(distribution):
    n, generator = 100_000, torch.Generator().manual_seed(1)
    x = {
        "normal": lambda: torch.randn(n, generator=generator),
        "heavy_tailed": lambda: heavy_tailed(n),
        "uniform": lambda: torch.rand(n, generator=generator) * 2 - 1,
        "one_sided": lambda: torch.nn.functional.gelu(torch.randn(n, generator=generator) * 3),
    }[distribution]()
    observer = observe(make(observer="mse"), *x.chunk(3))
    exact = x.double().numpy()
    scan = min(squared_error(exact, t) for t in np.geomspace(0.05, 1, 150) * np.abs(exact).max())
    # Candidates are 1/16 octave apart, where the error curve is flat to well under a percent; sampling noise of the
    # rounding errors of 100 000 values adds sqrt(4/5 / 100000) = 0.3 percent, of which a scan takes the luckiest.
    assert squared_error(exact, float(observer.scale()) * 127) <= scan * 1.015


def test_mse_clips_an_outlier_that_minmax_keeps():
    # Keeping an outlier A costs n (A / 127)^2 / 12 of rounding, clipping it at most A^2: n = 10^6 is 5 times past even.
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    x[0] = 40.0
    assert float(observe(make(observer="mse"), x).scale()) < 0.5 * float(observe(make(), x).scale())


def divergence(counts, n):
    """KL(P || Q) bin by bin, written from the definition."""
    p = [float(c) for c in counts[:n]]
    p[-1] += float(counts[n:].sum())
    levels = [int(np.round((j + 0.5) * 127 / n)) for j in range(n)]
    q = [0.0] * n
    for level in set(levels):
        members = [j for j in range(n) if levels[j] == level and p[j] > 0]
        for j in members:
            q[j] = sum(float(counts[i]) for i in range(n) if levels[i] == level) / len(members)
    if sum(q) == 0:
        return np.inf
    total_p, total_q, result = sum(p), sum(q), 0.0
    for pj, qj in zip(p, q, strict=True):
        if pj > 0:
            result += np.inf if qj == 0 else pj / total_p * np.log(pj / total_p / (qj / total_q))
    return result


def test_entropy_against_the_definition():
    x = heavy_tailed(4000)
    observer = observe(make(observer="entropy", bins=256), x)
    counts = np.histogram(np.abs(x.double().numpy()), bins=256, range=(0, float(x.abs().max())))[0]
    top = int(np.nonzero(counts)[0].max()) + 1
    best = min(range(128, top + 1), key=lambda n: divergence(counts, n))
    assert float(observer.scale()) * 127 == pytest.approx(best * float(x.abs().max()) / 256, rel=1e-5)


def test_entropy_keeps_the_bulk_and_clips_the_outlier():
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    x[0] = 40.0
    threshold = float(observe(make(observer="entropy"), x).scale()) * 127
    assert 2.5 < threshold < 10


@pytest.mark.parametrize("observer", HISTOGRAMS)
def test_growth_keeps_every_count(observer):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(1000, generator=generator) * 3**k for k in (0, 2, 1, 5)]
    seen = observe(make(observer=observer, bins=256), *batches)
    limit = float(seen.limit)
    x = torch.cat(batches).abs().double().numpy()
    assert limit >= x.max() > limit / 2
    # The limit is a power-of-two multiple of the first maximum, so bins of earlier ranges fall whole into later ones.
    assert np.log2(limit / float(batches[0].abs().max())) % 1 == pytest.approx(0, abs=1e-6)
    expected = np.histogram(x, bins=256, range=(0, limit))[0]
    # A value within float32 rounding of an edge may fall on either side of it.
    near_edge = np.abs(x / limit * 256 - np.round(x / limit * 256)) < 1e-4
    assert np.abs(np.cumsum(seen.counts.numpy()) - np.cumsum(expected)).max() <= near_edge.sum()
    assert int(seen.counts.sum()) == 4000


@pytest.mark.parametrize("observer", HISTOGRAMS)
def test_zeros_first_then_data(observer):
    x = heavy_tailed(5000)
    expected = observe(make(observer=observer), x).scale()
    assert torch.equal(observe(make(observer=observer), torch.zeros(8), x).scale(), expected)
    # far more zeros than data, before, between and after
    many = observe(make(observer=observer), torch.zeros(100_000), *x.chunk(2), torch.full((100_000,), 1e-30)).scale()
    assert torch.equal(many, observe(make(observer=observer), *x.chunk(2)).scale())


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token"])
def test_a_moving_average_leaves_zeros_out(granularity):
    batches = torch.randn(3, 2, 5, 6, generator=torch.Generator().manual_seed(0)).unbind()
    zeros = torch.zeros(2, 5, 6)
    expected = observe(make(granularity, "moving_average"), *batches).scale()
    found = observe(make(granularity, "moving_average"), zeros, batches[0], zeros + 1e-30, *batches[1:], zeros).scale()
    assert torch.equal(found, expected)


def test_a_moving_average_of_positions_leaves_out_positions_of_zeros():
    first, second = torch.ones(2, 2, 5, 6)
    second[:, 3] = 0
    scale = observe(make("per_token", "moving_average"), first, 3 * second).scale().flatten() * 127
    assert scale.tolist() == pytest.approx([1.02, 1.02, 1.02, 1, 1.02])


def test_percentile_is_that_of_the_nonzero_values():
    x = heavy_tailed()
    sparse = torch.zeros(50 * x.numel())
    sparse[::50] = x
    assert torch.equal(
        observe(make(observer="percentile"), sparse).scale(), observe(make(observer="percentile"), x).scale()
    )


@pytest.mark.parametrize("x", [torch.full((64,), 3e38), torch.full((64,), 2e-16), torch.tensor([1e-30, 3e38])])
@pytest.mark.parametrize("observer", PER_TENSOR)
def test_extreme_magnitudes_stay_finite(observer, x):
    scale = float(observe(make(observer=observer), x[:1], x).scale())
    assert MIN_SCALE <= scale <= 3e38 / 127 * (1 + 2**-22)


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-20, -0.9 * MIN_AMAX])
@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_zeros_give_no_scale(granularity, observer, value):
    seen = observe(make(granularity, observer), torch.full((2, 5, 3), value))
    assert seen.observed()
    assert not seen.has_scale()
    with pytest.raises(CalibrationError, match=r"'blocks.0.fc1'.*always zero during calibration\. Calibrate with data"):
        seen.scale()


@pytest.mark.parametrize("observer", PER_TOKEN)
def test_positions_of_zeros_take_the_largest_scale_of_the_others(observer):
    x = torch.ones(2, 5, 3)
    x[:, 1], x[:, 3], x[:, 4] = 0, 8, 1e-30
    scale = observe(make("per_token", observer), x).scale()
    assert torch.equal(scale, torch.tensor([1.0, 8, 1, 8, 8]).reshape(5, 1) / 127)


@pytest.mark.parametrize("value", [3.0, -3.0])
@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_constants_give_a_scale(granularity, observer, value):
    scale = observe(make(granularity, observer), torch.full((2, 5, 3), value)).scale()
    # a histogram knows a value to one of its bins, and the constant is the upper end of the last one
    assert scale.flatten().tolist() == pytest.approx([3 / 127] * scale.numel(), rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_nonfinite_is_remembered(granularity, observer, bad):
    x = torch.ones(2, 5, 3)
    x[1, 2, 0] = bad
    seen = observe(make(granularity, observer), torch.ones(2, 5, 3), x, torch.ones(2, 5, 3))
    assert bool(seen.nonfinite())
    with pytest.raises(CalibrationError, match=r"'blocks.0.fc1'.*NaN or infinity"):
        seen.scale()


@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_nothing_observed(granularity, observer):
    fresh = observe(make(granularity, observer), torch.empty(0, 5, 3))
    assert not bool(fresh.nonfinite())
    with pytest.raises(CalibrationError, match=r"'blocks.0.fc1'.*never observed\. Run calibrate"):
        fresh.calculate_qparams()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_low_precision_activations_count_as_their_float32_values(granularity, observer, dtype):
    x = heavy_tailed(2 * 5 * 40).reshape(2, 5, 40).to(dtype)
    low, high = (observe(make(granularity, observer), v) for v in (x, x.float()))
    assert low.scale().dtype == torch.float32
    assert torch.equal(low.scale(), high.scale())


@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_strided_and_requiring_grad(granularity, observer):
    x = heavy_tailed(2 * 40 * 5).reshape(2, 40, 5).transpose(1, 2).requires_grad_()
    seen = observe(make(granularity, observer), x)
    assert torch.equal(seen.scale(), observe(make(granularity, observer), x.detach().contiguous()).scale())
    assert not seen.scale().requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_copies_carry_on_alone(granularity, observer, copied):
    x = heavy_tailed(2 * 5 * 40).reshape(2, 5, 40)
    seen = observe(make(granularity, observer), x)
    before = seen.scale().clone()
    other = observe(copied(seen), 9 * x)
    assert torch.equal(seen.scale(), before)
    assert (other.scale() > before).all()


@pytest.mark.parametrize(("granularity", "observer"), KINDS)
def test_state_dict_restores(granularity, observer):
    seen = observe(make(granularity, observer), heavy_tailed(2 * 5 * 40).reshape(2, 5, 40))
    restored = make(granularity, observer)
    restored.load_state_dict(seen.state_dict())
    assert torch.equal(restored.scale(), seen.scale())


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_mse_weight_scale_is_minimal_over_a_scan(granularity):
    weight = heavy_tailed(3 * 10_000).reshape(3, 10_000) * torch.tensor([1e-12, 1, 1e6])[:, None]
    scale = mse_weight_scale(weight, granularity).double().numpy()
    rows = weight.double().numpy() if granularity == "per_channel" else weight.double().reshape(1, -1).numpy()
    assert scale.shape == (len(rows),)
    for row, found in zip(rows, scale, strict=True):
        scan = min(squared_error(row, t) for t in np.geomspace(0.125, 1, 100) * np.abs(row).max())
        # The sum of 10 000 rounding errors scatters by sqrt(4/5 / 10000) = 0.9 percent; the scan takes the luckiest.
        assert squared_error(row, found * 127) <= scan * 1.03


def test_mse_weight_scale_of_zeros_and_nothing():
    assert torch.equal(mse_weight_scale(torch.zeros(2, 3), "per_channel"), torch.full((2,), MIN_SCALE))
    for granularity in ("per_tensor", "per_channel"):
        empty = torch.empty(3, 0)
        assert torch.equal(mse_weight_scale(empty, granularity), weight_scale(empty, granularity))


def test_a_margin_widens_the_range_by_a_share():
    x = torch.tensor([[-2.0, 0.5], [4.0, 1.0]])
    assert make(margin=0.25)(x) is x
    observers = [make(margin=margin) for margin in (0.0, 0.25)]
    both_ends = [affine(margin=margin) for margin in (0.0, 0.25)]
    for observer in (*observers, *both_ends):
        observer(x)
    assert float(observers[1].scale()) == pytest.approx(1.25 * float(observers[0].scale()))
    assert float(both_ends[1].scale()) == pytest.approx(1.25 * float(both_ends[0].scale()))
    assert both_ends[1].zero_point() == both_ends[0].zero_point()
    assert float(observers[1].magnitude()) == 4.0  # what was seen
