"""FedJAX: ``fedjax.algorithms.fed_avg`` with its default way of running clients (one jitted step after another)."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.runners.turns import Load, Turns


def dense(params: dict[str, Any], name: str, x: Any) -> Any:
    prefix = f"{name}." if name else ""
    return x @ params[f"{prefix}weight"].T + params[f"{prefix}bias"]


def convolve(params: dict[str, Any], name: str, x: Any) -> Any:
    out = jax.lax.conv_general_dilated(
        x, params[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return out + params[f"{name}.bias"].reshape(1, -1, 1, 1)


def pool(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def outputs(workload: str, params: dict[str, Any], x: Any) -> Any:
    """The models of :mod:`benchmarks.models`, with the same names of parameters."""
    if workload in ("W1", "W4"):
        return dense(params, "", x)
    if workload == "W2":
        return dense(params, "4", jax.nn.relu(dense(params, "2", jax.nn.relu(dense(params, "0", x)))))
    x = pool(jax.nn.relu(convolve(params, "0", x)))
    x = pool(jax.nn.relu(convolve(params, "3", x)))
    return dense(params, "9", jax.nn.relu(dense(params, "7", x.reshape(x.shape[0], -1))))


def algorithm_of(load: Load) -> Any:
    """Federated averaging with plain SGD on both sides."""

    def loss(params: dict[str, Any], batch: dict[str, Any], _: Any) -> Any:
        logs = jax.nn.log_softmax(outputs(load.name, params, batch["x"]))
        return -jnp.take_along_axis(logs, batch["y"][:, None], axis=1).mean()

    return fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(learning_rate=load.lr), fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=load.batch, num_epochs=1),
    )  # fmt: skip


def arrays(params: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in params.items()}


def main() -> None:
    load = Load.read(sys.argv[1])
    turns = Turns(load, "fedjax")
    x, y = load.data()
    clients = {b"%d" % client: {"x": x[load.rows(client)], "y": y[load.rows(client)]} for client in range(load.clients)}
    data = fedjax.InMemoryFederatedData(clients)
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, load.cohort, seed=0)
    algorithm = algorithm_of(load)
    state = algorithm.init({name: jnp.asarray(leaf) for name, leaf in load.initial().items()})
    turns.begin()
    while True:
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        turns.round_done(partial(arrays, state.params))


if __name__ == "__main__":
    main()
