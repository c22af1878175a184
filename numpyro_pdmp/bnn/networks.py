# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Networks of the paper (and a small one) for Haiku, each an ``hk.Transformed``.

**References:**

1. *Piecewise Deterministic Markov Processes for Bayesian Neural Networks*,
   Ethan Goan, Dimitri Perrin, Kerrie Mengersen, Clinton Fookes (2023), supplement E
2. *How Good is the Bayes Posterior in Deep Neural Networks Really?*, Florian Wenzel
   et al. (2020)
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_pdmp.haiku import require_haiku
from numpyro_pdmp.options import require_count


def _mlp(widths: Sequence[int], num_outputs: int, activation: Callable) -> Any:
    hk = require_haiku()
    require_count("num_outputs", num_outputs)

    def network(x: Array) -> Array:
        if x.ndim < 2:
            raise ValueError(
                f"`x` must have the features as its last axis, got shape {x.shape}; "
                "for one feature give `x[:, None]`."
            )
        return hk.nets.MLP([*widths, num_outputs], activation=activation)(x)

    return hk.without_apply_rng(hk.transform(network))


def regression_mlp(num_outputs: int = 1) -> Any:
    """Two hidden layers of 25 and 10 units with tanh.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.regression_mlp(), (1, 1))
    321
    """
    return _mlp((25, 10), num_outputs, jnp.tanh)


def binary_mlp(num_outputs: int = 1) -> Any:
    """Three hidden layers of 100 units with ReLU; the output is a logit.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.binary_mlp(), (1, 2))
    20601
    """
    return _mlp((100, 100, 100), num_outputs, jax.nn.relu)


def uci_mlp(num_outputs: int = 1) -> Any:
    """Three hidden layers of 512, 256 and 128 units with ReLU.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.uci_mlp(), (1, 13))
    171521
    """
    return _mlp((512, 256, 128), num_outputs, jax.nn.relu)


def _check_images(x: Array, smallest: int) -> None:
    if x.ndim != 4:
        remedy = "for one channel give `x[..., None]`"
        if x.ndim == 2:
            remedy = "for rows of 28 x 28 pixels give `x.reshape(-1, 28, 28, 1)`"
        raise ValueError(
            "`x` must be images of shape (rows, height, width, channels), got shape "
            f"{x.shape}; {remedy}."
        )
    if min(x.shape[1:3]) < smallest:
        raise ValueError(
            f"`x` has images of shape {x.shape[1:]} (height, width, channels); height "
            f"and width must be at least {smallest}."
        )


def lenet5(num_classes: int = 10) -> Any:
    """LeNet5: two convolutions of 5 x 5 with max pooling, then 120, 84 and the logits.

    With ReLU. The convolutions are not padded: an image of 28 x 28 ends as 4 x 4 x 16.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.lenet5(), (1, 28, 28, 1))
    44426
    """
    hk = require_haiku()
    require_count("num_classes", num_classes)

    def network(x: Array) -> Array:
        _check_images(x, 16)
        for channels in (6, 16):
            x = jax.nn.relu(hk.Conv2D(channels, 5, padding="VALID")(x))
            x = max_pool(x)
        x = hk.Flatten()(x)
        for width in (120, 84):
            x = jax.nn.relu(hk.Linear(width)(x))
        return hk.Linear(num_classes)(x)

    return hk.without_apply_rng(hk.transform(network))


def digits_cnn(num_classes: int = 10) -> Any:
    """A small network for images of 8 x 8: two convolutions of 3 x 3, then the logits.

    With 8 and 16 channels, ReLU and max pooling after each.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.digits_cnn(), (1, 8, 8, 1))
    1898
    """
    hk = require_haiku()
    require_count("num_classes", num_classes)

    def network(x: Array) -> Array:
        _check_images(x, 4)
        for channels in (8, 16):
            x = jax.nn.relu(hk.Conv2D(channels, 3, padding="SAME")(x))
            x = max_pool(x)
        return hk.Linear(num_classes)(hk.Flatten()(x))

    return hk.without_apply_rng(hk.transform(network))


def max_pool(x: Array) -> Array:
    """Largest of each 2 x 2 pixels; odd rows and columns at the end are dropped."""
    rows, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(rows, height // 2, 2, width // 2, 2, channels)
    return jnp.max(x, axis=(2, 4))


def resnet20(num_classes: int = 10) -> Any:
    """ResNet20 with filter response normalisation and swish, as of Wenzel et al.

    Three stages of three blocks, with 16, 32 and 64 channels; a projection where the
    shape changes. The output are plain logits: nothing is applied to them.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.resnet20(), (1, 32, 32, 3))
    274042
    """
    hk = require_haiku()
    from numpyro_pdmp.bnn.layers import FilterResponseNorm

    require_count("num_classes", num_classes)
    he_normal = hk.initializers.VarianceScaling(2.0, "fan_in", "truncated_normal")

    def layer(x, channels, stride=1, size=3):
        x = hk.Conv2D(channels, size, stride, padding="SAME", w_init=he_normal)(x)
        return FilterResponseNorm()(x)

    def network(x: Array) -> Array:
        _check_images(x, 8)
        x = jax.nn.swish(layer(x, 16))
        for stage, channels in enumerate((16, 32, 64)):
            for block in range(3):
                stride = 2 if stage > 0 and block == 0 else 1
                y = jax.nn.swish(layer(x, channels, stride))
                y = layer(y, channels)
                if stride == 2:
                    x = layer(x, channels, stride, size=1)
                x = jax.nn.swish(x + y)
        return hk.Linear(num_classes, w_init=he_normal)(jnp.mean(x, axis=(1, 2)))

    return hk.without_apply_rng(hk.transform(network))


def num_params(network: Any, input_shape: tuple[int, ...]) -> int:
    """How many parameters a network has; nothing is computed.

    :param network: result of ``hk.transform``.
    :param input_shape: shape of an input, with a first axis for rows.

    **Example**

    >>> from numpyro_pdmp import bnn
    >>> bnn.num_params(bnn.lenet5(), (1, 28, 28, 1))
    44426
    """
    x = jax.ShapeDtypeStruct(tuple(input_shape), jnp.result_type(float))
    shapes = jax.eval_shape(network.init, random.key(0), x)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
