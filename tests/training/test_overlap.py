"""The next batch is transferred while the devices still compute a step."""

import threading

import jax
import numpy as np
import pytest
from jax.experimental import io_callback
from training_support import tiny

from lcjax.parallel.sharding import Mesh
from lcjax.training import batches, loop, run


@pytest.mark.slow
def test_the_next_batch_is_put_on_the_devices_while_a_step_still_runs(
    tmp_path, corpus, compiled_once, monkeypatch
):
    """The results of step n are held back until batch n + 1 was sent, or for 10 s, in vain."""
    steps, put, begin = 4, batches.put, loop.jitted_step
    sent = [threading.Event() for _ in range(steps)]
    overlapped = []

    def recording_put(local, mesh):
        arrays = put(local, mesh)
        next(event for event in sent if not event.is_set()).set()
        return arrays

    def wait(number):
        if number < steps:  # behind the last step there is no batch
            overlapped.append(sent[number].wait(10))
        return np.int32(0)

    @jax.jit
    def held_back(number, loss):
        return loss + io_callback(wait, jax.ShapeDtypeStruct((), np.int32), number)

    def slowed(*arguments, **settings):
        step = begin(*arguments, **settings)

        def both(*operands):
            state, info = step(*operands)
            return state, info | {"loss": held_back(state.step, info["loss"])}

        return both

    monkeypatch.setattr(batches, "put", recording_put)
    monkeypatch.setattr(loop, "jitted_step", slowed)
    settings = {"save_every": 100, "export": False, "mesh": Mesh(data=8, fsdp=1)}
    run(tiny(tmp_path / "run", corpus, steps=steps, **settings))
    assert overlapped == [True] * (steps - 1)
