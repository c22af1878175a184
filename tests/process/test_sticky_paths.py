# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Sticky paths spend the right share of time at zero, and broken ones do not."""

from functools import cache
import itertools

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

from numpyro_pdmp.process import (
    STICKY,
    BoomerangProcess,
    BouncyParticle,
    ExactBound,
    Interpolation,
    Scale,
    Skeleton,
    ZigZagProcess,
    simulate,
)
from numpyro_pdmp.process.motion import elliptic_flow, linear_flow
from numpyro_pdmp.process.randomness import exponential
from numpyro_pdmp.process.sticky import MovingPart, Sticky, hit_times

CHAINS, EVENTS = 32, 2000
# Two correlated coordinates, and one on its own.
PRECISION = np.array([[1.5, 0.9, 0], [0.9, 1.2, 0], [0, 0, 0.6]], np.float32)
MEAN = np.array([0.6, -0.8, 0.7], np.float32)
KAPPA = np.array([0.5, 0.3, 0.2], np.float32)
SCALE = Scale(jnp.array([0.4, -0.2, 0.0]), jnp.array([1.3, 0.8, 1.0]))


def zigzag_bound(x, v):
    return v * (PRECISION @ (x - MEAN)) + 0.01, v * (PRECISION @ v)


PROCESSES = {
    # In the sampled variable the velocities of ZigZag are +-1 only without a scale.
    "zigzag": (ZigZagProcess(), ExactBound(zigzag_bound), None),
    "bps": (BouncyParticle(), "interpolation", SCALE),
    "boomerang": (BoomerangProcess(), Interpolation(t_init=0.3, offset=0.5), SCALE),
}


def enumerated():
    """Inclusion probabilities from the integrals over all eight subspaces."""
    force, total, included = PRECISION @ MEAN, 0.0, np.zeros(3)
    for active in itertools.product([False, True], repeat=3):
        active = np.array(active)
        precision = PRECISION[np.ix_(active, active)]
        b = force[active]
        mass = np.exp(0.5 * b @ np.linalg.solve(precision, b))
        mass *= (2 * np.pi) ** (b.size / 2) / np.linalg.det(precision) ** 0.5
        mass /= np.prod(KAPPA[~active])
        total, included = total + mass, included + mass * active
    return included / total


def make_run(name):
    sampler, scheme, scale = PROCESSES[name]

    def potential(x):  # a new function each time: what was compiled is not used again
        return 0.5 * (x - MEAN) @ PRECISION @ (x - MEAN)

    def run(rng_key, kappa):
        return simulate(
            potential,
            sampler,
            rng_key,
            position=jnp.full(3, 0.3),
            num_events=EVENTS,
            event_time=scheme,
            scale=scale,
            kappa=kappa,
        )[0]

    # Short runs: compiling them takes longer than they do.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.vmap(run, in_axes=(0, None)), compiler_options=options)


intact_run = cache(make_run)


def shares(run, kappa=KAPPA):
    """Shares of time in which coordinates move: mean over chains, and its error."""
    path = run(random.split(random.PRNGKey(1), CHAINS), kappa)
    share = np.asarray(jax.vmap(Skeleton.inclusion)(path))
    return path, share.mean(0), share.std(0) / CHAINS**0.5


@pytest.mark.parametrize("name", PROCESSES)
def test_time_at_zero(name):
    path, share, error = shares(intact_run(name))
    assert (error < 0.01).all()
    # A path starts with everything moving, which is worth a few thousandths.
    np.testing.assert_array_less(np.abs(share - enumerated()), 4 * error + 0.004)
    frozen = np.asarray(path.frozen)
    assert (np.asarray(path.positions)[frozen] == 0).all()
    # Nothing but freezing and thawing changes what is frozen, one at a time.
    changes = (frozen[:, 1:] != frozen[:, :-1]).sum(-1)
    assert ((changes == 1) == (path.kinds[:, 1:] == STICKY)).all()
    assert (changes <= 1).all()
    x = np.asarray(jax.vmap(lambda p: p.discretize(2000))(path))
    np.testing.assert_allclose((x != 0).mean((0, 1)), share, atol=0.01)
    mean = np.asarray(jax.vmap(Skeleton.mean)(path)).mean(0)
    np.testing.assert_allclose(x.mean((0, 1)), mean, atol=0.01)


