# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Write the page of results from the JSON files, next to the numbers of the paper.

The text is in ``page.md``; tables, figures and numbers take the places of its names.

    python examples/paper/results.py --page docs/results.md
"""

import argparse
from pathlib import Path
from string import Template

import ablation
from acceptance import ESS_HEADS, HEADS, PDMPS, ess_lines, image_lines, uci_lines
from claims import claims, get, per_1000, scaled, values
from figures import draw_all
import images
from methods import TITLES
import numpy as np
from published import ALPHA, IMAGES, SECONDS, UCI
from runner import HERE, load
import supplement_d
import synthetic
import uci
from verdicts import untrue

MISSING = "*Not run yet.*\n"


def pm(values, digits=3):
    """Mean and standard deviation; '-' of no runs, '' if they have no such value."""
    if not len(values):
        return "-"
    values = [v for v in values if v is not None]
    if not values:
        return ""
    mean, sd = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else None
    text = number(mean, digits)
    return text if sd is None else f"{text} ± {number(sd, 2)}"


def number(value, digits=3):
    if value is None or not np.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    places = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{places}f}"


def pair(row, index):
    if row is None or index >= len(row):
        return ""
    return "{:.2f} ± {:.2f}".format(*row[index])


def table(heads, lines):
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def percent(values):
    values = [v for v in values if v is not None]
    return f"{100 * np.mean(values):.2g} %" if values else ""


def plus(value, shift):
    return None if value is None else value + shift


def pick(results, **wanted):
    return [r for r in results if all(r.get(k) == v for k, v in wanted.items())]


def sizes(results, methods):
    """Draws of some of the methods, in words."""
    for r in results:
        if r["method"] in methods:
            size = r["settings"]
            return (
                f"; {size['num_warmup']} + {size['num_samples']} draws of "
                f"{', '.join(TITLES[m] for m in methods)}"
            )
    return ""


def not_run(methods, found):
    """Which of the methods have no results, in words."""
    names = ", ".join(TITLES[m] for m in methods if m not in found)
    return f"\nNot run: {names}.\n" if names else ""


def synthetic_table(results, kind, name):
    some = pick(results, data=name)
    if not some:
        return f"**{name}** ({kind})\n\n" + MISSING
    lines = []
    for method in synthetic.METHODS:
        rows = pick(some, method=method)
        if not rows:
            lines.append([TITLES[method], *["-"] * 8])
            continue
        settings = rows[0]["settings"]
        draws = settings["num_samples"]
        if method == "nuts":
            draws = settings["nuts"][1] * settings["nuts"][2]
        lines.append(
            [
                TITLES[method],
                len(rows),
                pm([r.get("w1") for r in rows]),
                pm([r.get("w1_inside") for r in rows]),
                pm([r.get("sd_ratio_inside") for r in rows]),
                pm([r.get("sd_ratio_outside") for r in rows]),
                pm([per_1000(r) for r in rows]),
                number(np.mean([r["gradients"] for r in rows]) / draws),
                percent([r.get("violations") for r in rows]),
            ]
        )
    heads = ["", "seeds", "W1", "W1 among the data", "sd ratio among the data"]
    heads += ["sd ratio beyond", "ESS per 1000 gradients", "gradients a draw"]
    truth = pick(some, method="nuts")
    text = f"**{name}** ({kind})" + sizes(some, PDMPS)
    if truth:
        text += f"; largest R-hat of NUTS's outputs: {number(truth[0]['r_hat'], 4)}"
    return text + "\n\n" + table([*heads, "violations"], lines)


def uci_table(results, name):
    some = pick(results, data=name)
    if not some:
        return f"**{name}**\n\n" + MISSING
    lines = []
    found = [m for m in ["nuts", *uci.METHODS] if pick(some, method=m)]
    for method in found:
        rows = pick(some, method=method)
        paper = UCI[name].get(method)
        shift = float(np.log(rows[0]["y_sd"]))
        lines.append(
            [
                TITLES[method],
                len(rows),
                pm([get(r, "scores", "nll") for r in rows]),
                pair(paper, 0),
                pm([plus(get(r, "scores", "nll"), shift) for r in rows]),
                pm([scaled(get(r, "scores", "rmse"), r["y_sd"]) for r in rows]),
                pair(paper, 1),
                pm([get(r, "mixing", "ess_first") for r in rows]),
                pair(paper, 2),
                pm([get(r, "mixing", "ess_second") for r in rows]),
                pm([get(r, "mixing", "ess_last") for r in rows]),
                pm([per_1000(r) for r in rows]),
            ]
        )
    heads = ["", "seeds", "NLL, standardised", "paper", "NLL, original"]
    heads += ["RMSE, original", "paper", "ESS first", "paper", "ESS second"]
    heads += ["ESS last", "function ESS per 1000 gradients"]
    first = some[0]
    text = f"**{name}**: {first['rows']:,} rows, {first['num_weights']:,} weights"
    text += sizes(some, PDMPS) + sizes(some, list(uci.STOCHASTIC))
    return text + "\n\n" + table(heads, lines) + not_run(uci.METHODS, found)


def captions_table(results):
    """What the paper's numbers say of its units and captions."""
    lines = []
    for name in uci.DATA:
        row = UCI[name]["bps"]
        nll, rmse = row[0][0], row[1][0]
        low, high = (
            max(2 * (nll + d - 0.5 * np.log(2 * np.pi)), 0) ** 0.5
            for d in (-0.005, 0.005)
        )
        ends = [max(rmse - 0.005, 0) / high, (rmse + 0.005) / low if low else np.inf]
        ours = pick(results, data=name, method="map")
        y_sd = ours[0]["y_sd"] if ours else None
        largest = number(ends[1], 2) if low else "any"
        lines.append(
            [
                name,
                f"{nll:.2f}",
                f"{rmse:.2f}",
                f"{number(ends[0], 2)} to {largest}",
                number(y_sd),
                pm([get(r, "scores", "nll") for r in ours]),
                pm([scaled(get(r, "scores", "rmse"), r["y_sd"]) for r in ours]),
            ]
        )
    heads = ["caption", "paper: NLL (BPS)", "RMSE", "implied sd of y", "true sd of y"]
    return table([*heads, "our MAP: NLL", "RMSE"], lines)


