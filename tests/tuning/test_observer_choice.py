"""One observer for each static layer, by noise; one for all layers that read a tensor; zero points apart."""

from __future__ import annotations

from qframework.tuning.assignment import OBSERVERS, Assignment, Meanings
from qframework.tuning.layers import Layer
from qframework.tuning.observer_choice import uniform_kernels, with_best_observers
from qframework.tuning.search import Cost

MEANINGS = Meanings(observers={name: OBSERVERS[name] for name in ("mse", "percentile", "zero_point")})


def costs_of(layers: list[Layer], *noises: dict[str, float]) -> dict:
    return {
        layer.key: {"float": Cost(3.0), **{name: Cost(1.0, noise) for name, noise in each.items()}}
        for layer, each in zip(layers, noises, strict=True)
    }


def kept(layers: list[Layer], *noises: dict[str, float]) -> list[set[str]]:
    found = with_best_observers(layers, costs_of(layers, *noises), MEANINGS)
    return [set(found[layer.key]) - {"float"} for layer in layers]


def test_the_observer_of_least_noise_is_kept() -> None:
    a, b = Layer("linear", "a", reads="x"), Layer("linear", "b", reads="y")
    noises = {"static": 3.0, "static mse": 1.0, "static percentile": 2.0, "dynamic": 0.5}
    assert kept([a, b], noises, noises | {"static": 0.1}) == [{"static mse", "dynamic"}, {"static", "dynamic"}]


def test_layers_that_read_one_tensor_have_one_observer() -> None:
    """Alone, ``a`` would take mse and ``b`` the percentile; together the configured one is better than both."""
    noises = (
        {"static": 2.0, "static mse": 1.0, "static percentile": 9.0},
        {"static": 2.0, "static mse": 9.0, "static percentile": 1.0},
    )
    a, b = Layer("linear", "a", reads="x"), Layer("linear", "b", reads="x")
    assert kept([a, b], *noises) == [{"static"}, {"static"}]
    b.reads = "y"
    assert kept([a, b], *noises) == [{"static mse"}, {"static percentile"}]


def test_a_zero_point_which_takes_time_is_a_choice_beside_the_best_observer() -> None:
    layer = Layer("linear", "a", reads="x")
    noises = {"static": 3.0, "static mse": 2.0, "static percentile": 4.0, "static zero_point": 1.0}
    assert kept([layer], noises) == [{"static mse", "static zero_point"}]


def test_a_layer_without_static_choices_keeps_the_others() -> None:
    layer = Layer("attention", "a", static=False)
    assert kept([layer], {"sage_b": 1.0}) == [{"sage_b"}]


def test_all_layers_on_the_same_kernels() -> None:
    """With and without zero points, where a layer has both; attention has none, and some layers nothing static."""
    layers = [Layer("linear", name, reads=name) for name in "abc"]
    layers += [Layer("attention", "d"), Layer("attention", "e", static=False)]
    costs = costs_of(
        layers,
        {"static": 2.0, "static mse": 1.0, "static zero_point": 0.5},
        {"static": 1.0, "static mse": 2.0, "static zero_point": 3.0, "dynamic": 0.1},
        {"static": 1.0},
        {"static": 3.0, "static percentile": 1.0, "sage_b": 0.1},
        {"sage_b": 1.0},
    )
    found = uniform_kernels(layers, with_best_observers(layers, costs, MEANINGS), MEANINGS)
    assert [list(each.values()) for each in found] == [
        ["static mse", "static", "static", "static percentile", "float"],
        ["static zero_point", "static zero_point", "static", "static percentile", "float"],
    ]
    alone = costs_of(layers, *[{"static": 1.0} if layer.static else {} for layer in layers])
    assert uniform_kernels(layers, alone, Meanings()) == [
        Assignment({layer.key: "static" if layer.static else "float" for layer in layers})
    ]
