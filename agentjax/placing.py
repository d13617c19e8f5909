"""Where a learner's arrays stand: one device, or a mesh of many processes.

Floor 2, under `learner`. Shardings of parameters, moments and sums; a
process's own rows of a batch; what processes have to agree on. It knows no
loss.

Letters: B rows, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from agentjax.model import lora as adapters
from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.config import ModelConfig
from agentjax.rl.batch import Batch
from agentjax.update import Critic, State, Sums


class Placing:
  """Placements for one learner.

  Args:
    rows: of a micro-batch over all processes. mesh: None for one device.

  Attributes:
    local_rows: of a micro-batch, those that this process brings.
  """

  def __init__(
    self,
    config: ModelConfig,
    mesh: Mesh | None,
    rows: int,
    lora: adapters.LoRA | None,
  ):
    self._config, self._mesh = config, mesh
    self._rows, self._lora = rows, lora
    self.local_rows = self._local_rows()

  def on_mesh(self):
    """The context that programs are traced and called in."""
    if self._mesh is None:
      return contextlib.nullcontext()
    return jax.set_mesh(self._mesh)

  # ---- parameters and states ----------------------------------------------

  def shapes(self) -> Any:
    """Of the trained parameters."""
    if self._lora is None:
      return transformer.init_shapes(self._config)
    return adapters.init_shapes(self._config, self._lora)

  def whole(self) -> Any:
    """Shardings of all parameters of the policy; None without a mesh."""
    if self._mesh is None:
      return None
    return meshes.shardings(
      meshes.param_axes(self._config),
      self._mesh,
      transformer.init_shapes(self._config),
    )

  def trained(self) -> Any:
    """Shardings of the trained parameters; None without a mesh."""
    if self._mesh is None or self._lora is None:
      return self.whole()
    axes = adapters.axes(self._config, self._lora)
    return meshes.shardings(axes, self._mesh, self.shapes())

  def pins(
    self, optimizer: optax.GradientTransformation, critic: Critic | None
  ) -> tuple[Any, Any, Any, Any]:
    """Shardings of a State, of Sums, of metrics, and of [B, T].

    Left alone, XLA may keep sums and moments whole on every chip, and arrays
    that it may place as it likes compile other programs than those that it may
    not: what a checkpoint gives back.
    """
    if self._mesh is None:
      here = SingleDeviceSharding(jax.local_devices()[0])
      return here, here, here, here
    everywhere = NamedSharding(self._mesh, PartitionSpec())
    params, shapes = self.trained(), self.shapes()
    moments = functools.partial(_moments, everywhere=everywhere)
    state = State(
      params, moments(optimizer, shapes, params), everywhere, everywhere
    )
    if critic is not None:
      own_shapes = jax.eval_shape(
        functools.partial(critic.init, config=self._config), shapes
      )
      own = critic.init(params, self._config)
      own['value'] = jax.tree.map(lambda _: everywhere, own_shapes['value'])
      state = state._replace(
        critic=own,
        critic_opt_state=moments(critic.optimizer, own_shapes, own),
      )
    grads = (state.params, state.critic)
    sums = Sums(grads, everywhere, everywhere, everywhere)
    return state, sums, everywhere, self.batch()

  # ---- batches ------------------------------------------------------------

  def batch(self, axis: int = 0) -> NamedSharding:
    """Of arrays whose rows are that axis; needs a mesh."""
    spec = (None,) * axis + (meshes.RULES['batch'],)
    return NamedSharding(self._mesh, PartitionSpec(*spec))

  def put(self, piece: Batch, axis: int = 0) -> Any:
    """A micro-batch of which this process brings its own rows."""
    if self._mesh is None:
      return piece
    sharding = self.batch(axis)
    return Batch(
      *(jax.make_array_from_process_local_data(sharding, x) for x in piece)
    )

  def fetch(self, x: jax.Array) -> np.ndarray:
    """This process's rows of an array that is split as the batch is."""
    rows = {s.index[0].start or 0: s.data for s in x.addressable_shards}
    return np.concatenate([np.asarray(rows[i]) for i in sorted(rows)])

  def _local_rows(self) -> int:
    if self._mesh is None:
      return self._rows
    placed = self.batch().addressable_devices_indices_map((self._rows, 1))
    spans = {index[0].indices(self._rows) for index in placed.values()}
    return sum(stop - start for start, stop, _ in spans)

  def agree(self, *numbers: int) -> list[int]:
    """The maximum of each number over the processes of the mesh.

    Every process must run the same programs equally often.
    """
    if self._mesh is None or jax.process_count() == 1:
      return list(numbers)
    all_numbers = multihost_utils.process_allgather(np.array(numbers, np.int32))
    return [int(n) for n in all_numbers.max(0)]


def _moments(optimizer, shapes, shardings, *, everywhere) -> Any:
  """Shardings of an optimizer's state: as the parameters, where it is so."""

  def place(leaf, sharding, param):
    # Adafactor keeps rows and columns of a parameter, which are small.
    return sharding if leaf.shape == param.shape else everywhere

  return optax.tree.map_params(
    optimizer,
    place,
    jax.eval_shape(optimizer.init, shapes),
    shardings,
    shapes,
    transform_non_params=lambda _: everywhere,
  )
