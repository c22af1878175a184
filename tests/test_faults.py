# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Models at their worst: a run ends with finite draws, or does not begin.

One model has all faults, and its argument says which: it is compiled once a kernel.
"""

from functools import cache

import numpy as np
import pytest

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro_pdmp import BPS, Boomerang, ZigZag

pytestmark = pytest.mark.usefixtures("quickly_compiled")

#: BPS moves as one of the others and turns as the other: not in every run of tests
KERNELS = [Boomerang, ZigZag, pytest.param(BPS, marks=pytest.mark.slow)]
MAX_GRAD, NUM = 300, 100
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 2))
Y = X @ [1.0, -1.0] + RNG.normal(size=20)


def gaussian(w):
    return 0.5 * jnp.sum(w**2)


def regression(w, s, x, y):
    residuals = y - x @ w
    fit = jnp.sum(0.5 * (residuals / s) ** 2 + jnp.log(s))
    return fit + 0.5 * jnp.sum((w / 10) ** 2)


#: potential energy of w, next to a half-normal scale s, and whether draws are flagged
FAULTS = {
    "regression": (regression, None),
    # Not a number at places that nothing announces.
    "nan": (lambda w, *_: gaussian(w) + jnp.where(wave(w) > 0, jnp.nan, 0), True),
    "infinite": (lambda w, *_: gaussian(w) + jnp.where(wave(w) > 0, jnp.inf, 0), True),
    "nan gradient": (lambda w, *_: gaussian(w) + 0 * jnp.sqrt(-wave(w)), True),
    "nan beyond": (lambda w, *_: gaussian(w) + 0 * jnp.sum(jnp.sqrt(1.5 - w)), True),
    # Gradients up to the largest numbers, and none at all.
    "exploding": (lambda w, *_: jnp.sum(jnp.cosh(30 * w)), False),
    "cliff": (lambda w, *_: gaussian(w) + 1e6 * jnp.sum(jnp.maximum(w - 1, 0)), None),
    "flat": (lambda w, *_: 0.5 * jnp.sum(jnp.maximum(jnp.abs(w) - 1e3, 0) ** 2), False),
    "steps": (lambda w, *_: jnp.sum(jnp.floor(w**2)), None),
    # There is no such law; whether its draws need too many gradients is chance.
    "nothing": (lambda w, *_: 0.0 * jnp.sum(w), None),
    # Tails.
    "Cauchy": (lambda w, *_: jnp.sum(jnp.log1p(w**2)), False),
    "heavier": (lambda w, *_: 0.6 * jnp.sum(jnp.log1p(w**2)), False),
    # Scales.
    "small": (lambda w, *_: gaussian(w / 1e-10), False),
    "large": (lambda w, *_: gaussian(w / 1e10), False),
    "both": (lambda w, *_: gaussian(w / jnp.array([1e-6, 1e6])), False),
    "smallest": (lambda w, *_: gaussian(w * 1e15), False),
}
NAMES = list(FAULTS)
SCALES = {"small": 1e-10, "large": 1e10, "both": [1e-6, 1e6], "smallest": 1e-15}


def wave(w):
    """Positive in one place of twenty."""
    return jnp.sin(40 * w[0]) - 0.99


def model(kind, x, y):
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    s = numpyro.sample("s", dist.HalfNormal(1))
    energy = lax.switch(kind, [fn for fn, _ in FAULTS.values()], w, s, x, y)
    numpyro.factor("energy", -energy)


@cache
def program(kernel):
    """A whole run of two chains, from the data to draws and what is known of them."""
    kernel = kernel(model, max_grad=MAX_GRAD)

    def run(keys, *args):
        state = kernel.init(keys, NUM, None, args, {})

        def draw(state, _):
            state = kernel.sample(state, args, {})
            sites = jax.vmap(kernel.postprocess_fn(args, {}))(state.z)
            return state, (sites, state.diverging, state.num_grad)

        state, _ = lax.scan(draw, state, length=NUM)
        return lax.scan(draw, state, length=NUM)[1]

    # Compiled quickly rather than well.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def run(kernel, fault, x=X, y=Y):
    """Draws and flags of a run that has ended as it should."""
    keys = random.split(random.key(0), 2)
    data = (jnp.asarray(a, jnp.float32) for a in (x, y))
    kind = jnp.asarray(NAMES.index(fault))
    draws, diverging, num_grad = jax.device_get(program(kernel)(keys, kind, *data))
    assert all(np.all(np.isfinite(a)) for a in draws.values())
    assert np.all(draws["s"] >= 0)
    assert np.all(num_grad <= MAX_GRAD + 1)
    return draws, diverging


def assert_flags(expected, diverging):
    if expected is not None:
        assert np.any(diverging) == expected


@pytest.mark.parametrize("fault", NAMES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_potential(kernel, fault):
    draws, diverging = run(kernel, fault)
    assert_flags(FAULTS[fault][1], diverging)
    if fault in SCALES:
        ratio = draws["w"].std((0, 1)) / SCALES[fault]
        assert np.all((0.7 < ratio) & (ratio < 1.4))


#: columns and observations of a regression, and whether draws are flagged; where the
#: observations allow for no noise, the posterior has no density to speak of
DATA = {
    "outlier": (X, np.where(np.arange(20) == 3, 1e8, Y), False),
    "huge outlier": (X, np.where(np.arange(20) == 3, 1e15, Y), None),
    "constant columns": (np.ones((20, 2)), Y, False),
    "zeros": (np.zeros((20, 2)), np.zeros(20), True),
    "equal rows": (np.tile(X[:1], (20, 1)), np.tile(Y[:1], 20), True),
    "no noise": (X, X @ [1.0, -1.0], None),
    "large columns": (X * 1e12, Y, None),
    "small columns": (X * 1e-12, Y, False),
    "overflow": (X * 1e25, Y * 1e25, None),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kernel", KERNELS)
def test_data(kernel, data):
    x, y, flagged = DATA[data]
    assert_flags(flagged, run(kernel, "regression", x, y)[1])


def test_boundaries():
    """Densities without bounds at the ends of their supports."""

    def model():
        numpyro.sample("p", dist.Beta(0.05, 0.05))
        numpyro.sample("q", dist.Dirichlet(jnp.full(3, 0.05)))
        u = numpyro.sample("u", dist.Uniform(-1, 1))
        numpyro.sample("y", dist.Normal(u, 0.1), obs=jnp.full(50, 1.5))

    # With a given metric there is no descent, which compiles in half the time.
    kernel = BPS(model, inverse_mass_matrix=np.ones(4))
    mcmc = MCMC(kernel, num_warmup=200, num_samples=200, progress_bar=False)
    mcmc.run(random.key(0))
    draws = mcmc.get_samples()
    assert all(np.all(np.isfinite(a)) for a in draws.values())
    assert np.all((draws["p"] >= 0) & (draws["p"] <= 1) & (abs(draws["u"]) <= 1))
    np.testing.assert_allclose(draws["q"].sum(-1), 1, rtol=1e-5)


def rows(y, size=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y), subsample_size=size):
        y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def test_no_rows():
    with pytest.raises(AssertionError, match="size of plate should be positive"):
        BPS(rows).init(random.key(0), 10, None, (jnp.zeros(0),), {})


def test_outlier_that_the_start_does_not_see():
    y = jnp.zeros(10_000).at[1].set(1e6)
    state = BPS(rows).init(random.key(0), 10, None, (y, 10), {})
    # Ten thousand standard deviations from where all other rows are.
    mode = state.adapt_state.scale.center
    np.testing.assert_allclose(mode, 1e6 / 10_001, rtol=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_missing_value(value):
    """In a row that is not among those on which a start is looked for."""
    y = jnp.zeros(10_000).at[1].set(value)
    with pytest.raises(ValueError, match="rows with missing or infinite values"):
        BPS(rows).init(random.key(0), 10, None, (y, 10), {})
