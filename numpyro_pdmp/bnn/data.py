# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Data sets of the command line, read from a directory; nothing is downloaded.

The directory has ``mnist/mnist.npz``, ``cifar10/*.npz``, ``uci/yacht.npz`` and so on.
Files of images hold ``x_train``, ``y_train``, ``x_test`` and ``y_test``, with images in
``uint8`` and channels last; those of regressions hold ``X``, ``y``, and the splits
``train_idx`` and ``test_idx``, an array of row numbers each. Scikit-learn's digits need
no directory.
"""

from os import environ
from pathlib import Path
from typing import NamedTuple

import numpy as np

from numpyro_pdmp.storage import read_arrays, require_names

#: names of the data sets of images in the directory
IMAGES = ("mnist", "fashion_mnist", "svhn", "cifar10", "cifar100")
#: variable of the environment with the directory
DATA_VARIABLE = "NUMPYRO_PDMP_DATA"


class Data(NamedTuple):
    """Standardised data, and what was standardised."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int | None  # None for regressions
    x_mean: np.ndarray  # of the inputs, per last axis
    x_sd: np.ndarray  # infinite where they do not vary
    y_mean: float = 0.0  # of the targets of a regression
    y_sd: float = 1.0


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per last axis.

    The latter is infinite where there is no variation but rounding, so that what is
    standardised with it is zero.
    """
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes, dtype=np.float64)
    sd = x.std(axes, dtype=np.float64)
    return mean, np.where(sd <= 1e-8 * (1 + np.abs(mean)), np.inf, sd)


def _standard(x: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return ((x - mean) / sd).astype(np.float32)


def _channels(x: np.ndarray) -> np.ndarray:
    return x[..., None] if x.ndim == 3 else x


def _digits(split: int) -> dict[str, np.ndarray]:
    """Scikit-learn's digits; a split is the seed of the order of the rows."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "The default data, `digits`, are scikit-learn's: "
            "pip install 'numpyro-pdmp[bnn]'."
        ) from error
    data = load_digits()
    order = np.random.default_rng(split).permutation(len(data.target))
    train, test = order[:1347], order[1347:]  # three quarters
    images = data.images[..., None]
    return {
        "x_train": images[train],
        "y_train": data.target[train],
        "x_test": images[test],
        "y_test": data.target[test],
    }


def data_file(name: str, directory: str | Path | None = None) -> Path:
    """The file of a data set; an error that says what is missing if there is none.

    :param name: of the data set.
    :param directory: where the files are. Default: that of the environment.
    """
    if directory is None:
        directory = environ.get(DATA_VARIABLE)
    if not directory:
        raise FileNotFoundError(
            f"The data set '{name}' needs a directory: give --data-dir, or set "
            f"{DATA_VARIABLE}. Without one there is --data digits."
        )
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"The data directory {root} does not exist.")
    if name in IMAGES:
        found = sorted((root / name).glob("*.npz"))
        expected = root / name / f"{name}.npz"
    else:
        expected = root / "uci" / f"{name}.npz"
        found = [expected] if expected.is_file() else []
    if not found:
        sets = [k for k in IMAGES if list((root / k).glob("*.npz"))]
        sets += [p.stem for p in sorted((root / "uci").glob("*.npz"))]
        raise FileNotFoundError(
            f"There is no {expected}. In {root} there are: "
            f"{', '.join(sets) or 'no data sets'}; and --data digits needs no files."
        )
    return found[0]


def _read(
    name: str, directory: str | Path | None, split: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of a data set as they are."""
    if name == "digits":
        return _digits(split)
    names: tuple[str, ...] = ("x_train", "y_train", "x_test", "y_test")
    if name not in IMAGES:
        names = ("X", "y", "train_idx", "test_idx")
    path, remedy = data_file(name, directory), "See --help for what data sets are."
    arrays = read_arrays(path, remedy)
    require_names(arrays, names, path, remedy)
    return {k: arrays[k] for k in names}


def load_data(
    name: str,
    directory: str | Path | None = None,
    *,
    rows: int | None = None,
    test_rows: int | None = None,
    split: int = 0,
) -> Data:
    """Read and standardise a data set.

    :param name: ``"digits"``, one of ``IMAGES``, or a file in ``uci/``.
    :param directory: where the files are; see :func:`data_file`.
    :param rows: train on the first so many rows only.
    :param test_rows: test on the first so many rows only.
    :param split: which of the splits of a regression, or of the digits, which have
        one for each number.
    """
    arrays = _read(name, directory, split)
    if "X" in arrays:
        num = len(arrays["train_idx"])
        if not 0 <= split < num:
            raise ValueError(f"`split={split}`: '{name}' has splits 0 to {num - 1}.")
        for part in ("train", "test"):
            index = arrays[f"{part}_idx"][split]
            arrays[f"x_{part}"] = arrays["X"][index]
            arrays[f"y_{part}"] = arrays["y"][index]
    x_train, y_train = arrays["x_train"][:rows], arrays["y_train"][:rows]
    x_test, y_test = arrays["x_test"][:test_rows], arrays["y_test"][:test_rows]
    x_train, x_test = _channels(x_train), _channels(x_test)
    scale = moments(x_train)
    x_train, x_test = _standard(x_train, *scale), _standard(x_test, *scale)
    if "X" not in arrays:
        classes = int(max(arrays["y_train"].max(), arrays["y_test"].max())) + 1
        labels = y_train.astype(np.int32), y_test.astype(np.int32)
        return Data(name, x_train, labels[0], x_test, labels[1], classes, *scale)
    mean, sd = float(y_train.mean()), float(y_train.std())
    y_train, y_test = [((a - mean) / sd).astype(np.float32) for a in (y_train, y_test)]
    return Data(name, x_train, y_train, x_test, y_test, None, *scale, mean, sd)


def load_outside(
    name: str, data: Data, directory: str | Path | None = None, rows: int | None = None
) -> np.ndarray:
    """Inputs from outside of the distribution, in the units of ``data``.

    :param name: of another data set, whose test inputs these are; or ``"noise"``.
    :param data: what the network is trained on.
    :param directory: where the files are.
    :param rows: the first so many rows only.
    """
    if name == "noise":
        shape = data.x_test[:rows].shape
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)
    arrays = _read(name, directory)
    if "x_test" not in arrays:
        raise ValueError(f"`{name}` is no data set of images.")
    x = _channels(arrays["x_test"][:rows])
    if x.shape[1:] != data.x_test.shape[1:]:
        raise ValueError(
            f"'{name}' has inputs of shape {x.shape[1:]}, '{data.name}' of "
            f"{data.x_test.shape[1:]}: choose another one, or 'noise'."
        )
    return _standard(x, data.x_mean, data.x_sd)
