# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Curvature of a flat potential at a point, by Hessian-vector products."""

from collections.abc import Callable

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro.distributions import Unit
from numpyro.handlers import block, seed, trace
from numpyro.infer.util import _unconstrain_params
from numpyro_pdmp.batch import random_batch
from numpyro_pdmp.convolutions import fast_in_loops
from numpyro_pdmp.initialize import check_sites, jit_arrays
from numpyro_pdmp.process.scale import LowRankScale
from numpyro_pdmp.rows import with_batch
from numpyro_pdmp.shards import find_shards
from numpyro_pdmp.subsample import as_jax_rows, model_layout

#: most dimensions for which "auto" takes one product per dimension
EXACT_DIMENSIONS = 1024

#: most dimensions for which "auto" is a dense matrix, as for the kernels' metric
DENSE_DIMENSIONS = 256


def _product(potential_fn: Callable, x: Array) -> Callable[[Array], Array]:
    """Product of the Hessian at ``x`` with a vector."""
    grad_fn = jax.grad(potential_fn)
    return fast_in_loops(lambda v: jax.jvp(grad_fn, (x,), (v,))[1])


def hutchinson_diagonal(
    potential_fn: Callable[[Array, Array], Array],
    x: Array,
    rng_key: Array,
    num_probes: int,
    chunk: int = 16,
) -> tuple[Array, Array]:
    r"""Unbiased estimate of the diagonal of the Hessian, and its standard error.

    The mean of :math:`v \odot Hv` over vectors ``v`` of random signs. Exact with one
    probe if the Hessian is diagonal.

    :param potential_fn: flat potential, and a key that decides a batch of data; every
        probe has its own.
    :param x: where.
    :param rng_key: random key.
    :param num_probes: number of vectors.
    :param chunk: products computed at once, up to 1024 dimensions.
    """

    def probe(key):
        key_probe, key_batch = random.split(key)
        v = random.rademacher(key_probe, x.shape, x.dtype)
        return v * _product(lambda x: potential_fn(x, key_batch), x)(v)

    keys = random.split(rng_key, num_probes)
    mean, variance = _mean_and_variance(probe, keys, x, chunk)
    return mean, jnp.sqrt(variance / num_probes)


def _mean_and_variance(
    probe: Callable[[Array], Array], keys: Array, x: Array, chunk: int
) -> tuple[Array, Array]:
    """Over keys; one key says nothing of the variance, which is then zero."""
    num = len(keys)
    if x.size <= EXACT_DIMENSIONS:
        every = lax.map(probe, keys, batch_size=min(chunk, num))
        variance = jnp.var(every, axis=0, ddof=1) if num > 1 else jnp.zeros_like(x)
        return jnp.mean(every, axis=0), variance

    # Of a network even one probe may fill the memory: Welford's sums, one by one.
    def step(carry, item):
        mean, squares = carry
        count, key = item
        value = probe(key)
        delta = value - mean
        mean += delta / count
        return (mean, squares + delta * (value - mean)), None

    counts = jnp.arange(1, num + 1, dtype=x.dtype)
    zero = jnp.zeros_like(x), jnp.zeros_like(x)
    (mean, squares), _ = lax.scan(step, zero, (counts, keys))
    return mean, squares / max(num - 1, 1)


def hessian_diagonal(
    potential_fn: Callable[[Array], Array],
    x: Array,
    *,
    method: str = "auto",
    num_probes: int = 128,
    rng_key: Array | None = None,
    chunk: int = 16,
) -> Array:
    r"""Diagonal of the Hessian of a flat potential.

    :param potential_fn: flat potential energy.
    :param x: where, of shape ``(d,)``.
    :param method: ``"exact"``, one Hessian-vector product per dimension;
        ``"hutchinson"``, one per random probe, unbiased, with a variance that is
        :math:`\sum_{j \ne i} H_{ij}^2` over ``num_probes``; ``"auto"``, exact up to
        1024 dimensions.
    :param num_probes: number of random probes.
    :param rng_key: for the probes. Default: a fixed one.
    :param chunk: products computed at once, up to 1024 dimensions.
    """
    if method not in ("auto", "exact", "hutchinson"):
        raise ValueError(
            f"`method` must be 'auto', 'exact' or 'hutchinson', got {method!r}."
        )
    if method == "exact" or (method == "auto" and x.size <= EXACT_DIMENSIONS):
        product = _product(potential_fn, x)

        def entry(i):
            return product(jnp.zeros_like(x).at[i].set(1))[i]

        return lax.map(entry, jnp.arange(x.size), batch_size=min(chunk, x.size))
    if num_probes < 1:
        raise ValueError(f"`num_probes` must be at least 1, got {num_probes}.")
    key = random.key(0) if rng_key is None else rng_key
    return hutchinson_diagonal(
        lambda x, _: potential_fn(x), x, key, num_probes, chunk=chunk
    )[0]


