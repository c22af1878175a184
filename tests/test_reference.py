# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro_pdmp.find_map import MAP
from numpyro_pdmp.hessian import (
    fisher_diagonal,
    hessian_dense,
    hessian_diagonal,
    hessian_low_rank,
)
from numpyro_pdmp.process import LowRankScale, Scale
from numpyro_pdmp.reference import laplace_reference, reference_scale

pytestmark = pytest.mark.usefixtures("quickly_compiled")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(100, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]]))
Y = X @ jnp.asarray([1.0, -1.0]) + jnp.asarray(0.5 * RNG.normal(size=100))


def linear(x=X, y=Y, subsample_size=None):
    """Gaussian posterior; the sites are not in alphabetical order."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as index:
        numpyro.sample("y", dist.Normal(x[index] @ w + b, 0.5), obs=y[index])


def linear_precision():
    design = np.column_stack([np.ones(len(X)), np.asarray(X)])
    return design.T @ design / 0.25 + np.eye(3) / 4


def linear_mode():
    design = np.column_stack([np.ones(len(X)), np.asarray(X)])
    mode = np.linalg.solve(linear_precision(), design.T @ np.asarray(Y) / 0.25)
    return {"w": jnp.asarray(mode[1:]), "b": jnp.asarray(mode[0])}


def positive():
    numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("s", dist.HalfNormal(1.0).expand([2]).to_event(1))


POSITIVE_Z = {"z": jnp.zeros(()), "s": jnp.zeros(2)}  # flat: s0, s1, z
LINEAR_Z = {"w": jnp.zeros(2), "b": jnp.zeros(())}  # flat: b, w0, w1


def prepared(guide_type, model=positive, **kwargs):
    guide = guide_type(model, **kwargs)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        guide()
    sites = trace.values()
    return guide, {s["name"]: s["value"] for s in sites if s["type"] == "param"}


def set_params(guide, **sites):
    """A latent vector of the guide, in its own order."""
    order = guide._unpack_latent(jnp.arange(guide.latent_dim))
    vector = jnp.zeros(guide.latent_dim)
    for name, value in sites.items():
        vector = vector.at[order[name]].set(jnp.asarray(value, float))
    return vector


# Curvature of flat potentials


def quadratic(precision):
    return lambda x: 0.5 * x @ jnp.asarray(precision) @ x


def low_rank(precision, x, diagonal, **kwargs):
    """Compiled, which is much faster than step by step."""

    def found(x, diagonal):
        return hessian_low_rank(quadratic(precision), x, diagonal, **kwargs)

    return jax.jit(found)(x, diagonal)


def random_precision(dim=6):
    root = np.random.default_rng(1).normal(size=(dim, dim))
    return root @ root.T + np.eye(dim)


def test_hessians_of_a_quadratic():
    precision = random_precision()
    potential_fn, x = quadratic(precision), jnp.ones(6)
    np.testing.assert_allclose(hessian_dense(potential_fn, x), precision, rtol=1e-4)
    for chunk in (1, 4, 16):
        np.testing.assert_allclose(
            hessian_diagonal(potential_fn, x, chunk=chunk),
            np.diag(precision),
            rtol=1e-4,
        )


def test_hutchinson_is_exact_for_a_diagonal_hessian():
    def potential_fn(x):
        return jnp.sum(jnp.arange(1.0, 6.0) * x**4)

    x = jnp.arange(1.0, 6.0)
    exact = hessian_diagonal(potential_fn, x, method="exact")
    np.testing.assert_allclose(exact, 12 * x**3, rtol=1e-5)
    estimate = hessian_diagonal(potential_fn, x, method="hutchinson", num_probes=1)
    np.testing.assert_allclose(estimate, exact, rtol=1e-5)


def test_hutchinson_is_unbiased():
    precision = random_precision()
    estimate = hessian_diagonal(
        quadratic(precision),
        jnp.ones(6),
        method="hutchinson",
        num_probes=4000,
        rng_key=random.key(3),
    )
    off = precision - np.diag(np.diag(precision))
    error = np.sqrt(np.sum(off**2, axis=1) / 4000)
    assert np.all(np.abs(estimate - np.diag(precision)) < 4 * error)


def test_auto_uses_probes_in_high_dimension():
    x = jnp.ones(2000)
    values = hessian_diagonal(lambda x: jnp.sum(x**2), x, num_probes=2)
    np.testing.assert_allclose(values, 2)


def spiked(dim=60, stretch=(5.0, 3.0, 0.2)):
    """Scale with a few directions; also its exact covariance."""
    rng = np.random.default_rng(2)
    vectors = np.linalg.qr(rng.normal(size=(dim, len(stretch))))[0]
    unit = np.logspace(-1, 1, dim)
    scale = LowRankScale(*map(jnp.asarray, (np.zeros(dim), unit, vectors, stretch)))
    return scale, np.asarray(scale.covariance(), float)


def test_low_rank_recovers_a_spiked_covariance():
    truth, covariance = spiked()
    precision = np.linalg.inv(covariance)
    found = low_rank(precision, jnp.zeros(60), 1 / truth.factor**2, rank=3)
    np.testing.assert_allclose(np.sort(found.stretch), [0.2, 3, 5], rtol=1e-3)
    error = np.asarray(found.covariance()) - covariance
    unit = np.asarray(truth.factor)
    assert np.max(np.abs(error / np.outer(unit, unit))) < 0.01
    gram = found.vectors.T @ found.vectors
    np.testing.assert_allclose(gram, np.eye(3), atol=1e-5)


def test_low_rank_of_full_rank_is_the_inverse():
    precision = random_precision()
    found = low_rank(precision, jnp.ones(6), jnp.diag(jnp.asarray(precision)), rank=6)
    np.testing.assert_allclose(found.covariance(), np.linalg.inv(precision), atol=1e-4)
    np.testing.assert_array_equal(found.center, 1)


def test_low_rank_with_equal_directions():
    # A Krylov space of the identity has one dimension.
    found = low_rank(4 * np.eye(5), jnp.zeros(5), jnp.ones(5), rank=5)
    np.testing.assert_allclose(found.covariance(), np.eye(5) / 4, atol=1e-5)


def test_low_rank_is_never_wide_by_chance():
    # Indefinite: Ritz values near zero belong to no eigenvector.
    values = jnp.concatenate([-jnp.linspace(1, 2, 50), jnp.linspace(1, 2, 50)])
    found = low_rank(
        np.diag(values), jnp.zeros(100), jnp.ones(100), rank=4, num_products=9
    )
    assert np.all(found.stretch <= 1 + 1e-5)


def test_bad_curvature_arguments():
    with pytest.raises(ValueError, match="`method`"):
        hessian_diagonal(jnp.sum, jnp.ones(2), method="fast")
    with pytest.raises(ValueError, match="`rank` must be from 1 to 2"):
        hessian_low_rank(jnp.sum, jnp.ones(2), jnp.ones(2), rank=3)


# Fisher information


def test_fisher_diagonal():
    params = linear_mode()
    w, b = np.asarray(params["w"], float), float(params["b"])
    design = np.column_stack([np.ones(len(X)), np.asarray(X)])
    score = (np.asarray(Y) - design @ np.concatenate([[b], w]))[:, None] * design / 0.25
    expected = np.sum(score**2, axis=0) + 0.25
    found = fisher_diagonal(linear, params, (X, Y), num_probes=4000)
    np.testing.assert_allclose(found, expected, rtol=0.1)
    scale = laplace_reference(
        linear, params, X, Y, kind="fisher", num_probes=4000, subsample_size=25
    )
    np.testing.assert_allclose(1 / scale.factor**2, expected, rtol=0.2)


def test_fisher_diagonal_of_the_prior_alone():
    params = {"z": jnp.zeros(()), "s": jnp.log(jnp.asarray([1.0, 2.0]))}
    # -log density of t = log s is exp(2 t) / 2 - t
    np.testing.assert_allclose(
        fisher_diagonal(positive, params, num_probes=1), [2.0, 8.0, 1.0], rtol=1e-5
    )


# Laplace


@pytest.mark.parametrize("kind", ["auto", "low_rank"])
def test_laplace_of_a_gaussian_is_exact(kind):
    mode = linear_mode()
    scale = laplace_reference(linear, mode, X, Y, kind=kind, gamma=4.0)
    assert isinstance(scale, LowRankScale if kind == "low_rank" else Scale)
    expected = 4 * np.linalg.inv(linear_precision())
    np.testing.assert_allclose(scale.covariance(), expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(scale.center, ravel_pytree(mode)[0])
    if kind != "low_rank":
        np.testing.assert_array_equal(scale.factor, np.tril(scale.factor))


def test_laplace_diagonal_inverts_entry_by_entry():
    mode = MAP(LINEAR_Z, jnp.zeros(()), np.zeros(1), 1, 0.0, True)
    scale = laplace_reference(linear, mode, X, Y, kind="diagonal", damping=10.0)
    expected = 1 / (np.diag(linear_precision()) + 10)
    np.testing.assert_allclose(scale.factor**2, expected, rtol=1e-4)


def test_laplace_damping_of_a_matrix():
    expected = np.linalg.inv(linear_precision() + 10 * np.eye(3))
    for kind in ("dense", "low_rank"):
        scale = laplace_reference(linear, LINEAR_Z, X, Y, kind=kind, damping=10.0)
        np.testing.assert_allclose(scale.covariance(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["diagonal", "dense", "low_rank"])
def test_laplace_of_a_subsampled_model(kind):
    mode = linear_mode()
    scale = laplace_reference(
        linear, mode, X, Y, kind=kind, subsample_size=25, num_batches=200
    )
    precision = linear_precision()
    if kind == "diagonal":
        precision = np.diag(np.diag(precision))
    ratio = np.asarray(scale.variance()) / np.diag(np.linalg.inv(precision))
    np.testing.assert_allclose(ratio, 1, atol=0.1)


def test_laplace_by_probes_in_high_dimension():
    unit = jnp.logspace(-2, 2, 2000)

    def model():
        numpyro.sample("x", dist.Normal(0, unit).to_event(1))

    scale = laplace_reference(model, {"x": jnp.zeros(2000)}, num_probes=2)
    np.testing.assert_allclose(scale.factor, unit, rtol=1e-4)


@pytest.mark.parametrize("kind", ["diagonal", "dense", "low_rank"])
def test_laplace_of_a_saddle_and_of_nothing(kind):
    def model():
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (3,), ()))
        numpyro.factor("u", -0.5 * (4 * x[0] ** 2 - 9 * x[1] ** 2))

    scale = laplace_reference(model, {"x": jnp.zeros(3)}, kind=kind)
    np.testing.assert_allclose(scale.variance()[:2], [1 / 4, 1 / 9], rtol=1e-3)
    # x[2] has no curvature: as wide as the widest, or wider
    assert np.isfinite(scale.variance()[2]) and scale.variance()[2] > 0.24


def test_bad_laplace_arguments():
    with pytest.raises(ValueError, match="`kind`"):
        laplace_reference(positive, POSITIVE_Z, kind="full")
    with pytest.raises(ValueError, match="`gamma`"):
        laplace_reference(positive, POSITIVE_Z, gamma=0)
    with pytest.raises(ValueError, match="`damping`"):
        laplace_reference(positive, POSITIVE_Z, damping=-1)
    with pytest.raises(ValueError, match="`params` has sites of shapes"):
        laplace_reference(positive, {"z": 0.0})
    with pytest.raises(ValueError, match="`params`: the curvature"):
        laplace_reference(positive, {**POSITIVE_Z, "z": jnp.nan})


# Guides


def test_scales_pass_through():
    for scale in (
        Scale(jnp.ones(3), jnp.asarray(2.0)),
        Scale(jnp.ones(3), jnp.ones(3)),
        Scale(jnp.ones(3), jnp.eye(3)),
        LowRankScale(jnp.ones(3), jnp.ones(3), jnp.eye(3)[:, :1], jnp.full(1, 2.0)),
    ):
        found = reference_scale(scale, POSITIVE_Z)
        assert type(found) is type(scale)
        jax.tree.map(np.testing.assert_array_equal, found, scale)


def test_auto_delta_gives_the_unconstrained_centre():
    guide, params = prepared(AutoDelta)
    params = {**params, "z_auto_loc": 3.0, "s_auto_loc": jnp.asarray([2.0, 0.5])}
    scale = reference_scale((guide, params), POSITIVE_Z)
    np.testing.assert_allclose(scale.center, [np.log(2), np.log(0.5), 3], rtol=1e-6)
    np.testing.assert_array_equal(scale.factor, np.ones(3))


def test_auto_normal():
    guide, params = prepared(AutoNormal, prefix="mine")
    params = {
        "z_mine_loc": 3.0,
        "z_mine_scale": 0.1,
        "s_mine_loc": jnp.asarray([1.0, 2.0]),
        "s_mine_scale": jnp.asarray([0.2, 0.3]),
    }
    scale = reference_scale((guide, params), POSITIVE_Z)
    np.testing.assert_allclose(scale.center, [1, 2, 3])
    np.testing.assert_allclose(scale.factor, [0.2, 0.3, 0.1])


def test_auto_diagonal_normal():
    guide, _ = prepared(AutoDiagonalNormal)
    params = {
        "auto_loc": set_params(guide, z=3, s=[1, 2]),
        "auto_scale": set_params(guide, z=0.1, s=[0.2, 0.3]),
    }
    scale = reference_scale((guide, params), POSITIVE_Z)
    np.testing.assert_allclose(scale.center, [1, 2, 3])
    np.testing.assert_allclose(scale.factor, [0.2, 0.3, 0.1])


def latent_covariance(guide, posterior):
    """Covariance of the guide in our order, by that of its samples' linear map."""
    order = ravel_pytree(guide._unpack_latent(jnp.arange(guide.latent_dim)))[0]
    return np.asarray(posterior.covariance_matrix)[np.ix_(order, order)]


