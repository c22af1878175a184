# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""NumPyro models around a Haiku network, ready to be subsampled."""

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from jax import Array
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
from numpyro_pdmp.haiku import haiku_init, random_haiku_module
from numpyro_pdmp.options import require_positive


def normal_prior(scale: float = 1.0) -> dist.Distribution:
    r"""Normal prior :math:`N(0, s^2)` of every parameter, :math:`s` the ``scale``.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> float(bnn.normal_prior(0.5).scale)
    0.5
    """
    require_positive("scale", scale)
    return dist.Normal(0.0, scale)


def fan_in_prior(scale: float = 1.0) -> Callable:
    r"""Normal prior with variance :math:`s^2 / n` for weights with ``n`` inputs.

    So that the prior of a unit does not widen with the layer before it. All other
    parameters (those of one axis, such as offsets) have :math:`N(0, s^2)`.

    :param scale: :math:`s`.

    **Example**

    >>> from numpyro_pdmp.bnn import fan_in_prior
    >>> prior = fan_in_prior(2.0)
    >>> float(prior("mlp.linear_0.w", (100, 10)).scale)
    0.2
    """
    require_positive("scale", scale)

    def prior(path: str, shape: tuple[int, ...]) -> dist.Distribution:
        fan_in = math.prod(shape[:-1]) if len(shape) > 1 else 1
        return dist.Normal(0.0, scale / math.sqrt(fan_in))

    return prior


def flat_prior() -> Callable:
    """Improper uniform prior: the potential is that of the likelihood alone.

    For the paper's Boomerang, in which the reference stands in for the prior:
    ``Boomerang(model, target="reference_prior", reference=...)``. With a kernel that
    has no reference in its target the posterior may be improper as well.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> model = bnn.regression(bnn.regression_mlp(), prior=bnn.flat_prior())
    """

    def prior(path: str, shape: tuple[int, ...]) -> dist.Distribution:
        return dist.ImproperUniform(dist.constraints.real, (), shape)

    return prior


def _as_prior(prior: Any) -> Any:
    if prior is None:
        return normal_prior()
    if isinstance(prior, str):
        named = {"normal": normal_prior, "fan_in": fan_in_prior, "flat": flat_prior}
        if prior not in named:
            raise ValueError(f"`prior` must be one of {tuple(named)}, got {prior!r}.")
        return named[prior]()
    if isinstance(prior, (int, float)):
        return normal_prior(prior)
    return prior


def _num_rows(x: Any, y: Any) -> int:
    if np.ndim(x) < 2:
        raise ValueError(
            f"`x` must have rows and features, got shape {np.shape(x)}; for one "
            "feature give `x[:, None]`."
        )
    rows = np.shape(x)[0]
    if y is not None and np.shape(y)[:1] != (rows,):
        raise ValueError(
            f"`x` has {rows} rows, but `y` is of shape {np.shape(y)}; both must have "
            "the same number of rows."
        )
    return rows


def _model(
    network: Any,
    prior: Any,
    likelihood: Callable,
    check: Callable,
    temperature: float,
) -> Callable:
    """A model of ``x``, ``y`` and ``subsample_size`` with independent rows."""
    prior = _as_prior(prior)
    require_positive("temperature", temperature)

    def model(x: Any, y: Any = None, subsample_size: int | None = None) -> None:
        rows = _num_rows(x, y)
        if y is not None:
            check(y)
        shape = (1, *np.shape(x)[1:])
        net = random_haiku_module("net", network, prior, input_shape=shape)
        observe = likelihood()
        with numpyro.plate("data", rows, subsample_size=subsample_size):
            x = numpyro.subsample(jnp.asarray(x), event_dim=len(shape) - 1)
            if y is not None:
                y = jnp.asarray(y)
                y = numpyro.subsample(y, event_dim=y.ndim - 1)
            with scale(scale=1 / temperature):
                numpyro.sample("y", observe(net(x)), obs=y)

    return model


