# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Haiku networks inside of NumPyro models, for any inference of NumPyro's.

NumPyro had functions of these names up to release 0.20.0. These are written anew, with
the same arguments; the sites' names differ unless asked for, see ``scope_divider``.
"""

from collections.abc import Callable, Iterator
from functools import partial
import inspect
import math
from types import ModuleType
from typing import Any
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.primitives import mutable
from numpyro.util import find_stack_level
from numpyro_pdmp.pages import explained

INSTEAD = (
    "Use a normalisation without state or noise instead, such as `hk.LayerNorm` or "
    "`numpyro_pdmp.bnn.FilterResponseNorm`"
)


def require_haiku() -> ModuleType:
    """The module ``haiku``, or an error that says how to get it."""
    try:
        import haiku
    except ImportError as error:
        raise ImportError(
            "Haiku is not installed; get it with `pip install 'numpyro-pdmp[bnn]'` or "
            "`pip install dm-haiku`."
        ) from error
    return haiku


def _with_rng(nn_module: Any) -> tuple[Callable, Callable, bool]:
    """``init``, an ``apply`` that takes ``rng``, and whether there is state."""
    hk = require_haiku()
    if not isinstance(nn_module, (hk.Transformed, hk.TransformedWithState)):
        raise TypeError(
            "`nn_module` must be the result of `hk.transform` (or of "
            f"`hk.transform_with_state`), got {type(nn_module).__name__}; for a module "
            "write `hk.transform(lambda x: Module(...)(x))`."
        )
    stateful = isinstance(nn_module, hk.TransformedWithState)
    place = 2 if stateful else 1
    names = list(inspect.signature(nn_module.apply).parameters)
    if len(names) > place and names[place] == "rng":
        return nn_module.init, nn_module.apply, stateful

    # After `hk.without_apply_rng` there is no such argument.
    def apply(*args, **kwargs):
        return nn_module.apply(*args[:place], *args[place + 1 :], **kwargs)

    return nn_module.init, apply, stateful


def _dummy_inputs(args: tuple, input_shape: Any, kwargs: dict) -> tuple:
    if input_shape is None:
        if not (args or kwargs):
            raise ValueError(
                "`input_shape` is missing: give the shape of an input, such as "
                "`input_shape=(1, 28, 28, 1)`, or an input itself."
            )
        return args
    if args:
        raise ValueError(
            f"`input_shape={input_shape}` and an input are both given; give one."
        )
    return (jnp.ones(input_shape),)


def _bind(apply: Callable, stateful: bool, apply_rng: bool, params: Any, state: Any):
    """The network as a function of its inputs, after a key if ``apply_rng``."""

    def network(*args, **kwargs):
        rng, args = (args[0], args[1:]) if apply_rng else (None, args)
        if not stateful:
            return apply(params, rng, *args, **kwargs)
        out, new = apply(params, state["state"], rng, *args, **kwargs)
        state["state"] = jax.lax.stop_gradient(new)
        return out

    return network


@explained("haiku")
def haiku_module(
    name: str,
    nn_module: Any,
    *args: Any,
    input_shape: tuple[int, ...] | None = None,
    apply_rng: bool = False,
    **kwargs: Any,
) -> Callable:
    """Declare a Haiku network whose parameters are optimised, as ``numpyro.param``.

    In a model::

        net = haiku_module("net", hk.transform(network), input_shape=(1, 28, 28, 1))
        logits = net(x)

    :param name: of the network; its parameters are the site ``name + "$params"``.
    :param nn_module: result of ``hk.transform``. One of ``hk.transform_with_state`` has
        its state in the site ``name + "$state"``, which ``SVI`` updates; under MCMC it
        stays what it was at first.
    :param args: inputs to initialise the network with, in place of ``input_shape``.
    :param input_shape: shape of an input.
    :param apply_rng: whether the network takes a random key, as with dropout:
        ``net(numpyro.prng_key(), x)``.
    :param kwargs: keyword inputs to initialise the network with.
    :return: the network as a function of its inputs.

    **Example**

    >>> import haiku as hk
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> from numpyro.handlers import seed
    >>> from numpyro_pdmp import haiku_module
    >>> def model(x):
    ...     network = hk.transform(lambda x: hk.Linear(3)(x))
    ...     return haiku_module("net", network, input_shape=(1, 2))(x)
    >>> seed(model, random.key(0))(jnp.ones((5, 2))).shape
    (5, 3)
    """
    init, apply, stateful = _with_rng(nn_module)
    params = numpyro.param(name + "$params")
    state = mutable(name + "$state") if stateful else None
    if params is None:
        inputs = _dummy_inputs(args, input_shape, kwargs)
        new = init(_init_key(), *inputs, **kwargs)
        params, first = new if stateful else (new, None)
        params = numpyro.param(name + "$params", params)
        if stateful:
            state = mutable(name + "$state", {"state": first})
    return _bind(apply, stateful, apply_rng, params, state)


def _init_key() -> Array:
    key = numpyro.prng_key()
    return random.key(0) if key is None else key


def _paths(tree: dict) -> Iterator[tuple[str, str, str, Any]]:
    """Module, parameter, and path of each parameter as in the keys of a prior."""
    for module, entries in tree.items():
        for entry, value in entries.items():
            yield module, entry, f"{module}.{entry}", value


def _site_name(name: str, module: str, entry: str, scope_divider: str) -> str:
    if scope_divider != "/":
        module = module.replace("/~/", "/").replace("/", scope_divider)
    return f"{name}{scope_divider}{module}.{entry}"


def _layout(
    name: str,
    init: Callable,
    stateful: bool,
    inputs: tuple,
    kwargs: dict,
    scope_divider: str,
) -> tuple[dict, Any, dict[tuple[str, str], str]]:
    """Shapes of parameters and state, and names of the sites; computes nothing."""
    shapes = jax.eval_shape(lambda: init(random.key(0), *inputs, **kwargs))
    params, state = shapes if stateful else (shapes, None)
    if not any(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)):
        raise ValueError(f"The network '{name}' has no parameters.")
    sites: dict[tuple[str, str], str] = {}
    for module, entry, path, _ in _paths(params):
        site = _site_name(name, module, entry, scope_divider)
        if site in sites.values():
            raise ValueError(
                f"The network '{name}' has two parameters for the site '{site}' (one "
                f"is '{path}'); give another `scope_divider`, such as '/'."
            )
        sites[module, entry] = site
    return params, state, sites


def _prior_of(prior: Any, path: str, short: str, shape: tuple[int, ...]) -> Any:
    if isinstance(prior, dict):
        found = prior.get(path, prior.get(short))
    elif isinstance(prior, dist.Distribution):
        found = prior
    else:
        found = prior(path, shape)
    if found is not None and not isinstance(found, dist.Distribution):
        raise TypeError(
            f"`prior` of '{path}' must be a distribution, got {found!r}; give a "
            "distribution, a dict of them by path, or a function of path and shape."
        )
    return found


@explained("haiku")
def random_haiku_module(
    name: str,
    nn_module: Any,
    prior: Any,
    *args: Any,
    input_shape: tuple[int, ...] | None = None,
    apply_rng: bool = False,
    scope_divider: str = ".",
    **kwargs: Any,
) -> Callable:
    """Declare a Haiku network with a prior over its parameters.

    Every parameter is one site, all of its axes being event axes. Any inference of
    NumPyro's takes the model.

    :param name: of the network, with which the sites' names begin.
    :param nn_module: result of ``hk.transform``. State (batch normalisation) and random
        numbers (dropout) are possible, but warned of: under MCMC the former is frozen,
        and there is only one key for a whole run. Batch statistics also make the
        likelihood of a row depend on the rest of its mini-batch.
    :param prior: a distribution for every parameter; a dict of distributions by path;
        or a function of path and shape that returns one. A path is Haiku's, such as
        ``"mlp/~/linear_0.w"``; in a dict the site's name without ``name`` will do too,
        ``"mlp.linear_0.w"``. Parameters that a dict leaves out, or for which the
        function returns None, are ``numpyro.param`` as in :func:`haiku_module`.
    :param args: inputs to initialise the network with, in place of ``input_shape``.
    :param input_shape: shape of an input.
    :param apply_rng: whether the network takes a random key before its inputs.
    :param scope_divider: what separates modules in a site's name: by default
        ``"net.mlp.linear_0.w"``. With ``"/"`` names are those of NumPyro 0.20,
        ``"net/mlp/~/linear_0.w"``, which ArviZ 1 refuses, as 0.23 does in files.
    :param kwargs: keyword inputs to initialise the network with.
    :return: the network with its parameters drawn, as a function of its inputs.

    **Example**

    >>> import haiku as hk
    >>> from jax import numpy as jnp, random
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.handlers import seed, trace
    >>> from numpyro_pdmp import random_haiku_module
    >>> mlp = hk.transform(lambda x: hk.nets.MLP([8, 1])(x))
    >>> def model(x, y=None):
    ...     net = random_haiku_module("net", mlp, dist.Normal(), input_shape=(1, 2))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Normal(net(x)[:, 0], 0.1), obs=y)
    >>> sites = trace(seed(model, random.key(0))).get_trace(jnp.ones((5, 2)))
    >>> [k for k in sites if k.startswith("net")]  # doctest: +NORMALIZE_WHITESPACE
    ['net.mlp.linear_0.b', 'net.mlp.linear_0.w',
     'net.mlp.linear_1.b', 'net.mlp.linear_1.w']
    """
    if not (isinstance(prior, (dict, dist.Distribution)) or callable(prior)):
        raise TypeError(
            "`prior` must be a distribution, a dict of distributions by path, or a "
            f"function of path and shape, got {prior!r}."
        )
    if not (isinstance(scope_divider, str) and scope_divider):
        raise ValueError(
            f"`scope_divider` must be a string, not empty, got {scope_divider!r}."
        )
    init, apply, stateful = _with_rng(nn_module)
    if apply_rng:
        warnings.warn(
            f"The network '{name}' takes random numbers, such as those of dropout: "
            "under MCMC they are the same in every evaluation, that is, one mask for "
            f"the whole run. {INSTEAD}, or none: the posterior regularises.",
            stacklevel=find_stack_level(),
        )
    inputs = _dummy_inputs(args, input_shape, kwargs)
    shapes, state_shapes, sites = _layout(
        name, init, stateful, inputs, kwargs, scope_divider
    )
    if jax.tree.leaves(state_shapes):
        warnings.warn(
            f"The network '{name}' has state, such as that of batch normalisation: "
            "under MCMC it is frozen, and statistics of a mini-batch bias the "
            f"posterior. {INSTEAD}.",
            stacklevel=find_stack_level(),
        )
    priors, known = {}, set()
    for module, entry, path, value in _paths(shapes):
        short = sites[module, entry].removeprefix(name + scope_divider)
        priors[module, entry] = _prior_of(prior, path, short, value.shape)
        known |= {path, short}
    if isinstance(prior, dict) and set(prior) - known:
        raise ValueError(
            f"`prior`: the network has no parameters {sorted(set(prior) - known)}; its "
            f"own are {sorted(known)}."
        )
    params: dict[str, dict[str, Any]] = {module: {} for module in shapes}
    fixed, state = _fixed_part(name, init, stateful, priors, inputs, kwargs)
    for (module, entry), of_entry in priors.items():
        if of_entry is None:
            params[module][entry] = fixed[module][entry]
            continue
        shape = shapes[module][entry].shape
        batch_shape = shape[: len(shape) - of_entry.event_dim]
        params[module][entry] = numpyro.sample(
            sites[module, entry], of_entry.expand(batch_shape).to_event()
        )
    return _bind(apply, stateful, apply_rng, params, state)


def _fixed_part(
    name: str, init: Callable, stateful: bool, priors: dict, inputs: Any, kwargs: dict
) -> tuple[dict, Any]:
    """Parameters without prior, and the state: sites of their own, if any."""
    rest = [key for key, of_entry in priors.items() if of_entry is None]
    fixed = numpyro.param(name + "$params") if rest else {}
    state = mutable(name + "$state") if stateful else None
    missing = fixed is None or (stateful and state is None)
    if not missing:
        return fixed, state
    new = init(_init_key(), *inputs, **kwargs)
    values, first = new if stateful else (new, None)
    if rest:
        start: dict[str, dict] = {}
        for module, entry in rest:
            start.setdefault(module, {})[entry] = values[module][entry]
        fixed = numpyro.param(name + "$params", start)
    if stateful:
        state = mutable(name + "$state", {"state": first})
    return fixed, state


@explained("haiku")
def haiku_init(
    name: str,
    nn_module: Any,
    rng_key: Array,
    *args: Any,
    input_shape: tuple[int, ...] | None = None,
    scope_divider: str = ".",
    **kwargs: Any,
) -> dict[str, Array]:
    """Haiku's own initial values, under the names of :func:`random_haiku_module`.

    NumPyro's default start, uniform on (-2, 2), is far too wide for the weights of a
    network. Give these to ``init_to_value(values=...)``, or, with priors on the whole
    real line, as ``init_params`` of ``MCMC.run`` or :func:`~numpyro_pdmp.find_map`.

    :param name: as given to :func:`random_haiku_module`, like the other arguments.
    :param rng_key: random key.
    :return: values by site.

    **Example**

    >>> import haiku as hk
    >>> from jax import random
    >>> from numpyro_pdmp import haiku_init
    >>> network = hk.transform(lambda x: hk.Linear(1)(x))
    >>> {k: v.shape for k, v in
    ...  haiku_init("net", network, random.key(0), input_shape=(1, 2)).items()}
    {'net.linear.b': (1,), 'net.linear.w': (2, 1)}
    """
    init, _, stateful = _with_rng(nn_module)
    inputs = _dummy_inputs(args, input_shape, kwargs)
    _, _, sites = _layout(name, init, stateful, inputs, kwargs, scope_divider)
    new = jax.jit(partial(init, **kwargs))(rng_key, *inputs)
    params = new[0] if stateful else new
    return {site: params[module][entry] for (module, entry), site in sites.items()}