def other_table(results):
    """Another network or likelihood than that of the published code."""
    if not results:
        return MISSING
    lines = []
    for name in uci.DATA:
        for method in uci.METHODS:
            rows = pick(results, data=name, method=method)
            if not rows:
                continue
            lines.append(
                [
                    name,
                    TITLES[method],
                    len(rows),
                    pm([get(r, "scores", "nll") for r in rows]),
                    pm([scaled(get(r, "scores", "rmse"), r["y_sd"]) for r in rows]),
                    pm([get(r, "mixing", "ess_first") for r in rows]),
                    pm([per_1000(r) for r in rows]),
                    number(np.mean([r["gradients"] for r in rows])),
                ]
            )
    heads = ["", "", "seeds", "NLL, standardised", "RMSE, original", "ESS first"]
    return table([*heads, "function ESS per 1000 gradients", "gradients"], lines)


def image_line(name, method, rows, base):
    paper, seconds = IMAGES[name].get(method), SECONDS[name]
    sgd = {r["seed"]: r for r in base}
    both = [r for r in rows if r["seed"] in sgd and method != "map"]
    timed = [r for r in both if sgd[r["seed"]]["seconds"] is not None]
    cost = [1 + r["seconds"] / sgd[r["seed"]]["seconds"] for r in timed]
    more = [r["gradients"] / sgd[r["seed"]]["gradients"] for r in both]
    theirs = ""
    if method in seconds:
        theirs = number(seconds[method] / seconds["sgd"], 3)
    drifts = [get(r, "sampling", "mixing", "drifts") for r in rows]
    first = [(get(r, "sampling", "mixing", "component_ess") or [None])[0] for r in rows]
    return [
        TITLES[method],
        len(rows),
        pm([get(r, "scores", "accuracy") for r in rows]),
        pair(paper, 0),
        pm([get(r, "scores", "nll") for r in rows]),
        pair(paper, 1),
        pm([100 * get(r, "scores", "ece") for r in rows]),
        pair(paper, 2),
        pm(first),
        pair(paper, 3),
        "yes" if any(drifts) else "" if method == "map" else "no",
        pm(cost) if both else "",
        theirs,
        pm(more) if both else "",
    ]


