# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Potential energy of a model with subsampled plates, from mini-batches.

A batch gives every subsampled plate its row indices. NumPyro scales what is inside the
plate by size / number of indices, so that the potential of a batch is an unbiased
estimate of the potential of all data, with the prior in it once. For the same reason
the mean over blocks that divide the rows, weighted by their lengths, is exactly the
potential of all data.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import (
    _get_model_transforms,
    _prepare_model_for_potential,
    _unconstrain_params,
    compute_log_probs,
    get_potential_fn,
    transform_fn,
    unconstrain_fn,
)
from numpyro_pdmp.batch import Batch, Plates
from numpyro_pdmp.convolutions import fast_in_loops
from numpyro_pdmp.first_look import (
    first_look,
    is_subsampled,
    look_at_shapes,
    plate_frames,
    validate_plates,
    warn_of_state,
)
from numpyro_pdmp.host_rows import HostRows, recorded_calls
from numpyro_pdmp.potential import _validate, latent_sites
from numpyro_pdmp.rows import _indices, with_batch
from numpyro_pdmp.shards import warn_of_hidden
from numpyro_pdmp.spread import SpreadMixin

#: rows evaluated at once when all data are used
CHUNK_SIZE = 2**14
#: the same for models of more dimensions than this: a network has many values per row
SMALL_MODEL, LARGE_MODEL_CHUNK = 1024, 2**10


def is_small(shapes: Any) -> bool:
    """Whether a model with sites of these shapes is no network to speak of."""
    return sum(a.size for a in jax.tree.leaves(shapes)) <= SMALL_MODEL


def as_jax_rows(tree: Any, plates: Plates) -> Any:
    """NumPy arrays with an axis of the size of one of these plates as JAX arrays.

    The model indexes them by traced rows, which NumPy cannot. Others stay as they are,
    for a model may use their values for shapes and control flow.
    """
    sizes = {size for size, _ in plates.values()}

    def convert(x):
        rows = isinstance(x, np.ndarray) and not sizes.isdisjoint(x.shape)
        return jnp.asarray(x) if rows else x

    return jax.tree.map(convert, tree)


