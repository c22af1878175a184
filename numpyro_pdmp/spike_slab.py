# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""From a model and prior inclusion probabilities to the rates of a sticky path.

A site with prior density :math:`s_i` (the *slab*) for each entry and an inclusion
probability :math:`w_i` gets the prior :math:`w_i s_i + (1 - w_i)\delta_0`. With
:math:`U` the potential energy of the model as it is, the posterior is

.. math:: e^{-U(x)} \prod_i \big(dx_i + \kappa_i^{-1} \delta_0(dx_i)\big), \qquad
    \kappa_i = \frac{w_i}{1 - w_i}\, s_i(0),

up to a constant, which is what :mod:`numpyro_pdmp.process.sticky` leaves invariant.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax import Array, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.ops.provenance import eval_provenance
from numpyro_pdmp.first_look import prototype_value
from numpyro_pdmp.pages import explained


@explained("sticky")
def check_sticky(sticky: Any, model: Any, scheme: Any, **metric: Any) -> None:
    """Raise for inclusion probabilities out of range, and for what excludes them.

    :param sticky: the argument of the kernel.
    :param model: the model, or None.
    :param scheme: event-time scheme.
    :param metric: arguments that would make the metric dense.
    """
    if not isinstance(sticky, dict) or not sticky:
        raise ValueError(
            "`sticky` must be a dict from site names to prior inclusion probabilities, "
            f"such as {{'beta': 0.1}}, got {sticky!r}."
        )
    for name, weight in sticky.items():
        weight = np.asarray(weight)
        numeric = np.issubdtype(weight.dtype, np.number)
        if not numeric or not np.all((weight > 0) & (weight < 1)):
            raise ValueError(
                f"`sticky` has the inclusion probability {sticky[name]!r} for site "
                f"'{name}'; it must be between 0 and 1, both excluded."
            )
    if model is None:
        raise ValueError(
            "`sticky` needs a `model`, whose priors are the slabs; a `potential_fn` "
            "has none."
        )
    if scheme.frozen:
        raise ValueError(
            f"`sticky` is not possible with event_time={scheme}, which follows no path "
            "to zero; use 'interpolation' or 'tangent'."
        )
    for name, value in metric.items():
        if np.ndim(value) == 2 or (np.ndim(value) < 2 and value):
            raise ValueError(
                f"`sticky` needs a diagonal metric, for coordinates have to arrive at "
                f"zero one by one: leave out `{name}={value!r}`, or give a diagonal."
            )


def _entries(name: str, site: dict) -> dist.Distribution:
    """Prior of a site as independent distributions of its entries, or an error."""
    fn = site["fn"]
    while isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
        shape, fn = fn.batch_shape + fn.event_shape, fn.base_dist
        if fn.event_dim == 0:
            fn = fn.expand(shape)
            break
    masked = isinstance(fn, dist.MaskedDistribution) or site["scale"] is not None
    if fn.event_dim or masked:
        kind = "is masked or scaled" if masked else "is not one for each entry"
        raise ValueError(
            f"`sticky`: the prior {type(fn).__name__} of site '{name}' {kind}; give "
            "independent priors, such as `dist.Normal(0, 1).expand([d]).to_event(1)`."
        )
    if fn.support is not dist.constraints.real:
        raise ValueError(
            f"`sticky`: site '{name}' has the support {fn.support}; zero must lie "
            "within it, so give a prior on all real numbers, such as a Normal."
        )
    return fn


def _log_slabs(model: Callable, sites: list[str], args: tuple, kwargs: dict) -> dict:
    """Logarithms of the priors of the given sites at zero, for each entry.

    Raises unless all priors are independent, of entries and of other sites.
    """

    def run(values):
        def given(site):
            return values.get(site["name"], prototype_value(site))

        # Any values of the other sites will do, and so any key.
        seeded = seed(model, random.key(0))
        return trace(substitute(seeded, substitute_fn=given)).get_trace(*args, **kwargs)

    first = run({})
    latent = {
        name: site["value"]
        for name, site in first.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    unknown = sorted(set(sites) - set(latent))
    if unknown:
        raise ValueError(
            f"`sticky` names {unknown}, which the model does not sample; its sites are "
            f"{sorted(latent)}."
        )
    for name in sites:
        _entries(name, first[name])

    def log_slabs(**values):
        new = run(values)
        zeros = {name: jnp.zeros_like(values[name]) for name in sites}
        return {name: _entries(name, new[name]).log_prob(zeros[name]) for name in sites}

    for name, others in eval_provenance(log_slabs, **latent).items():
        if others:
            raise ValueError(
                f"`sticky`: the prior of site '{name}' depends on {sorted(others)}. "
                "Its density at zero must be a constant: sample it from a fixed prior "
                "and multiply, or use NumPyro's `LocScaleReparam(0)` and "
                f"`sticky={{'{name}_decentered': ...}}`."
            )
    return log_slabs(**latent)


@explained("sticky")
def thaw_rates(
    sticky: dict, model: Callable, z: dict, args: tuple, kwargs: dict | None
) -> Array:
    r"""Rates :math:`\kappa` of thawing over the speed, for the flat vector of sites.

    :param sticky: inclusion probabilities by site.
    :param model: the model.
    :param z: unconstrained sites, or their shapes.
    :param args: arguments of the model.
    :param kwargs: its keyword arguments.
    :return: (d,), infinite for entries that are not sticky.
    """
    names = sorted(sticky)
    slabs = _log_slabs(model, names, args, {} if kwargs is None else kwargs)
    kappa = {}
    for name, leaf in z.items():
        shape, dtype = np.shape(leaf), leaf.dtype
        if name not in sticky:
            kappa[name] = jnp.full(shape, jnp.inf, dtype)
            continue
        weight = np.asarray(sticky[name])
        try:
            odds = np.broadcast_to(weight / (1 - weight), shape)
        except ValueError:
            raise ValueError(
                f"`sticky` has inclusion probabilities of shape {weight.shape} for "
                f"site '{name}' of shape {shape}; give a number, or one for each entry."
            ) from None
        slab = jnp.exp(slabs[name])
        if not isinstance(slab, jax.core.Tracer):
            if not np.all(np.isfinite(slab) & (slab > 0)):
                raise ValueError(
                    f"`sticky`: the prior density of site '{name}' at zero is {slab}; "
                    "it must be positive and finite. Give another prior."
                )
        kappa[name] = jnp.asarray(odds * slab, dtype)
    return ravel_pytree(kappa)[0]