def image_table(results, name):
    some = pick(results, data=name)
    if not some:
        return f"**{name}**\n\n" + MISSING
    size = some[0]["sizes"]
    text = (
        f"**{name}**: {some[0]['network']}, {some[0]['num_weights']:,} weights, "
        f"{size['rows']:,} rows in batches of {size['batch-size']}, "
        f"{size['test-rows']:,} test rows, {size['map-steps']:,} steps to the MAP, "
        f"{size['num-warmup']} + {size['num-samples']} draws of about "
        f"{size['gradients-per-draw']} gradients"
    )
    if name in ("svhn", "cifar10", "cifar100"):
        text += ", images of 16 x 16"
    base = pick(some, method="map")
    found = [m for m in images.METHODS if pick(some, method=m)]
    lines = [
        image_line(name, method, pick(some, method=method), base) for method in found
    ]
    heads = ["", "seeds", "accuracy", "paper", "NLL", "paper", "ECE", "paper"]
    heads += ["ESS first", "paper", "drifts", "time over SGD", "paper"]
    text += "\n\n" + table([*heads, "gradients over SGD"], lines)
    return text + not_run(images.METHODS, found)


def entropy_table(results):
    lines = []
    for name in ("mnist", "fashion_mnist", "svhn", "cifar10"):
        for method in images.METHODS:
            rows = [r for r in pick(results, data=name, method=method) if r.get("ood")]
            if not rows:
                continue
            lines.append(
                [
                    name,
                    TITLES[method],
                    pm([r["ood"]["auroc"] for r in rows]),
                    pm([get(r, "scores", "entropy_total") for r in rows]),
                    pm([r["ood"]["entropy"] for r in rows]),
                    pm([get(r, "scores", "entropy_epistemic") for r in rows]),
                ]
            )
    heads = ["", "", "AUROC", "mean entropy inside", "outside", "epistemic, inside"]
    return table(heads, lines) if lines else MISSING


def gpu_commands():
    """Those in the documentation of ``images.py``."""
    body = images.__doc__.split("At the size of the paper")[1].partition(":\n")[2]
    return "\n".join(line[4:] for line in body.strip("\n").split("\n")).strip()


def alpha_table(results):
    if not results:
        return MISSING
    lines = []
    for alpha in (1.0, 1.2, 1.5):
        for method in ("bps", "sigma-bps", "boomerang"):
            paper = ALPHA[alpha][method]
            for scheme in ("published", "repaired"):
                names = [f"{alpha:g}", TITLES[method], scheme]
                found = pick(results, scheme=scheme, method=method, alpha=alpha)
                if not found:
                    lines.append([*names, *["-"] * 11])
                    continue
                r, old = found[0], scheme == "published"
                lines.append(
                    [
                        *names,
                        number(r["scores"]["accuracy"], 4),
                        f"{paper[0]:.4f}" if old else "",
                        number(r["scores"]["nll"]),
                        f"{paper[1]:.4f}" if old else "",
                        number(100 * r["scores"]["ece"]),
                        f"{paper[2]:.2f}" if old else "",
                        percent([r["violation_rate"]]),
                        number(r["gradients_per_draw"]),
                        number(r["distance"]),
                        number(r["seconds"]),
                        str(paper[3]) if old else "",
                    ]
                )
    heads = ["α", "", "", "accuracy", "paper", "NLL", "paper", "ECE", "paper"]
    heads += ["violations", "gradients a draw", "distance", "seconds", "paper"]
    return table(heads, lines)


def sensitivity_table(results):
    """Supplement D in numbers."""
    if not results:
        return MISSING
    kind = {"velocity": "variance × {:g}", "refreshment": "refreshment rate {:g}"}
    samplers = {"velocity": "Boomerang", "refreshment": "BPS"}
    lines = []
    for figure, settings in supplement_d.SETTINGS.items():
        for scheme in supplement_d.SCHEMES:
            for name, value in settings.items():
                tuned = scheme == "repaired" and name == "right"
                title = "tuned by warm-up" if tuned else kind[figure].format(value)
                found = pick(results, figure=figure, scheme=scheme, setting=name)
                heads = [samplers[figure], scheme, title]
                if not found:
                    lines.append([*heads, *["-"] * 5])
                    continue
                r = found[0]
                lines.append(
                    [
                        *heads,
                        number(r["gradients_per_draw"]),
                        percent([r["violations"]]),
                        number(r["rmse"]),
                        number(r["sd_inside"]),
                        number(r["sd_outside"]),
                    ]
                )
    heads = ["", "", "", "gradients a draw", "violations", "RMSE"]
    return table([*heads, "sd among the data", "sd beyond"], lines)