def reverse_order(guide):
    """Make the guide's order another one than ours."""
    from numpyro.distributions.transforms import UnpackTransform

    guide._unpack_latent = UnpackTransform(lambda x: {"z": x[0], "s": x[1:]})


def test_auto_multivariate_normal():
    guide, _ = prepared(AutoMultivariateNormal)
    reverse_order(guide)
    tril = jnp.asarray([[1.0, 0, 0], [0.5, 2.0, 0], [-0.3, 0.7, 0.4]])
    params = {"auto_loc": set_params(guide, z=3, s=[1, 2]), "auto_scale_tril": tril}
    scale = reference_scale((guide, params), POSITIVE_Z)
    expected = latent_covariance(guide, guide.get_posterior(params))
    np.testing.assert_allclose(scale.center, [1, 2, 3])
    np.testing.assert_allclose(scale.covariance(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(scale.factor, np.tril(scale.factor))
    assert np.all(np.diagonal(scale.factor) > 0)


@pytest.mark.parametrize("rank", [2, 5])
def test_auto_low_rank_multivariate_normal(rank):
    guide, _ = prepared(AutoLowRankMultivariateNormal, rank=rank)
    reverse_order(guide)
    params = {
        "auto_loc": set_params(guide, z=3, s=[1, 2]),
        "auto_scale": jnp.asarray([0.5, 1.0, 2.0]),
        "auto_cov_factor": random.normal(random.key(1), (3, rank)),
    }
    scale = reference_scale((guide, params), POSITIVE_Z)
    assert isinstance(scale, LowRankScale)
    expected = latent_covariance(guide, guide.get_posterior(params))
    np.testing.assert_allclose(scale.center, [1, 2, 3])
    np.testing.assert_allclose(scale.covariance(), expected, rtol=1e-4, atol=1e-5)


def test_auto_laplace_is_laplace_reference():
    mode = linear_mode()
    guide, _ = prepared(AutoLaplaceApproximation, linear)
    params = {"auto_loc": set_params(guide, **mode)}
    found = reference_scale((guide, params), mode)
    expected = laplace_reference(linear, mode)
    np.testing.assert_allclose(found.center, expected.center, rtol=1e-5)
    np.testing.assert_allclose(found.factor, expected.factor, rtol=1e-3, atol=1e-5)


def test_fitted_guide():
    guide = AutoMultivariateNormal(linear)
    svi = SVI(linear, guide, numpyro.optim.Adam(0.02), Trace_ELBO(num_particles=8))
    result = svi.run(random.key(0), 1500, progress_bar=False)
    scale = reference_scale((guide, result.params), LINEAR_Z)
    inverse = np.linalg.inv(linear_precision())
    np.testing.assert_allclose(scale.variance(), np.diag(inverse), rtol=0.2)


def test_unsupported_guide():
    guide = AutoBNAFNormal(positive)
    with pytest.raises(TypeError, match="AutoBNAFNormal.*supported ones are AutoDelta"):
        reference_scale((guide, {}), POSITIVE_Z)


def test_guide_of_another_model():
    for guide_type in (AutoNormal, AutoMultivariateNormal):
        reference = prepared(guide_type)
        with pytest.raises(ValueError, match=r"shapes \{'s': \(2,\), 'z': \(\)\}.*'b'"):
            reference_scale(reference, LINEAR_Z)


def test_bad_references():
    guide, params = prepared(AutoNormal)
    with pytest.raises(ValueError, match="no parameter 's_auto_loc'"):
        reference_scale((guide, {}), POSITIVE_Z)
    with pytest.raises(TypeError, match="dict of the guide's parameters"):
        reference_scale((guide, None), POSITIVE_Z)
    with pytest.raises(TypeError, match="`reference` must be a `Scale`"):
        reference_scale(guide, POSITIVE_Z)
    with pytest.raises(ValueError, match="never run"):
        reference_scale((AutoNormal(positive), params), POSITIVE_Z)
    with pytest.raises(ValueError, match=r"`reference.center` has shape \(2,\)"):
        reference_scale(Scale(jnp.ones(2), jnp.ones(3)), POSITIVE_Z)
    with pytest.raises(ValueError, match="must be finite"):
        reference_scale(Scale(jnp.ones(3) * jnp.nan, jnp.ones(3)), POSITIVE_Z)
    with pytest.raises(ValueError, match="positive definite"):
        reference_scale(Scale(jnp.ones(3), jnp.zeros(3)), POSITIVE_Z)
    with pytest.raises(ValueError, match="lower triangular"):
        reference_scale(Scale(jnp.ones(3), jnp.ones((3, 3))), POSITIVE_Z)
