"""Contrastive losses against their formulas and limits, in float64."""

import math

import pytest
import torch

from hf_xformers.core.contrastive import (
    absent,
    draw_answers,
    info_nce,
    match,
    nce_loss,
    negative_sampling_loss,
    ranking_loss,
    softmax_loss,
    unigram_noise,
)
from tests.helpers import close


def scores(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_formulas_by_hand():
    positive, negative, log_q = scores(3), scores(3, 4, seed=1), -scores(3, 4, seed=2).abs() - 1
    log_q_positive = -scores(3, seed=3).abs() - 1
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for row in range(3):
        s, others = float(positive[row]), negative[row].tolist()
        expected[0, row] = sum(max(0.0, 1 - s + t) for t in others)
        expected[1, row] = -math.log(math.exp(s) / (math.exp(s) + sum(map(math.exp, others))))
        expected[2, row] = -math.log(sigmoid(s - math.log(4 * math.exp(log_q_positive[row]))))
        for t, q in zip(others, log_q[row].tolist(), strict=True):
            expected[2, row] -= math.log(1 - sigmoid(t - math.log(4 * math.exp(q))))
        expected[3, row] = -(math.log(sigmoid(s)) + sum(math.log(sigmoid(-t)) for t in others))
    padded = torch.cat([negative, torch.full((3, 2), absent(torch.float64), dtype=torch.float64)], dim=1)
    padded_q = torch.cat([log_q, torch.full((3, 2), -math.inf, dtype=torch.float64)], dim=1)
    for wrong, q in ((negative, log_q), (padded, padded_q)):
        found = (
            ranking_loss(positive, wrong),
            softmax_loss(positive, wrong),
            nce_loss(positive, wrong, log_q_positive, q),
            negative_sampling_loss(positive, wrong),
        )
        close(torch.stack(found), expected)
    one = softmax_loss(positive, negative[:, :1])
    close(one, torch.nn.functional.softplus(negative[:, 0] - positive))
    # sig(s - log(k q)) is 1/2 at s = log(k q).
    half = nce_loss(torch.tensor(math.log(0.6)), torch.full((2,), -99.0), torch.tensor(math.log(0.3)), torch.zeros(2))
    assert half.item() == pytest.approx(math.log(2), abs=1e-6)


def test_nce_is_right_at_the_law_of_the_data():
    """With s = log p the expected gradient is zero, every draw enumerated."""
    law = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    noise = torch.full((5,), 0.2, dtype=torch.float64)
    model = law.log().clone().requires_grad_()
    draws = torch.cartesian_prod(*[torch.arange(5)] * 3)
    losses = nce_loss(model[draws[:, 0]], model[draws[:, 1:]], noise.log()[draws[:, 0]], noise.log()[draws[:, 1:]])
    (losses * law[draws[:, 0]] * noise[draws[:, 1]] * noise[draws[:, 2]]).sum().backward()
    close(model.grad, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs q > 0 of every answer"):
        nce_loss(scores(1), scores(1, 1), scores(1), torch.tensor([[-math.inf]]))


def test_nce_with_much_uniform_noise_learns_as_the_softmax():
    """Every answer 2000 times as noise: the direction of the gradient is that of the softmax over all answers."""
    model = scores(6, seed=5)
    model = (model - model.logsumexp(0)).requires_grad_()
    wrong = torch.arange(6).repeat(2000)
    q = torch.full((1, len(wrong)), -math.log(6), dtype=torch.float64)
    (nce,) = torch.autograd.grad(nce_loss(model[2][None], model[wrong][None], q[:, 0], q).sum(), model)
    (full,) = torch.autograd.grad(-model.log_softmax(0)[2], model)
    assert torch.nn.functional.cosine_similarity(nce, full, dim=0) > 0.999


def test_info_nce_in_batches():
    there = torch.ones(8, dtype=torch.bool)
    found = match(torch.zeros(8, 3), torch.zeros(8, 3), there)
    assert info_nce(found.scores, found.own, there).mean().item() == pytest.approx(2.079441, abs=1e-6)
    a, b = scores(4, 3), scores(4, 3, seed=1)
    there = torch.tensor([True, True, False, True])
    found = match(a, b, there, scale=2.0, keys=torch.tensor([7, 8, 7, 7]))
    close(found.scores[:, there], 2 * a @ b[there].T)
    # Equal texts are no wrong answers, absent ones none either.
    assert found.wrong().tolist() == [
        [False, True, False, False],
        [True, False, False, True],
        [False, True, False, False],
        [False, True, False, False],
    ]
    share = torch.tensor([2**0.75 / 2, 1, 0, 2**0.75 / 2], dtype=torch.float64)
    close(found.law(0.75), share / share.sum())
    # The same constant everywhere changes nothing; the gradient of the right score is p - 1.
    s = scores(4, 4, seed=2).requires_grad_()
    own, every = torch.arange(4), torch.ones(4, dtype=torch.bool)
    close(info_nce(s + 3, own, every), info_nce(s, own, every))
    info_nce(s, own, every).sum().backward()
    close(s.grad.diagonal(), s.softmax(-1).diagonal() - 1)
    # Copies of the right answer that count as wrong bound the loss by the log of their number.
    twins = torch.cat([s[:, :1]] * 3, dim=1)
    assert (info_nce(twins, torch.zeros(4, dtype=torch.long), every) >= math.log(3) - 1e-12).all()


def test_noise_laws_and_draws():
    law = unigram_noise(torch.tensor([16, 0, 81]))
    close(law, torch.tensor([8, 0, 27]).double() / 35)
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(draw_answers(law, uniform), minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] / 20000 - 8 / 35) < 4 * math.sqrt(8 / 35 * 27 / 35 / 20000)
    edges = draw_answers(torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-24]))
    assert edges.tolist() == [1, 1, 2, 2]
