# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""From NumPyro's mass matrix arguments to a :class:`~numpyro_pdmp.process.Scale`."""

from typing import Any

import numpy as np

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_pdmp.process.scale import Scale


def _site_indices(z: Any, sites: Any, argument: str) -> np.ndarray:
    """Positions of the given sites in the flat vector, in the order given."""
    if not isinstance(z, dict):
        raise ValueError(
            f"`{argument}` names the sites {sites}, which need a model or a dict of "
            "`init_params`."
        )
    if isinstance(sites, str):
        raise ValueError(
            f"`{argument}` has the block {sites!r}; give a tuple of site names, such "
            f"as ({sites!r},)."
        )
    unknown = sorted(set(sites) - set(z))
    if unknown:
        raise ValueError(
            f"`{argument}` names unknown sites {unknown}; the sites are {sorted(z)}."
        )
    stops = np.cumsum([jnp.size(z[name]) for name in sorted(z)])
    ranges = dict(
        zip(sorted(z), np.split(np.arange(stops[-1]), stops[:-1]), strict=True)
    )
    return np.concatenate([ranges[name] for name in sites])


def mass_mask(z: Any, dense_mass: bool | list) -> np.ndarray | None:
    """Which entries of the metric may be non-zero; None for no restriction."""
    if isinstance(dense_mass, bool):
        return None
    mask = np.eye(ravel_pytree(z)[0].size, dtype=bool)
    for block in dense_mass:
        index = _site_indices(z, block, "dense_mass")
        mask[np.ix_(index, index)] = True
    return mask


def _flat_center(x: Array, z: Any, center: Any) -> Array:
    if center is None:
        return jnp.zeros_like(x)
    if isinstance(center, dict) and isinstance(z, dict):
        shapes = {k: np.shape(v) for k, v in sorted(center.items())}
        expected = {k: np.shape(v) for k, v in sorted(z.items())}
        if shapes != expected:
            raise ValueError(
                f"`center` has sites of shapes {shapes}; the model's are {expected}."
            )
    flat = np.concatenate([np.ravel(a) for a in jax.tree.leaves(center)])
    if flat.shape != x.shape:
        raise ValueError(
            f"`center` has {flat.size} entries; give a flat array of shape {x.shape}, "
            "or the unconstrained sites as a dict."
        )
    if not np.all(np.isfinite(flat)):
        raise ValueError(f"`center` must be finite, got {center}.")
    return jnp.asarray(flat, x.dtype)


def initial_scale(
    z: Any, inverse_mass_matrix: Any, center: Any, dense_mass: bool | list
) -> Scale:
    """Centre and factor to start with.

    :param z: unconstrained sites.
    :param inverse_mass_matrix: None, a number, an array of shape ``(d,)`` or
        ``(d, d)``, or a dict from tuples of site names to such arrays, as in NumPyro's
        HMC; an estimate of the posterior covariance.
    :param center: None, a flat array, or sites as ``z``.
    :param dense_mass: False for a diagonal, True or a list of blocks for a matrix.
    """
    x = ravel_pytree(z)[0]
    dim = x.size
    center = _flat_center(x, z, center)
    mass_mask(z, dense_mass)  # an unknown site is an error before anything is run
    if inverse_mass_matrix is None:
        unit = jnp.eye(dim, dtype=x.dtype) if dense_mass else jnp.ones_like(x)
        return Scale(center, unit)
    if isinstance(inverse_mass_matrix, dict):
        matrix = np.eye(dim)
        for sites, block in inverse_mass_matrix.items():
            index = _site_indices(z, sites, "inverse_mass_matrix")
            block = np.asarray(block)
            size = index.size
            if block.shape not in ((size,), (size, size)):
                raise ValueError(
                    f"`inverse_mass_matrix` has shape {block.shape} for the sites "
                    f"{sites}; give ({size},) or ({size}, {size})."
                )
            matrix[np.ix_(index, index)] = np.diag(block) if block.ndim == 1 else block
        inverse_mass_matrix = matrix if dense_mass else np.diagonal(matrix)
    # In NumPy, so that it can be checked even while a run is being traced.
    given = np.asarray(inverse_mass_matrix)
    if given.ndim == 0:
        given = np.full(dim, given)
    if given.shape not in ((dim,), (dim, dim)):
        raise ValueError(
            f"`inverse_mass_matrix` has shape {given.shape}; the model has {dim} "
            f"unconstrained dimensions, so give ({dim},) or ({dim}, {dim})."
        )
    if not np.all(np.isfinite(given)):
        raise ValueError(f"`inverse_mass_matrix` must be finite, got {given}.")
    if given.ndim == 2 and not np.allclose(given, given.T, rtol=1e-4, atol=0):
        raise ValueError(f"`inverse_mass_matrix` must be symmetric, got {given}.")
    if dense_mass is False and given.ndim == 2:
        raise ValueError(
            "`inverse_mass_matrix` is a matrix but `dense_mass=False`; give its "
            "diagonal or set `dense_mass=True`."
        )
    if given.ndim == 1 and dense_mass:
        given = np.diag(given)
    if isinstance(dense_mass, list):
        mask = mass_mask(z, dense_mass)
        assert mask is not None
        given = np.where(mask, given, 0)
    positive = given if given.ndim == 1 else np.linalg.eigvalsh(given)
    if not np.all(positive > 0):
        raise ValueError(
            "`inverse_mass_matrix` must be positive definite; it is an estimate of "
            f"the posterior covariance. Its smallest value is {positive.min()}."
        )
    factor = np.sqrt(given) if given.ndim == 1 else np.linalg.cholesky(given)
    return Scale(center, jnp.asarray(factor, x.dtype))