def jump_in_all(self, z, v, gradient, index, noise):
    """A frozen coordinate takes part in the reflection."""
    return self._sampler.jump(z, v, gradient, index, noise)


def refresh_of_another_law(self, v, noise):
    new = self._sampler.refresh(v, noise)
    return jnp.where(self._frozen, 2 * new, new)


def next_at_any_speed(self, z, v, frozen, uniform):
    """Thawing does not depend on the velocity."""
    time, which = intact_next(self, z, jnp.where(frozen, 1.0, v), frozen, uniform)
    return time, which


intact_next = Sticky.next
BROKEN = {
    "jump": (MovingPart, "jump", jump_in_all),
    "refresh": (MovingPart, "refresh", refresh_of_another_law),
    "next": (Sticky, "next", next_at_any_speed),
}


@pytest.mark.parametrize(
    ("what", "name"),
    [(what, "bps") for what in BROKEN] + [("kappa", name) for name in PROCESSES],
)
def test_a_broken_path_is_noticed(what, name, monkeypatch):
    run, kappa = intact_run(name), 2 * KAPPA
    if what in BROKEN:
        monkeypatch.setattr(*BROKEN[what])
        run, kappa = make_run(name), KAPPA
    _, share, error = shares(run, kappa)
    deviation = (np.abs(share - enumerated()) - 0.004) / error
    assert deviation.max() > 8


@pytest.mark.parametrize(
    ("flow_name", "flow"), [("linear", linear_flow), ("elliptic", elliptic_flow)]
)
def test_hit_times(flow_name, flow):
    rng = np.random.default_rng(0)
    z, v, target = jnp.asarray(rng.normal(size=(3, 400)))
    time = hit_times(flow_name, z, v, target)
    reached = np.isfinite(time)
    assert 0 < reached.sum() < 400 and (time > 0).all()
    there = flow(z, v, time)[0]
    np.testing.assert_allclose(there[reached], target[reached], atol=1e-5)
    # Not before, and those that never do stay on one side.
    until = jnp.where(reached, time, 2 * jnp.pi)
    for part in np.linspace(0.01, 0.99, 50):
        between = flow(z, v, part * until)[0] - target
        assert (np.sign(between) == np.sign(z - target)).all()
    # One that just left comes back after the whole arc, or never.
    again = hit_times(flow_name, target, v, target)
    assert (again > 0).all()
    assert np.isinf(again).all() == (flow_name == "linear")


def test_exponential_clocks_choose_by_rate():
    uniform = random.uniform(random.PRNGKey(0), (4000, 2))
    sticky = Sticky(KAPPA, BouncyParticle(), SCALE)
    v, frozen = jnp.array([1.0, -2.0, 0.5]), jnp.array([True, True, False])
    zero = SCALE.whiten(jnp.zeros(3)).at[2].set(-5.0)
    run = jax.jit(jax.vmap(lambda u: sticky.next(zero, v, frozen, u)))
    time, which = run(uniform)
    rates = KAPPA[:2] * np.abs(v[:2]) * SCALE.factor[:2]
    # The third is on its way to zero: ten units.
    expected = np.mean(np.minimum(exponential(uniform[:, 0], rates.sum()), 10))
    np.testing.assert_allclose(time.mean(), expected, rtol=1e-4)
    share = (which == 0).sum() / (which != 2).sum()
    np.testing.assert_allclose(share, rates[0] / rates.sum(), atol=0.03)
    assert ((which == 2) == (time >= 10)).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kappa": -1.0}, "kappa must be positive"),
        ({"kappa": jnp.ones(2)}, "kappa has shape"),
        ({"kappa": 1.0, "scale": Scale(jnp.zeros(3), jnp.eye(3))}, "diagonal"),
        ({"kappa": 1.0, "event_time": "euler"}, "no path to zero"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        simulate(
            lambda x: 0.5 * x @ x,
            ZigZagProcess(),
            random.PRNGKey(0),
            position=jnp.ones(3),
            **kwargs,
        )
