# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Affine coordinates :math:`x = c + A z` in which every sampler runs."""

from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp


class Scale(NamedTuple):
    r"""Whitening map :math:`x = c + A z`.

    ``A`` is a scalar, a diagonal (vector) or a lower triangular matrix; the number
    of dimensions of ``factor`` says which. Preconditioning exists only here: BPS
    with a diagonal ``A`` is the paper's :math:`\sigma`\ BPS, Boomerang in ``z`` has
    the reference measure :math:`N(c, A A^T)` in ``x``.

    **Example**

    >>> import jax.numpy as jnp
    >>> from numpyro_pdmp import Scale
    >>> scale = Scale(center=jnp.ones(2), factor=jnp.array([1.0, 10.0]))
    >>> scale.whiten(jnp.array([2.0, 21.0])).tolist()
    [1.0, 2.0]
    """

    center: Array  # (d,)
    factor: Array  # (), (d,) or (d, d)

    def position(self, z: Array) -> Array:
        """From whitened coordinates to the sampled variable."""
        return self.center + self.direction(z)

    def direction(self, v: Array) -> Array:
        r"""Velocity :math:`\dot x = A v` of the sampled variable."""
        if self.factor.ndim == 2:
            # As `factor @ v`, whose result for many chains would have them as columns.
            return lax.dot_general(v, self.factor, (((0,), (1,)), ((), ())))
        return self.factor * v

    def gradient(self, g: Array) -> Array:
        r"""Chain rule :math:`\nabla_z = A^T \nabla_x`."""
        return g @ self.factor if self.factor.ndim == 2 else self.factor * g

    def whiten(self, x: Array) -> Array:
        """From the sampled variable to whitened coordinates."""
        y = x - self.center
        if self.factor.ndim == 2:
            # By its transpose: LAPACK wants columns. Else XLA would keep the factor by
            # columns wherever a loop carries it, and copy it at each use.
            return jax.scipy.linalg.solve_triangular(self.factor.T, y, trans="T")
        return y / self.factor

    def covariance(self) -> Array:
        r""":math:`A A^T`, as a vector of variances when ``A`` is diagonal."""
        if self.factor.ndim == 2:
            return self.factor @ self.factor.T
        return jnp.square(self.factor) * jnp.ones_like(self.center)

    def variance(self) -> Array:
        r"""Diagonal of :math:`A A^T`."""
        if self.factor.ndim == 2:
            return jnp.sum(jnp.square(self.factor), axis=1)
        return self.covariance()


class LowRankScale(NamedTuple):
    r"""Diagonal plus low rank: :math:`A = D\,(I + W\,\mathrm{diag}(s - 1)\,W^T)`.

    ``D`` is diagonal and ``W`` has orthonormal columns, so that in units of ``D`` the
    covariance has variance :math:`s_j^2` along column ``j`` and 1 elsewhere. Columns of
    zeros are allowed: they change nothing. Costs :math:`O(dr)` where a matrix costs
    :math:`O(d^2)`.

    **Example**

    >>> import jax.numpy as jnp
    >>> from numpyro_pdmp import LowRankScale
    >>> vectors = jnp.array([[1.0], [0.0]])
    >>> scale = LowRankScale(jnp.zeros(2), jnp.ones(2), vectors, jnp.array([4.0]))
    >>> scale.whiten(jnp.array([4.0, 1.0])).tolist()
    [1.0, 1.0]
    """

    center: Array  # (d,)
    factor: Array  # (d,) the diagonal of D
    vectors: Array  # (d, r) W
    stretch: Array  # (r,) s

    def position(self, z: Array) -> Array:
        """From whitened coordinates to the sampled variable."""
        return self.center + self.direction(z)

    def direction(self, v: Array) -> Array:
        r"""Velocity :math:`\dot x = A v` of the sampled variable."""
        return self.factor * self._stretched(v, self.stretch)

    def gradient(self, g: Array) -> Array:
        r"""Chain rule :math:`\nabla_z = A^T \nabla_x`."""
        return self._stretched(self.factor * g, self.stretch)

    def whiten(self, x: Array) -> Array:
        """From the sampled variable to whitened coordinates."""
        return self._stretched((x - self.center) / self.factor, 1 / self.stretch)

    def covariance(self) -> Array:
        r""":math:`A A^T`."""
        excess = (self.vectors * (self.stretch**2 - 1)) @ self.vectors.T
        unit = jnp.eye(self.center.size, dtype=self.factor.dtype) + excess
        return self.factor[:, None] * unit * self.factor

    def variance(self) -> Array:
        r"""Diagonal of :math:`A A^T`."""
        excess = jnp.square(self.vectors) @ (self.stretch**2 - 1)
        return jnp.square(self.factor) * (1 + excess)

    def _stretched(self, z: Array, stretch: Array) -> Array:
        return z + self.vectors @ ((stretch - 1) * (z @ self.vectors))


def identity_scale(position: Array) -> Scale:
    """The map that changes nothing, of the size and dtype of ``position``."""
    return Scale(jnp.zeros_like(position), jnp.ones((), position.dtype))