def hessian_dense(
    potential_fn: Callable[[Array], Array], x: Array, *, chunk: int = 16
) -> Array:
    """The Hessian of a flat potential, of shape ``(d, d)``.

    :param potential_fn: flat potential energy.
    :param x: where, of shape ``(d,)``.
    :param chunk: columns computed at once.
    """
    product = _product(potential_fn, x)

    def column(i):
        return product(jnp.zeros_like(x).at[i].set(1))

    hessian = lax.map(column, jnp.arange(x.size), batch_size=min(chunk, x.size))
    return 0.5 * (hessian + hessian.T)


def hessian_low_rank(
    potential_fn: Callable[[Array], Array],
    x: Array,
    diagonal: Array,
    rank: int,
    rng_key: Array | None = None,
    *,
    num_products: int | None = None,
) -> LowRankScale:
    r"""Scale whose covariance is the inverse Hessian in ``rank`` directions.

    In units of the given diagonal the Hessian is
    :math:`\tilde H = D^{-1/2} H D^{-1/2}`. Lanczos' method finds directions ``v`` at
    both ends of its spectrum. Those ``rank`` directions are kept in which it is
    farthest from 1 on a logarithmic scale; elsewhere the covariance is
    :math:`D^{-1}`. As curvature along ``v`` counts :math:`|\tilde H v|`, the absolute
    eigenvalue if ``v`` is an eigenvector and more if it has not converged: errors make
    the covariance too narrow, never too wide.

    :param potential_fn: flat potential energy.
    :param x: where; the centre of the scale.
    :param diagonal: positive curvatures ``(d,)``, such as the absolute values of
        :func:`hessian_diagonal`.
    :param rank: number of directions, at most ``d``.
    :param rng_key: for the first vector. Default: a fixed one.
    :param num_products: Hessian-vector products. Default: ``4 * rank + 16``.
    """
    dim = x.size
    if not 1 <= rank <= dim:
        raise ValueError(f"`rank` must be from 1 to {dim} (dimensions), got {rank}.")
    num_products = 4 * rank + 16 if num_products is None else num_products
    if num_products < rank:
        raise ValueError(
            f"`num_products` must be at least `rank={rank}`, got {num_products}."
        )
    num_products = min(num_products, dim)
    unit = 1 / jnp.sqrt(diagonal)
    product = _product(potential_fn, x)
    key = random.key(0) if rng_key is None else rng_key
    # Noise instead of nothing goes on after an invariant subspace has been exhausted.
    noise = random.normal(key, (num_products + 1, dim), x.dtype)
    tiny = jnp.sqrt(jnp.finfo(x.dtype).eps)

    def orthonormal(v, basis):
        for _ in range(2):  # once leaves rounding errors behind
            v = v - (v @ basis.T) @ basis
        return v / jnp.linalg.norm(v)

    def body(i, carry):
        basis, images = carry
        v = basis[i]
        image = unit * product(unit * v)
        images = images.at[i].set(image)
        rest = image - (image @ basis.T) @ basis
        rest = rest - (rest @ basis.T) @ basis
        small = jnp.linalg.norm(rest) <= tiny * jnp.linalg.norm(image)
        rest = orthonormal(jnp.where(small, noise[i + 1], rest), basis)
        # The last vector is never used; in a full basis it is not even defined.
        return basis.at[i + 1].set(rest, mode="drop"), images

    basis = jnp.zeros((num_products, dim), x.dtype)
    basis = basis.at[0].set(noise[0] / jnp.linalg.norm(noise[0]))
    basis, images = lax.fori_loop(0, num_products, body, (basis, jnp.zeros_like(basis)))
    projected = basis @ images.T
    _, rotation = jnp.linalg.eigh(0.5 * (projected + projected.T))
    curvature = jnp.linalg.norm(images.T @ rotation, axis=0)
    curvature = jnp.maximum(curvature, jnp.finfo(x.dtype).eps * dim)
    far = jnp.argsort(-jnp.abs(jnp.log(curvature)))[:rank]
    vectors = basis.T @ rotation[:, far]
    return LowRankScale(x, unit, vectors, 1 / jnp.sqrt(curvature[far]))


def lower_factor(root: Array) -> Array:
    """Lower triangular factor of ``root @ root.T``, without forming that product."""
    upper = jnp.linalg.qr(root.T, mode="r")
    return (upper * jnp.sign(jnp.diagonal(upper))[:, None]).T


def fill_zeros(curvature: Array) -> Array:
    """Positive curvatures; zero ones, which have no scale, as the smallest other."""
    smallest = jnp.min(jnp.where(curvature > 0, curvature, jnp.inf))
    smallest = jnp.where(jnp.isfinite(smallest), smallest, 1)
    return jnp.where(curvature == 0, smallest, curvature)


