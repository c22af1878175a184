# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Draw the schedule of warm-up: phases, windows, and what each of them tunes.

python examples/warmup_schedule.py --output docs/images/warmup.png
"""

import argparse

import matplotlib

from numpyro_pdmp.warmup import window_ends

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Of the Okabe-Ito palette.
BLUE, ORANGE, GREEN, GREY = "#56B4E9", "#D55E00", "#009E73", "#BBBBBB"


def bar(axis, row, start, stop, color, text=""):
    style = {"height": 0.62, "color": color, "edgecolor": "white", "lw": 1.5}
    axis.barh(row, stop - start, left=start, **style)
    axis.text(0.5 * (start + stop), row, text, ha="center", va="center", fontsize=8)


def main(args):
    num, after = args.num_warmup, 0.22 * args.num_warmup
    before = -0.11 * num
    ends = [int(end) for end in window_ends(num)]
    names = [
        "phase",
        "start, first centre and scale",
        "window of the moments",
        "centre and scale",
        "draw time",
        "envelope: window, offset",
    ]
    rows = {name: len(names) - i for i, name in enumerate(names)}
    figure, axis = plt.subplots(figsize=(10, 3.6))

    row = rows["phase"]
    bar(axis, row, before, 0, GREY, "descent")
    bar(axis, row, 0, ends[0], BLUE)
    axis.text(0.01 * num, row + 0.42, "settle", fontsize=8)
    bar(axis, row, ends[0], ends[-1], BLUE, "slow")
    bar(axis, row, ends[-1], num, BLUE, "final")
    bar(axis, row, num, num + after, GREY, "sampling")

    bar(axis, rows["start, first centre and scale"], before, 0, ORANGE)
    row = rows["window of the moments"]
    for start, stop in zip(ends[:-1], ends[1:], strict=True):
        text = str(stop - start) if stop - start > 0.04 * num else ""
        bar(axis, row, start, stop, GREEN, text)
    for name in ("centre and scale", "draw time"):
        row = rows[name]
        axis.plot([before, num + after], [row, row], color=GREY, lw=1, zorder=0)
        axis.plot(ends[1:], [row] * (len(ends) - 1), "o", color=ORANGE, ms=7)
        for end in ends[1:]:
            axis.plot(
                [end, end],
                [rows["window of the moments"] - 0.31, row],
                color=ORANGE,
                lw=0.8,
                ls=":",
            )
        bar(axis, row, num, num + after, GREY, "frozen")
    row = rows["envelope: window, offset"]
    bar(axis, row, 0, ends[-1], ORANGE, "after every draw")
    bar(axis, row, ends[-1], num, ORANGE, "and averaged")
    bar(axis, row, num, num + after, GREY, "frozen")

    axis.axvline(0, color="black", lw=0.8)
    axis.axvline(num, color="black", lw=0.8)
    axis.set_yticks(list(rows.values()), list(rows))
    axis.set_xticks([0, *ends, num])
    labels = [str(tick) for tick in (0, *ends, num)]
    axis.set_xticklabels(labels, fontsize=8)
    axis.set(xlim=(before, num + after), ylim=(0.5, len(names) + 0.75))
    axis.set_xlabel("draw")
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="warmup.png")
    parser.add_argument("--num-warmup", type=int, default=1000)
    main(parser.parse_args())