ERRORS = {
    "bps": "none",
    "bps-event-batch": "one batch until the next event",
    "bps-unscaled": "no factor N/m for the batch",
    "bps-prior": "gradient of the prior once for each row of the batch",
    "bps-events": "draws at events",
    "bps-published": "event times as printed",
    "bps-ones": "Welford's sum of squares begins at one",
    "boomerang": "none",
    "boomerang-tight": "none; a tenth of the violations",
    "boomerang-events": "draws at events",
    "boomerang-published": "event times as printed",
    "boomerang-twice": "the data twice: in the reference, and in the likelihood",
    "boomerang-row-sum": "the same, with row sums of the Hessian",
    "sgld": "none",
    "sgld-noise": "noise scaled twice by the learning rate",
}


def ablation_table(results):
    if not results:
        return MISSING
    lines = []
    for method in ablation.METHODS[1:]:
        rows = [r for r in pick(results, method=method) if "sd_ratio" in r]
        sampler = TITLES[method.split("-")[0]]
        if not rows:
            lines.append([sampler, ERRORS[method], *["-"] * 5])
            continue
        low = min(r["sd_ratio_range"][0] for r in rows)
        high = max(r["sd_ratio_range"][1] for r in rows)
        lines.append(
            [
                sampler,
                ERRORS[method],
                len(rows),
                pm([r["sd_ratio"] for r in rows]),
                f"{number(low)} to {number(high)}",
                pm([r["mean_error"] for r in rows]),
                pm([r["ess_per_1000"] for r in rows]),
            ]
        )
    heads = ["", "error", "seeds", "sd over truth", "least and largest"]
    heads += ["largest error of a mean, sd", "min ESS per 1000 gradients"]
    return table(heads, lines)


def page(results, drawn):
    """The text with its tables, figures and numbers."""
    names = ["synthetic", "uci_unit", "uci_learned", "uci_text", "images", "images_all"]
    names += ["uci_unit_wide", "supplement_a", "supplement_d", "ablation"]
    parts = {name: load(results, name) for name in names}
    full = all(r.get("mode") != "tiny" for some in parts.values() for r in some)
    wrong = untrue(values(parts)) if full else []
    if wrong:
        raise ValueError(f"page.md says what the results do not: {wrong}")
    places = {
        "uci_captions": captions_table(parts["uci_unit"]),
        "uci_acceptance": table(HEADS, uci_lines(parts, number, pm)),
        "image_acceptance": table(HEADS, image_lines(parts, number, pm)),
        "ess_acceptance": table(ESS_HEADS, ess_lines(parts, number)),
        "sensitivity": sensitivity_table(parts["supplement_d"]),
        "uci_wide": other_table(parts["uci_unit_wide"]),
        "uci_text": other_table(parts["uci_text"]),
        "uci_learned": other_table(parts["uci_learned"]),
        "entropy": entropy_table(parts["images"]),
        "alpha": alpha_table(parts["supplement_a"]),
        "ablation": ablation_table(parts["ablation"]),
        "gpu_commands": gpu_commands(),
        **claims(parts, pm, number),
    }
    for kind, sets in (
        ("regression", synthetic.DATA[:2]),
        ("binary", synthetic.DATA[2:]),
    ):
        for name in sets:
            places[name] = synthetic_table(parts["synthetic"], kind, name)
    for name in uci.DATA:
        places[name.split("-")[0]] = uci_table(parts["uci_unit"], name)
    for name in IMAGES:
        places[name] = image_table(parts["images"], name)
    for name in images.DATA:
        places[f"{name}_all"] = image_table(parts["images_all"], name)
    template = Template((HERE / "page.md").read_text())
    for name in template.get_identifiers():
        if name.startswith("figure_"):
            file = name.removeprefix("figure_")
            there = f"![{file}](images/paper/{file}.png)"
            places[name] = there if file in drawn else MISSING
        elif "__" in name:
            places.setdefault(name, "-")
    return template.substitute(places)


def script(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=HERE / "results")
    add("--page", type=Path, default=Path("docs/results.md"))
    add("--figures", type=Path)
    add("--no-figures", action="store_true", help="take those that are there")
    args = parser.parse_args(argv)
    figures = args.figures or args.page.parent / "images" / "paper"
    drawn = [path.stem for path in figures.glob("*.png")]
    if not args.no_figures:
        drawn = draw_all(args.results, figures)
    args.page.write_text(page(args.results, drawn))
    return 0


if __name__ == "__main__":
    script()