def regression(
    network: Any,
    prior: Any = None,
    noise: float | dist.Distribution = 0.1,
    temperature: float = 1.0,
) -> Callable:
    r"""Model of real targets with Gaussian noise.

    :param network: result of ``hk.transform``, such as
        :func:`~numpyro_pdmp.bnn.regression_mlp`. With one output ``y`` is of shape
        ``(rows,)``, with ``k`` outputs of shape ``(rows, k)``.
    :param prior: of the parameters: ``"normal"`` (the default), ``"fan_in"``,
        ``"flat"``, the scale of a normal one, or as for
        :func:`~numpyro_pdmp.random_haiku_module`.
    :param noise: standard deviation of the noise, or its prior, of the site
        ``"noise"``.
    :param temperature: :math:`T` of the likelihood, which counts with the power
        :math:`1/T`: the posterior is :math:`p(w) \prod_i p(y_i \mid x_i, w)^{1/T}`. The
        prior is not tempered, and predictions, log-likelihoods and scores are those of
        :math:`p(y \mid x, w)`.
    :return: a NumPyro model ``model(x, y=None, subsample_size=None)``. Weights are
        sites whose names begin with ``"net"``, the observed site is ``"y"``, in the
        plate ``"data"``.

    **Example**

    >>> from numpyro_pdmp import Boomerang, bnn
    >>> model = bnn.regression(bnn.regression_mlp(), prior="fan_in", noise=0.1)
    >>> kernel = Boomerang(model)  # `run(key, x, y, subsample_size=50)`
    """
    if not isinstance(noise, dist.Distribution):
        require_positive("noise", noise)

    def likelihood():
        sd = noise
        if isinstance(noise, dist.Distribution):
            sd = numpyro.sample("noise", noise)

        def observe(out):
            if out.shape[-1] == 1:
                return dist.Normal(out[..., 0], sd)
            return dist.Normal(out, sd).to_event(1)

        return observe

    def check(y):
        if np.ndim(y) > 1 and np.shape(y)[-1] == 1:
            raise ValueError(
                f"`y` is of shape {np.shape(y)}; for one output give `y[:, 0]`."
            )

    return _model(network, prior, likelihood, check, temperature)


def _check_labels(y: Any) -> None:
    if np.ndim(y) != 1:
        raise ValueError(
            f"`y` must be labels of shape (rows,), got shape {np.shape(y)}; for "
            "one-hot rows give `y.argmax(-1)`."
        )


def binary(network: Any, prior: Any = None, temperature: float = 1.0) -> Callable:
    """Model of labels 0 and 1; the network's only output is the logit of 1.

    :param network: result of ``hk.transform``, such as
        :func:`~numpyro_pdmp.bnn.binary_mlp`.
    :param prior: as for :func:`regression`.
    :param temperature: of the likelihood, as for :func:`categorical`.
    :return: a NumPyro model, as for :func:`regression`.

    **Example**

    >>> from numpyro_pdmp import BPS, bnn
    >>> kernel = BPS(bnn.binary(bnn.binary_mlp(), prior="fan_in"))
    """

    def observe(out):
        if out.shape[-1] != 1:
            raise ValueError(
                f"`network` must have one output, got {out.shape[-1]}; for several "
                "classes use `categorical`."
            )
        return dist.Bernoulli(logits=out[..., 0])

    return _model(network, prior, lambda: observe, _check_labels, temperature)


def categorical(network: Any, prior: Any = None, temperature: float = 1.0) -> Callable:
    r"""Model of labels 0, 1, ...; the network's outputs are their logits.

    Data sets are often curated: images are kept whose label several people agree on.
    That :math:`S` of them say :math:`y` has the probability :math:`p(y \mid x, w)^S`,
    which is a likelihood of ``temperature`` :math:`1/S` (Aitchison 2021).

    :param network: result of ``hk.transform``, such as
        :func:`~numpyro_pdmp.bnn.lenet5`.
    :param prior: as for :func:`regression`.
    :param temperature: :math:`T` of the likelihood, which counts with the power
        :math:`1/T`; not of the prior, nor of predictions and scores.
    :return: a NumPyro model, as for :func:`regression`.

    **Example**

    >>> from numpyro_pdmp import SigmaBPS, bnn
    >>> kernel = SigmaBPS(bnn.categorical(bnn.lenet5(), prior="fan_in"))

    **References:**

    1. *A statistical theory of cold posteriors in deep neural networks*, Laurence
       Aitchison (2021)
    """

    def observe(out):
        return dist.Categorical(logits=out)

    return _model(network, prior, lambda: observe, _check_labels, temperature)


def initial_params(network: Any, x: Any, rng_key: Array) -> dict[str, Array]:
    """Haiku's initial weights for these models, by site.

    For ``init_params`` of :func:`~numpyro_pdmp.find_map` or of ``MCMC.run``, if the
    weights are the only latent sites; else for ``init_to_value(values=...)``.

    :param network: as given to the model.
    :param x: inputs, of which only the shape matters.
    :param rng_key: random key.

    **Example**

    >>> from jax import random
    >>> import jax.numpy as jnp
    >>> from numpyro_pdmp import bnn
    >>> network = bnn.regression_mlp()
    >>> start = bnn.initial_params(network, jnp.ones((9, 2)), random.key(0))
    >>> start["net.mlp.linear_0.w"].shape
    (2, 25)
    """
    shape = (1, *np.shape(x)[1:])
    return haiku_init("net", network, rng_key, input_shape=shape)
