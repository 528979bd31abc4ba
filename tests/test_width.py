"""Neuron removal against brute force and plain optimal brain surgeon."""

import itertools

import pytest
import torch

from gccompress.linalg import Weighted
from gccompress.width import order_neurons, refit
from tests.test_linalg import matrix


def loss_without(down: Weighted, kept: torch.Tensor) -> float:
    """Return the loss of keeping some inputs, refitted."""
    full = torch.zeros_like(down.weight)
    full[:, kept] = refit(down, kept, "w")
    return down.loss(full)


@pytest.mark.parametrize("block", [1, 3, 16])
def test_predicted_losses_are_those_of_the_refitted_weights(block: int) -> None:
    down = matrix(5, 11)
    order = order_neurons(down, "w", block)
    assert sorted(order.removed.tolist()) == list(range(11))
    assert float(order.losses[0]) == 0.0
    for width in range(1, 12):
        predicted = float(order.losses[11 - width])
        assert loss_without(down, order.kept(width)) == pytest.approx(predicted, abs=1e-9)
    assert float(order.losses[11]) == pytest.approx(down.loss(torch.zeros_like(down.weight)))


def test_the_first_removal_is_the_best_single_one() -> None:
    down = matrix(5, 9, seed=4)
    order = order_neurons(down, "w", 1)
    every = [
        loss_without(down, torch.tensor([i for i in range(9) if i != gone])) for gone in range(9)
    ]
    assert every[int(order.removed[0])] == pytest.approx(min(every))


def test_one_at_a_time_is_near_the_best_set_and_blocks_are_near_that() -> None:
    for seed in range(5):
        down = matrix(4, 8, seed=10 * seed)
        best = min(
            loss_without(down, torch.tensor(kept)) for kept in itertools.combinations(range(8), 5)
        )
        single = float(order_neurons(down, "w", 1).losses[3])
        assert best - 1e-9 <= single <= 1.5 * best


def test_refit_is_a_least_squares_solution() -> None:
    down = matrix(5, 9)
    kept = torch.tensor([0, 2, 3, 7])
    w = refit(down, kept, "w").requires_grad_()
    d = down.weight.clone()
    d[:, kept] = d[:, kept] - w
    (0.5 * ((down.a @ d) * (d @ down.g)).sum()).backward()
    assert w.grad is not None and float(w.grad.abs().max()) < 1e-9


def test_a_neuron_that_is_a_copy_of_another_goes_first_and_costs_nothing() -> None:
    x = torch.randn(400, 6, dtype=torch.float64, generator=torch.manual_seed(0))
    x[:, 4] = 2 * x[:, 1]
    w = torch.randn(5, 6, dtype=torch.float64)
    g = x.T @ x / 400
    g.diagonal().add_(1e-9)
    down = Weighted(w, g, torch.eye(5, dtype=torch.float64))
    order = order_neurons(down, "w", 1)
    assert int(order.removed[0]) in (1, 4)
    assert float(order.losses[1]) < 1e-6 * down.loss(torch.zeros_like(w))


def test_dead_neurons_go_first() -> None:
    down = matrix(5, 8)
    down.weight[:, 3] = 0.0
    down.weight[:, 6] = 0.0
    g = torch.eye(8, dtype=torch.float64)
    order = order_neurons(Weighted(down.weight, g, down.a), "w", 2)
    assert set(order.removed[:2].tolist()) == {3, 6}
    assert float(order.losses[2]) == pytest.approx(0.0, abs=1e-12)


def test_what_is_given_is_left_as_it_was() -> None:
    down = matrix(5, 12, seed=3)
    before = [one.clone() for one in (down.weight, down.g, down.a)]
    order_neurons(down, "w", 4)
    refit(down, torch.tensor([1, 2, 5]), "w")
    for one, was in zip((down.weight, down.g, down.a), before, strict=True):
        assert torch.equal(one, was)
