# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Layers that Haiku does not have; importing this needs Haiku."""

import haiku as hk
import jax
from jax import Array
import jax.numpy as jnp


class FilterResponseNorm(hk.Module):
    r"""Filter response normalisation, in place of batch normalisation.

    .. math:: y = \max\left(\tau,\; \gamma\, x / \sqrt{\nu^2 + \epsilon} + \beta\right)

    with :math:`\nu^2` the mean of :math:`x^2` over the pixels of one channel of one
    image. No row of a batch depends on another and nothing is carried from batch to
    batch, so the likelihood is a product over rows, as subsampling needs.

    **References:**

    1. *Filter Response Normalization Layer*, Saurabh Singh, Shankar Krishnan (2020)

    :param eps: :math:`\epsilon`.

    **Example**

    >>> import haiku as hk
    >>> from jax import random
    >>> import jax.numpy as jnp
    >>> from numpyro_pdmp.bnn import FilterResponseNorm
    >>> network = hk.transform(lambda x: FilterResponseNorm()(x))
    >>> params = network.init(random.key(0), jnp.ones((2, 8, 8, 3)))
    >>> [v.shape[-1] for values in params.values() for v in values.values()]
    [3, 3, 3]
    """

    def __init__(self, eps: float = 1e-6, name: str | None = None):
        super().__init__(name=name or "frn")
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        shape = x.shape[-1:]
        tau = hk.get_parameter("tau", shape, x.dtype, init=jnp.zeros)
        beta = hk.get_parameter("beta", shape, x.dtype, init=jnp.zeros)
        gamma = hk.get_parameter("gamma", shape, x.dtype, init=jnp.ones)
        power = jnp.mean(jnp.square(x), axis=(-3, -2), keepdims=True)
        return jnp.maximum(gamma * x * jax.lax.rsqrt(power + self.eps) + beta, tau)