class SubsampledModel(SpreadMixin):
    """A model, any of whose plates may be subsampled, and its arguments.

    Positions ``z`` are dicts of unconstrained sites, or flat arrays of the same in the
    order of ``ravel_pytree``. All methods can be compiled, differentiated and mapped
    over positions and batches.

    :param model: the model.
    :param args: its arguments; large data best as JAX arrays, see :func:`as_jax_rows`.
    :param kwargs: its keyword arguments.
    """

    def __init__(self, model: Callable, args: tuple = (), kwargs: dict | None = None):
        kwargs = {} if kwargs is None else kwargs
        self._model = model
        self._args, self._kwargs = args, kwargs
        self.shards, self.sharded = self._find_shards()
        args, kwargs = self.few_arguments
        # The prototype only yields supports and shapes, so its key does not matter.
        with recorded_calls() as calls, first_look() as value:
            prototype = seed(substitute(model, substitute_fn=value), random.key(0))
            look = partial(_get_model_transforms, prototype, args, kwargs)
            seen = look_at_shapes(look)
        self._transforms, self._replay, self._enum, self._trace = seen
        if self.shards is None:
            self.plates = {
                k: s["args"] for k, s in self._trace.items() if is_subsampled(s)
            }
        #: what fetches rows of each plate from the host
        self.host_rows: dict[str, list[HostRows]] = {
            name: list(dict.fromkeys(r for r, i in calls if i is site["value"]))
            for name, site in self._trace.items()
            if name in self.plates
        }
        _validate(self._trace)
        validate_plates(self._trace, self.plates)
        warn_of_state(self._trace)
        self._args, self._kwargs = as_jax_rows((self._args, self._kwargs), self.plates)
        if self.shards is None:
            warn_of_hidden(jax.tree.leaves((args, kwargs)), self.plates)
        elif any(map(self.host_rows.get, self.sharded)):
            raise ValueError(
                f"Plate {sorted(self.sharded)} has rows that are spread over devices, "
                "and others that `HostRows` fetches: not both are possible."
            )
        #: names of the continuous latent sites
        self.sites = latent_sites(self._trace)
        self._transforms = {name: self._transforms[name] for name in self.sites}
        values = {name: self._trace[name]["value"] for name in self.sites}
        self.shapes = jax.eval_shape(
            partial(transform_fn, self._transforms, invert=True), values
        )

    @property
    def is_small(self) -> bool:
        """Whether a row is expected to need little memory and time."""
        return is_small(self.shapes)

    @property
    def chunk_size(self) -> int:
        """Rows to evaluate at once when all data are used."""
        if self.is_small:
            return CHUNK_SIZE
        # A batch is known to fit into memory.
        num = max((num for _, num in self.plates.values()), default=0)
        return min(CHUNK_SIZE, max(num, LARGE_MODEL_CHUNK))

    def unravel(self, x: Array) -> dict[str, Array]:
        """Sites from a flat array."""
        sizes = [self.shapes[name].size for name in sorted(self.shapes)]
        if x.shape != (sum(sizes),):
            raise ValueError(
                f"`z` has shape {x.shape}; give ({sum(sizes)},) or a dict of the sites "
                f"{sorted(self.shapes)}."
            )
        parts = jnp.split(x, np.cumsum(sizes)[:-1])
        named = zip(sorted(self.shapes), parts, strict=True)
        return {name: part.reshape(self.shapes[name].shape) for name, part in named}

    def _sites(self, z: Any) -> dict[str, Array]:
        if not isinstance(z, dict):
            return self.unravel(z)
        if set(z) != set(self.sites):
            raise ValueError(
                f"`z` has the sites {sorted(z)}; the model's are {sorted(self.sites)}."
            )
        return z

    def _prepared(self, batch: Batch) -> Callable:
        if not set(self.plates) <= set(batch):
            raise ValueError(
                f"`batch` has indices of the plates {sorted(batch)}; give those of all "
                f"subsampled plates {sorted(self.plates)}."
            )
        model = with_batch(self._model, batch) if batch else self._model
        return _prepare_model_for_potential(model, self._trace, enum=self._enum)

    def _functions(
        self, batch: Batch, args: tuple, kwargs: dict
    ) -> tuple[Callable, Callable]:
        return get_potential_fn(
            self._prepared(batch),
            self._transforms,
            replay_model=self._replay,
            enum=self._enum,
            model_args=args,
            model_kwargs=kwargs,
        )

    @contextmanager
    def loaded(self, batch: Batch, ahead: Sequence[Batch] = ()) -> Iterator[None]:
        """Within it, rows of this batch that are on the host are fetched once.

        :param batch: indices of each subsampled plate.
        :param ahead: the batches of the next evaluations, to be fetched meanwhile.
        """
        with ExitStack() as stack:
            for name, fetched in self.host_rows.items():
                for rows in fetched:
                    announced = 0 < rows.prefetch <= len(ahead)
                    later = None
                    if announced:
                        later = _indices(ahead[rows.prefetch - 1][name])
                    data = rows.load(_indices(batch[name]), later)
                    stack.enter_context(rows.given(_indices(batch[name]), data))
            yield

    def potential_fn(self, z: Any, batch: Batch) -> Array:
        """Unbiased estimate of the potential energy of all data.

        :param z: position.
        :param batch: indices of each subsampled plate. Any number of them, but less
            than there are rows unless they are all rows in order. As many of each
            device, one after the other, of rows that are spread.
        """

        def energy(z, batch, args, kwargs):
            return self._functions(batch, args, kwargs)[0](z)

        found = self._on_data(energy, self._sites(z), batch)
        return found if self.shards is None else jnp.mean(found)

    def constrain_fn(self, z: Any) -> dict[str, Array]:
        """Constrained values of the sites, or of some of them, by transforms alone."""
        z = z if isinstance(z, dict) else self.unravel(z)
        return transform_fn(self._transforms, z)

    def unconstrain_fn(self, values: dict[str, Array]) -> dict[str, Array]:
        """Position of constrained values of the sites; runs the model on one row."""
        model = self._prepared({name: jnp.zeros(1, jnp.int32) for name in self.plates})
        return unconstrain_fn(model, *self.few_arguments, values)

    def postprocess_fn(self, z: Any) -> dict[str, Array]:
        """Constrained values of the sites, and deterministic sites.

        Runs the model on one row, if at all, but for plates around a deterministic
        site: these are run on all rows.
        """
        rows = {name: 1 for name in self.plates}
        for name, site in self._trace.items():
            if site["type"] != "deterministic":
                continue
            for plate in plate_frames(site, self.plates):
                if plate in self.sharded:
                    raise ValueError(
                        f"Deterministic site '{name}' is inside of plate '{plate}', "
                        "whose rows are spread over devices. Remove the site from the "
                        "model, or compute it afterwards for the draws you need."
                    )
                rows[plate] = self.plates[plate][0]
                warnings.warn(
                    f"Deterministic site '{name}' is inside of the subsampled plate "
                    f"'{plate}': every draw runs the model on all {rows[plate]} rows "
                    "and stores their values. Remove the site from the model, or "
                    "compute it afterwards for the draws you need.",
                    stacklevel=2,
                )
        batch = {name: jnp.arange(n, dtype=jnp.int32) for name, n in rows.items()}
        fn = self._functions(batch, *self.few_arguments)[1]
        # Draws on many devices are understood in compiled programs only.
        return (fn if self.shards is None else jax.jit(fn))(self._sites(z))

    # All data

    def _nests(self) -> list[list[str]]:
        """Plates in groups, such that no site is in plates of two groups."""
        nests: list[set[str]] = [{name} for name in self.plates]
        for site in self._trace.values():
            around = set(plate_frames(site, self.plates))
            if site["type"] == "sample" and around:
                joined = [nest for nest in nests if nest & around]
                nests = [nest for nest in nests if not nest & around]
                nests.append(set.union(*joined))
        return [sorted(nest) for nest in nests]

    def over_all_data(self, fn: Callable, chunk_size: int | None = None) -> Any:
        """What ``fn`` would give on all data, from blocks of consecutive rows.

        :param fn: from a batch to anything linear in the potential of the batch, such
            as its value or its derivatives.
        :param chunk_size: rows in a block (pairs of rows in nested plates), which
            bounds the memory; of each device. Default: :attr:`chunk_size`.
        """
        chunk_size = self.chunk_size if chunk_size is None else chunk_size
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be positive, got {chunk_size}.")
        # Of plates that share no site each nest is averaged alone, while the others
        # have a few fixed rows; what these and the prior add once too often is known.
        few = {
            name: self.spread(name, jnp.arange(num, dtype=jnp.int32))
            for name, (_, num) in self.draw_plates().items()
        }
        nests = self._nests()
        means = []
        for nest in nests:
            length = max(1, int(chunk_size ** (1 / len(nest))))
            means.append(self._mean_over_blocks(fn, nest, length, few))
        if len(nests) == 1:
            return means[0]
        again = len(nests) - 1
        return jax.tree.map(lambda p, *a: sum(a) - again * p, fn(few), *means)

    def _mean_over_blocks(
        self, fn: Callable, names: list[str], length: int, batch: Batch
    ) -> Any:
        if not names:
            return fn(batch)
        name, *others = names
        size = self.draw_plates()[name][0]

        def share(start, num_rows):
            rows = start + jnp.arange(num_rows, dtype=jnp.int32)
            block = {**batch, name: self.spread(name, rows)}
            mean = self._mean_over_blocks(fn, others, length, block)
            return jax.tree.map(lambda a: a * (num_rows / size), mean)

        def step(total, start):
            return add(total, share(start, num_rows)), None

        add = partial(jax.tree.map, jnp.add)
        num_rows = min(length, size)
        num, rest = divmod(size, num_rows)
        shapes = jax.eval_shape(partial(share, num_rows=num_rows), 0)
        total = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        starts = num_rows * jnp.arange(num, dtype=jnp.int32)
        total, _ = lax.scan(step, total, starts)
        return add(total, share(num * num_rows, rest)) if rest else total

    def full_potential_fn(self, z: Any, chunk_size: int | None = None) -> Array:
        """Potential energy of all data."""
        return self.over_all_data(partial(self.potential_fn, z), chunk_size)

    def full_gradient(self, z: Any, chunk_size: int | None = None) -> tuple[Array, Any]:
        """Potential energy of all data and its gradient."""
        both = fast_in_loops(jax.value_and_grad(self.potential_fn))
        return self.over_all_data(partial(both, z), chunk_size)

    # Rows one by one

    def row_energies(self, z: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
        """Potential energy of the batch, and the part of each row of each plate.

        Rows are scaled as the whole is. A site in nested plates is in the rows of each.

        :param z: position.
        :param batch: indices of each subsampled plate.
        """

        def of_rows(z, batch, args, kwargs):
            model = _unconstrain_params(self._prepared(batch), z)
            log_probs, trace = compute_log_probs(
                model, args, kwargs, {}, sum_log_prob=False
            )
            energy = -sum(map(jnp.sum, log_probs.values()), start=jnp.zeros(()))
            rows = {name: jnp.zeros(len(_indices(batch[name]))) for name in self.plates}
            for name, log_prob in log_probs.items():
                for plate, dim in plate_frames(trace[name], self.plates).items():
                    by_row = jnp.moveaxis(log_prob, dim, 0)
                    rows[plate] -= jnp.sum(by_row, axis=range(1, by_row.ndim))
            return energy, rows

        energy, rows = self._on_data(of_rows, self._sites(z), batch)
        shards = self.shards
        if shards is None:
            return energy, rows

        def joined(name, found):  # (devices, rows of each)
            if name not in self.sharded:
                return jnp.mean(found, axis=0)
            return shards.everywhere(found).reshape(-1) / shards.num

        return jnp.mean(energy), {k: joined(k, v) for k, v in rows.items()}

    def log_likelihoods(
        self, values: dict[str, Array], batch: Batch
    ) -> dict[str, Array]:
        """Log likelihood of each row of each observed site, not scaled.

        :param values: constrained values of the sites.
        :param batch: indices of each subsampled plate.
        """
        if self.shards is not None:
            raise ValueError(
                f"The log likelihood of each row of plate {self.sharded} is not to be "
                "had where its rows are spread over devices: give the model data that "
                "are on one."
            )
        model = substitute(self._prepared(batch), data=values)
        sites = trace(model).get_trace(*self._args, **self._kwargs)
        return {
            name: site["fn"].log_prob(site["value"])
            for name, site in sites.items()
            if site["type"] == "sample" and site["is_observed"]
        }


def model_layout(
    model: Callable, args: tuple, kwargs: dict, batch: int | None = None
) -> tuple[dict[str, Any], Plates]:
    """Shapes of the unconstrained sites, and sizes of the subsampled plates.

    :param model: the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param batch: batch size in place of that of the only subsampled plate.
    """
    found: list[SubsampledModel] = []
    # Not run step by step, which would compile every operation of the model alone.
    jax.eval_shape(lambda: found.append(SubsampledModel(model, args, kwargs)))
    shapes, plates = found[0].shapes, found[0].plates
    if batch is None:
        return shapes, plates
    if len(plates) != 1:
        raise ValueError(
            f"`batch={batch}` replaces the `subsample_size` of a model with one "
            f"subsampled plate; this one has {sorted(plates) or 'none'}. Set "
            "`subsample_size` in the model."
        )
    ((name, (size, _)),) = plates.items()
    if not 1 <= batch <= size:
        raise ValueError(f"`batch` must be from 1 to {size} (the data), got {batch}.")
    return shapes, {name: (size, batch)}


def is_random(plates: Plates) -> bool:
    """Whether batches of these sizes leave rows out."""
    return any(batch < size for size, batch in plates.values())


def batch_potential(
    model: Callable, args: tuple, kwargs: dict, plates: Plates
) -> Callable[[Any, Array], Array]:
    """Potential energy as a function of a position and of a key for the batch."""
    whole = SubsampledModel(model, args, kwargs)
    return lambda z, key: whole.potential_fn(z, whole.random_batch(key, plates))