def dense_factor(hessian: Array, damping: float = 0.0) -> Array:
    """Lower factor of the inverse of the absolute Hessian with damping."""
    # In units of the diagonal, so that rounding does not depend on the users' units.
    unit = 1 / jnp.sqrt(fill_zeros(jnp.abs(jnp.diagonal(hessian)) + damping))
    values, vectors = jnp.linalg.eigh(hessian * unit[:, None] * unit)
    positive = (vectors * jnp.abs(values)) @ vectors.T + jnp.diag(damping * unit**2)
    values, vectors = jnp.linalg.eigh(0.5 * (positive + positive.T))
    values = jnp.maximum(values, jnp.finfo(hessian.dtype).eps * unit.size)
    return lower_factor(unit[:, None] * vectors / jnp.sqrt(values))


def fisher_diagonal(
    model: Callable,
    params: dict,
    model_args: tuple = (),
    model_kwargs: dict | None = None,
    *,
    num_probes: int = 128,
    batch: int | None = None,
    rng_key: Array | None = None,
    chunk: int = 16,
) -> Array:
    r"""Diagonal of the empirical Fisher information plus that of the prior's Hessian.

    :math:`\sum_n (\nabla \log p(y_n | x))^2` over the elements of the observed sites,
    which is never negative, unlike the Hessian of the likelihood. The sum is the mean
    square of :math:`\nabla \sum_n \epsilon_n \log p(y_n | x)` over random signs
    :math:`\epsilon`, so one gradient per probe is enough. Each probe has a fresh batch
    if the model is subsampled. ``numpyro.factor`` counts as prior.

    :param model: Python callable containing NumPyro primitives, without discrete latent
        sites.
    :param params: unconstrained values of the sites.
    :param model_args: arguments of the model.
    :param model_kwargs: keyword arguments of the model.
    :param num_probes: number of random probes; the relative error is about
        ``sqrt(2 / num_probes)``.
    :param batch: batch size in place of that of the only subsampled plate.
    :param rng_key: for probes and batches. Default: a fixed one.
    :param chunk: probes computed at once, up to 1024 dimensions.
    :return: one value per dimension, in the order of ``ravel_pytree(params)``.
    """
    kwargs = {} if model_kwargs is None else model_kwargs
    shapes, plates = model_layout(model, model_args, kwargs, batch)
    x, unravel = ravel_pytree(check_sites(params, shapes, "params"))
    if num_probes < 1:
        raise ValueError(f"`num_probes` must be at least 1, got {num_probes}.")
    if plates and find_shards(jax.tree.leaves((model_args, kwargs))) is not None:
        raise ValueError(
            "The Fisher information is not to be had from rows that are spread over "
            "devices: use the curvature, `kind='diagonal'` of `laplace_reference`."
        )

    def log_probs(args, kwargs, x, rng_key):
        """Terms of the likelihood with their weights, and the rest."""
        # A key for whatever else the model draws, the same at every call.
        seeded = seed(with_batch(model, random_batch(rng_key, plates)), random.key(0))
        with block():
            sites = trace(_unconstrain_params(seeded, unravel(x))).get_trace(
                *args, **kwargs
            )
        terms, prior = [], jnp.zeros((), x.dtype)
        for name, site in sites.items():
            if site["type"] != "sample":
                continue
            if not site["is_observed"] and site["fn"].support.is_discrete:
                raise ValueError(
                    f"Site '{name}' is discrete and latent: the terms of the "
                    "likelihood do not factorise. Use `hessian_diagonal`."
                )
            scale = 1.0 if site["scale"] is None else site["scale"]
            log_prob = site["fn"].log_prob(site["value"])
            if site["is_observed"] and not isinstance(site["fn"], Unit):
                scale = jnp.broadcast_to(scale, log_prob.shape)
                terms.append((jnp.ravel(log_prob), jnp.ravel(scale)))
            else:
                prior += jnp.sum(scale * log_prob)
        return terms, prior

    def estimate(args, kwargs, x, rng_key):
        key_prior, key_likelihood = random.split(rng_key)

        def probe(key):
            key_batch, key = random.split(key)

            def signed(x):
                terms = log_probs(args, kwargs, x, key_batch)[0]
                total = jnp.zeros((), x.dtype)
                for i, (log_prob, scale) in enumerate(terms):
                    sign = random.rademacher(
                        random.fold_in(key, i), log_prob.shape, log_prob.dtype
                    )
                    # The weight multiplies the information, not the gradient.
                    total += jnp.sum(jnp.sqrt(scale) * sign * log_prob)
                return total

            return jnp.square(fast_in_loops(jax.grad(signed))(x))

        keys = random.split(key_likelihood, num_probes)
        information, _ = _mean_and_variance(probe, keys, x, chunk)
        prior = hessian_diagonal(
            lambda x: -log_probs(args, kwargs, x, key_prior)[1],
            x,
            num_probes=num_probes,
            rng_key=key_prior,
            chunk=chunk,
        )
        return prior + information

    key = random.key(0) if rng_key is None else rng_key
    return jit_arrays(estimate, *as_jax_rows((model_args, kwargs), plates))(x, key)
