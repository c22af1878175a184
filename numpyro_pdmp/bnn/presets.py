# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

r"""Settings of the paper's experiments, in the names that our functions use.

The table of hyperparameters in supplement E of Goan et al. (2023) has, for each data
set and sampler, the rate of refreshment :math:`\lambda_{ref}` and a number
:math:`\gamma`: the standard deviation of velocities for BPS; the same in warm-up for
:math:`\sigma`\ BPS; and the factor of the reference's covariance for Boomerang.
"""

from typing import Any

#: data set -> network, batch size, Adam or SGD with momentum and its steps
_SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mnist": ("lenet5", 1024, {"optimizer": "adam", "num_steps": 10_000}),
    "fashion_mnist": ("lenet5", 1024, {"optimizer": "adam", "num_steps": 10_000}),
    "svhn": (
        "resnet20",
        512,
        {"optimizer": "sgd", "momentum": 0.1, "num_steps": 25_000},
    ),
    "cifar10": (
        "resnet20",
        512,
        {"optimizer": "sgd", "momentum": 0.9, "num_steps": 25_000},
    ),
    "cifar100": (
        "resnet20",
        512,
        {"optimizer": "sgd", "momentum": 0.2, "num_steps": 128_000},
    ),
}

#: data set -> (refreshment rate, gamma) of BPS, sigma-BPS, Boomerang
_TABLE = {
    "mnist": ((1.0, 0.001), (1.0, 0.0005), (1.0, 0.1)),
    "fashion_mnist": ((1.0, 0.001), (0.1, 0.001), (1.0, 0.1)),
    "svhn": ((0.5, 0.00005), (0.5, 0.00005), (1.0, 0.1)),
    "cifar10": ((0.5, 0.00005), (1.0, 0.00005), (0.01, 0.01)),
    "cifar100": ((0.70, 0.00005), (1.5, 0.000025), (2.0, 0.01)),
}


def _preset(data_set: str) -> dict[str, Any]:
    network, batch_size, map_steps = _SETTINGS[data_set]
    bps, sigma_bps, boomerang = _TABLE[data_set]
    law = {"refresh_law": "exponential"}
    return {
        "network": network,
        "batch_size": batch_size,
        "map": map_steps,
        "bps": {
            "refresh_rate": bps[0],
            "inverse_mass_matrix": bps[1] ** 2,
            "adapt_mass_matrix": False,
            **law,
        },
        "sigma_bps": {
            "refresh_rate": sigma_bps[0],
            "inverse_mass_matrix": sigma_bps[1] ** 2,
            **law,
        },
        "boomerang": {
            "refresh_rate": boomerang[0],
            "target": "reference_prior",
            **law,
        },
        "reference": {"kind": "diagonal", "gamma": boomerang[1]},
    }


#: By data set (``"mnist"``, ``"fashion_mnist"``, ``"svhn"``, ``"cifar10"``,
#: ``"cifar100"``) and then: ``"bps"``, ``"sigma_bps"`` and ``"boomerang"``, keyword
#: arguments of these kernels; ``"reference"``, those of
#: :func:`~numpyro_pdmp.laplace_reference` for Boomerang's reference; ``"network"``, the
#: name of the network in :mod:`numpyro_pdmp.bnn`; ``"batch_size"``; and ``"map"``, how
#: the paper found its start. Boomerang is meant for a model with ``prior="flat"``.
presets: dict[str, dict[str, Any]] = {name: _preset(name) for name in _TABLE}
