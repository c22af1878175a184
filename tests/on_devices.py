# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""What `test_devices.py` runs in processes of its own, since devices are made there.

python on_devices.py eight
python on_devices.py process 0 PORT, and the same with 1
"""

import os
import re
import sys
import warnings

import numpy as np

NUM_DATA, BATCH = 1600, 80


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_DATA, 2)).astype(np.float32)
    p = 1 / (1 + np.exp(-x @ [1.0, -0.5]))
    return x, (rng.uniform(size=NUM_DATA) < p).astype(np.float32)


def exact(x, y):
    """Mean and variance of the posterior, by quadrature."""
    side = np.linspace(-0.4, 0.4, 81)
    grid = np.stack(np.meshgrid(1 + side, -0.5 + side, indexing="ij"), -1)
    logits = grid.reshape(-1, 2) @ x.T
    log = logits @ y - np.logaddexp(0, logits).sum(1)
    log -= (grid.reshape(-1, 2) ** 2).sum(1) / 8
    p = np.exp(log - log.max())
    p /= p.sum()
    mean = p @ grid.reshape(-1, 2)
    return mean, p @ (grid.reshape(-1, 2) - mean) ** 2


def spread(mesh, *arrays):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return [jax.device_put(a, sharding) for a in arrays]


def explicit_mesh(shape, names, **options):
    import jax
    from jax.sharding import AxisType

    types = (AxisType.Explicit,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, **options)


def make_models():
    import jax.numpy as jnp

    import numpyro
    import numpyro.distributions as dist

    def model(x, y, num=BATCH):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        numpyro.deterministic("norm", jnp.sum(b**2))
        with numpyro.plate("data", len(x), subsample_size=num):
            x = numpyro.subsample(x, event_dim=1)
            y = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)

    def by_index(data, num=BATCH):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        with numpyro.plate("data", NUM_DATA, subsample_size=num) as i:
            logits = data["x"][i] @ b
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=data["y"][i])

    return model, by_index


def sample(x, y):
    """A run, compared with the exact posterior."""
    from jax import random

    from numpyro.diagnostics import effective_sample_size
    from numpyro.infer import MCMC
    from numpyro_pdmp import Boomerang

    mcmc = MCMC(
        Boomerang(make_models()[0]),
        num_warmup=200,
        num_samples=500,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), x, y)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["b"], float)
    mean, variance = exact(*data())
    ess = effective_sample_size(draws)
    assert np.all(ess > 500), ess
    error = np.abs(draws.mean((0, 1)) - mean) / np.sqrt(variance / ess)
    assert np.all(error < 5), error
    centred = (draws - mean) ** 2
    size = effective_sample_size(centred)
    error = np.abs(centred.mean((0, 1)) - variance) / np.sqrt(2 / size) / variance
    assert np.all(error < 5), error
    return mcmc


def check_potentials():
    """As on one device: potentials, gradients, passes over all data, means."""
    import jax
    from jax import random
    import jax.numpy as jnp

    from numpyro_pdmp.batch import num_words
    from numpyro_pdmp.shards import shard_draws
    from numpyro_pdmp.subsample import SubsampledModel

    model, by_index = make_models()
    x, y = map(jnp.asarray, data())
    z = {"b": jnp.array([0.8, -0.3])}
    alone = SubsampledModel(model, (x, y))
    a, b = spread(explicit_mesh((2, 4), ("hosts", "devices")), x, y)

    @jax.jit
    def evaluate(x, y):
        whole = SubsampledModel(model, (x, y))
        other = SubsampledModel(by_index, ({"x": x, "y": y},))
        assert other.plates == whole.plates == alone.plates
        batch = whole.pilot_batch(160)
        return batch, [
            whole.potential_fn(z, batch),
            jax.grad(whole.potential_fn)(z, batch)["b"],
            other.potential_fn(z, batch),
            *jax.tree.leaves(whole.full_gradient(z, 70)),
            whole.row_energies(z, batch)[1]["data"],
        ]

    batch, found = jax.device_get(evaluate(a, b))
    batch = {"data": jnp.asarray(batch["data"])}
    expected = [
        alone.potential_fn(z, batch),
        jax.grad(alone.potential_fn)(z, batch)["b"],
        alone.potential_fn(z, batch),
        *jax.tree.leaves(alone.full_gradient(z)),
        alone.row_energies(z, batch)[1]["data"],
    ]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)

    # Batches are of different rows on each device, and right on average.
    @jax.jit
    def many(x, y, words):
        whole = SubsampledModel(model, (x, y))

        def one(words):
            plates = whole.draw_plates()
            batch = shard_draws(words, plates, whole.sharded, "without_replacement")
            batch = whole.placed(batch)
            return whole.potential_fn(z, batch), batch["data"].rows

        return jax.vmap(one)(words)

    num = num_words({"data": (NUM_DATA // 8, BATCH // 8)}, "without_replacement")
    energies, rows = many(a, b, random.bits(random.key(1), (2000, num), jnp.uint32))
    rows = np.asarray(rows).reshape(2000, 8, BATCH // 8)
    assert all(len(set(share)) == BATCH // 8 for share in rows.reshape(-1, BATCH // 8))
    assert np.mean(rows[:, 0] == rows[:, 1]) < 0.05
    count = np.bincount(rows[:, 3].ravel(), minlength=NUM_DATA // 8)
    assert np.all(np.abs(count - 100) < 5 * 10)
    energies = np.asarray(energies, float)
    error = energies.std() / len(energies) ** 0.5
    assert abs(energies.mean() - float(alone.full_potential_fn(z))) < 4 * error


def check_communication(x, y, state):
    """One all-reduce, of gradients, is all that devices tell each other."""
    import jax

    from numpyro_pdmp import Boomerang

    kernel = Boomerang(make_models()[0])
    step = jax.jit(lambda state, args: kernel.sample(state, args, {}))
    text = step.lower(state, (x, y)).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (.*?) ({names})[\w-]*\(", text)
    assert [name for _, name in found] == ["all-reduce"], found
    # Of the gradients of four chains, at the position and the reference point.
    sizes = re.findall(r"f32\[([\d,]*)\]", found[0][0])
    assert set(sizes) == {"4,2"} and len(sizes) <= 3, found
    # And a device has its own rows only.
    assert f"f32[{NUM_DATA // 8},2]" in text and f"f32[{NUM_DATA},2]" not in text


def check_errors(x, y):
    import jax
    from jax import random
    from jax.sharding import Mesh

    import numpyro
    import numpyro.distributions as dist
    from numpyro_pdmp import Boomerang

    model, _ = make_models()

    def message(kernel, *args):
        try:
            kernel.init(random.key(0), 100, None, args, {})
        except ValueError as error:
            return str(error)
        raise AssertionError("no error")

    assert "subsample_size=81" in message(Boomerang(model), x, y, 81)
    assert "AxisType.Auto" in message(Boomerang(model), x, y, None)
    assert "not spread" in message(Boomerang(model), x, np.asarray(y))
    assert "'epoch'" in message(Boomerang(model, batching="epoch"), x, y)
    assert "'importance'" in message(Boomerang(model, batching="importance"), x, y)

    rows = np.arange(NUM_DATA)

    def hidden(x):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Normal(x[i] @ b, 1), obs=jax.numpy.array(rows)[i])

    kernel = Boomerang(hidden, inverse_mass_matrix=np.ones(2))
    assert "sees its own rows only" in message(kernel, x)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Boomerang(model)._functions(tuple(spread(mesh, x, y)), {})
    assert "explicit" in str(found[0].message), found


def check_parallel_chains():
    """A chain on each device is the same as it is among others on one."""
    from jax import random
    import jax.numpy as jnp

    from numpyro.infer import MCMC
    from numpyro_pdmp import BPS

    kernel = BPS(
        potential_fn=lambda x: 0.5 * jnp.sum(x**2),
        adapt_mass_matrix=False,
        draw_time=1.0,
        cross_chain_adapt=False,
    )
    draws = []
    for method in ("parallel", "vectorized"):
        mcmc = MCMC(
            kernel,
            num_warmup=0,
            num_samples=200,
            num_chains=8,
            chain_method=method,
            progress_bar=False,
        )
        mcmc.run(random.key(0), init_params=jnp.ones((8, 2)))
        draws.append(np.asarray(mcmc.get_samples(group_by_chain=True)))
    assert draws[0].shape == (8, 200, 2)
    np.testing.assert_allclose(draws[0][:, :5], draws[1][:, :5], rtol=1e-3, atol=1e-3)
    assert np.all(np.abs(draws[0].mean((0, 1))) < 5 * (2 / 8 / 200) ** 0.5)


def eight():
    from numpyro_pdmp import check

    x, y = spread(explicit_mesh((8,), ("data",)), *data())
    check_errors(x, y)
    check_potentials()
    mcmc = sample(x, y)
    check_communication(x, y, mcmc.last_state)
    assert check(mcmc).num_draws == 2000
    check_parallel_chains()


def process(index, port):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    mesh = explicit_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    own = slice(index * NUM_DATA // 2, (index + 1) * NUM_DATA // 2)
    x, y = (jax.make_array_from_process_local_data(sharding, a[own]) for a in data())
    assert not x.is_fully_addressable and x.shape == (NUM_DATA, 2)
    print(np.asarray(sample(x, y).get_samples()["b"]).sum(dtype=float))


if __name__ == "__main__":
    warnings.simplefilter("error")
    num = 8 if sys.argv[1] == "eight" else 2
    # Compiled quickly rather than well: most of the time is compilation.
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={num} "
        "--xla_backend_optimization_level=0"
    )
    if sys.argv[1] == "eight":
        eight()
    else:
        process(*map(int, sys.argv[2:]))
