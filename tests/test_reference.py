import pytest
import torch
import torch.nn.functional as F

from invariant_adam import reference
from invariant_adam.scaling import Hyperparameters, scale

H = Hyperparameters(lr=0.02, betas=(0.9, 0.98), weight_decay=0.1)


def problem(n, seed=0):
    """n micro-batches of logistic regression behind a tanh, as functions w -> gradient, and a start."""
    generator = torch.Generator().manual_seed(seed)

    def micro_batch():
        x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        y = torch.rand(5, generator=generator, dtype=torch.float64)

        def grad(w):
            w = w.detach().requires_grad_()
            loss = F.binary_cross_entropy_with_logits(torch.tanh(x * w).sum(1), y)
            return torch.autograd.grad(loss, w)[0]

        return grad

    return torch.randn(6, generator=generator, dtype=torch.float64), [micro_batch() for _ in range(n)]


def assert_equal(a, b, tolerance=1e-14):
    for x, y in ((a.w, b.w), (a.m, b.m), (a.v, b.v)):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    assert a.debias == pytest.approx(b.debias, rel=tolerance)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("algorithm", [reference.micro_adam, reference.standard_adam, reference.invariant_adam])
def test_one_micro_batch_is_torch_adam(algorithm, decoupled):
    w, grads = problem(40)
    s = reference.start(w)
    p = torch.nn.Parameter(w.clone())
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    opt = cls([p], lr=H.lr, betas=H.betas, eps=1e-8, weight_decay=H.weight_decay)
    for grad in grads:
        s = algorithm(s, [grad], H, decoupled=decoupled)
        p.grad = grad(p)
        opt.step()
        torch.testing.assert_close(s.w, p.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(s.m, opt.state[p]["exp_avg"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(s.v, opt.state[p]["exp_avg_sq"], rtol=1e-12, atol=1e-12)


def test_standard_adam_on_a_mini_batch_is_torch_adamw_on_the_mean_gradient():
    w, grads = problem(40)
    s, p = reference.start(w), torch.nn.Parameter(w.clone())
    opt = torch.optim.AdamW([p], lr=H.lr, betas=H.betas, weight_decay=H.weight_decay)
    for i in range(0, 40, 4):
        s = reference.standard_adam(s, grads[i : i + 4], H)
        p.grad = torch.stack([grad(p) for grad in grads[i : i + 4]]).mean(0)
        opt.step()
    torch.testing.assert_close(s.w, p.detach(), rtol=1e-12, atol=1e-12)


def test_micro_adam_is_standard_adam_of_each_micro_batch():
    w, grads = problem(6)
    s = reference.start(w)
    one_by_one = s
    for grad in grads:
        one_by_one = reference.standard_adam(one_by_one, [grad], H)
    assert_equal(reference.micro_adam(s, grads, H), one_by_one)


def test_equal_micro_batches_leave_nothing_to_tell_apart():
    w, (grad,) = problem(1)
    s = reference.start(w)
    assert_equal(reference.invariant_adam(s, [grad] * 4, H), reference.standard_adam(s, [grad] * 4, H))


def test_squaring_first_adds_the_variance_between_micro_batches():
    w, grads = problem(5)
    s = reference.start(w)
    g = torch.stack([grad(s.w) for grad in grads])
    gap = reference.invariant_adam(s, grads, H).v - reference.standard_adam(s, grads, H).v
    torch.testing.assert_close(gap, (1 - H.betas[1]) * g.var(0, correction=0), rtol=1e-12, atol=1e-15)


def test_the_first_moment_is_the_same_in_both():
    w, grads = problem(5)
    s = reference.start(w)
    assert torch.equal(reference.invariant_adam(s, grads, H).m, reference.standard_adam(s, grads, H).m)


def test_a_constant_gradient_is_recovered_by_debiasing_whatever_the_history():
    g = torch.tensor([0.5, -2.0], dtype=torch.float64)
    s = reference.start(torch.zeros(2))
    for kappa in (1, 5, 2, 16, 3):
        s = reference.invariant_adam(s, [lambda w: g] * kappa, scale(*H, from_batch=1, to_batch=kappa))
    torch.testing.assert_close(s.m / (1 - s.debias[0]), g, rtol=1e-14, atol=0)
    torch.testing.assert_close(s.v / (1 - s.debias[1]), g.square(), rtol=1e-14, atol=0)


def test_the_exponential_rule_debiases_alike_at_equal_samples():
    w, grads = problem(12)
    s = reference.start(w)
    small = reference.micro_adam(s, grads, H)
    large = s
    for i in range(0, 12, 4):
        large = reference.invariant_adam(large, grads[i : i + 4], scale(*H, from_batch=1, to_batch=4))
    assert large.debias == pytest.approx(small.debias, rel=1e-14)


def test_all_gradients_of_an_update_are_taken_at_the_same_weights():
    seen = []

    def grad(w):
        seen.append(w.clone())
        return w

    reference.invariant_adam(reference.start(torch.ones(2)), [grad] * 3, H)
    assert all(torch.equal(w, seen[0]) for w in seen)


def test_l2_decay_is_part_of_each_micro_batch_gradient():
    w, grads = problem(3)
    s = reference.start(w)
    inside = [lambda w, grad=grad: grad(w) + H.weight_decay * w for grad in grads]
    plain = H._replace(weight_decay=0.0)
    assert_equal(reference.invariant_adam(s, grads, H, decoupled=False), reference.invariant_adam(s, inside, plain))


def test_sgd_is_torch_sgd_with_decay():
    w, grads = problem(4)
    h = H._replace(weight_decay=0.0)
    p = torch.nn.Parameter(w.clone())
    p.grad = torch.stack([grad(w) for grad in grads]).mean(0)
    torch.optim.SGD([p], lr=h.lr).step()
    torch.testing.assert_close(reference.sgd(w, grads, h), p.detach(), rtol=1e-14, atol=1e-14)
    decayed = reference.sgd(w, grads, H) - reference.sgd(w, grads, h)
    torch.testing.assert_close(decayed, -H.lr * H.weight_decay * w, rtol=1e-12, atol=1e-14)


def test_the_start_is_a_copy_in_float64():
    w = torch.ones(2)
    s = reference.start(w)
    s.w.add_(1)
    assert s.w.dtype == torch.float64
    assert torch.equal(w, torch.ones(2))
