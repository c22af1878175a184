# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Numbers for the text of the page: ``uci_unit__yacht__boomerang__nll`` and so on.

In names hyphens are underscores. ``uci_unit__ratio__boomerang__sgld`` is the effective
sample size per gradient of the one over that of the other: the least, the median and
the largest over data sets; ``uci_unit__yacht__boomerang_over_sgld`` is that of one.
"""

from collections import defaultdict

import numpy as np


def get(result, *path):
    for key in path:
        result = (result or {}).get(key)
    return result


def per_1000(r):
    """Effective draws in function space per 1000 gradients."""
    if r.get("method") == "vi":  # independent draws, as many as one likes
        return None
    ess = get(r, "mixing", "ess_function")
    if ess is None:
        ess = get(r, "sampling", "mixing", "function_ess_median")
    return None if ess is None else 1000 * ess / max(r["gradients"], 1)


def scaled(value, factor):
    return None if value is None else factor * value


UCI = {
    "nll": lambda r: get(r, "scores", "nll"),
    "rmse": lambda r: scaled(get(r, "scores", "rmse"), r["y_sd"]),
    "first": lambda r: get(r, "mixing", "ess_first"),
    "ess": per_1000,
}
IMAGES = {
    "accuracy": lambda r: get(r, "scores", "accuracy"),
    "nll": lambda r: get(r, "scores", "nll"),
    "ece": lambda r: scaled(get(r, "scores", "ece"), 100),
    "first": lambda r: (get(r, "sampling", "mixing", "component_ess") or [None])[0],
    "auroc": lambda r: get(r, "ood", "auroc"),
    "ess": per_1000,
}
#: experiment -> field -> its value in one result
FIELDS = {
    "synthetic": {
        "w1": lambda r: r.get("w1"),
        "w1_inside": lambda r: r.get("w1_inside"),
        "sd_inside": lambda r: r.get("sd_ratio_inside"),
        "sd_outside": lambda r: r.get("sd_ratio_outside"),
        "ess": per_1000,
        "step": lambda r: r.get("step_size"),
    },
    "uci_unit": UCI,
    "uci_learned": UCI,
    "uci_unit_wide": UCI,
    "uci_text": UCI,
    "images": IMAGES,
    "images_all": IMAGES,
    "supplement_a": {
        "violations": lambda r: scaled(r.get("violation_rate"), 100),
        "distance": lambda r: r.get("distance"),
        "nll": lambda r: get(r, "scores", "nll"),
    },
    "ablation": {
        "sd": lambda r: r.get("sd_ratio"),
        "error": lambda r: r.get("mean_error"),
        "ess": lambda r: r.get("ess_per_1000"),
    },
}


def values(parts):
    """Name -> its values, one for each seed.

    :param parts: results by experiment.
    """
    found = defaultdict(list)
    for experiment, fields in FIELDS.items():
        for r in parts[experiment]:
            if experiment == "supplement_a":
                labels = (f"{r['scheme']}_{r['method']}", f"{10 * r['alpha']:.0f}")
            else:
                labels = (r["data"], r["method"])
            for field, value in fields.items():
                name = "__".join((experiment, *labels, field)).replace("-", "_")
                if value(r) is not None:
                    found[name].append(value(r))
    return found


def claims(parts, pm, number):
    """All numbers that the text may name, formatted.

    :param pm: formats the values of several seeds.
    :param number: formats one.
    """
    places = {name: pm(found) for name, found in values(parts).items()}
    for experiment in ("synthetic", "uci_unit", "uci_learned"):
        places.update(ratios(experiment, parts[experiment], number))
    return places


def ratios(experiment, results, number):
    """Effective draws per gradient of each method over those of another."""
    groups = defaultdict(list)
    for r in results:
        if per_1000(r) is not None:
            groups[r["data"], r["method"]].append(per_1000(r))
    means = {key: np.mean(found) for key, found in groups.items()}
    methods = {m for _, m in means}
    places = {}
    for first in methods:
        for second in methods - {first}:
            both = []
            for d in {d for d, _ in means}:
                if (d, first) in means and (d, second) in means:
                    both.append(means[d, first] / means[d, second])
                    name = f"{experiment}__{d}__{first}_over_{second}"
                    places[name.replace("-", "_")] = number(both[-1], 2)
            if both:
                name = "__".join((experiment, "ratio", first, second))
                low, middle, high = (
                    number(f(both), 2) for f in (np.min, np.median, np.max)
                )
                text = f"{middle} (from {low} to {high})"
                places[name.replace("-", "_")] = text
    return places
