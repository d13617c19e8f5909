"""The learner: one masked, jitted update from packed trajectories.

Floor 2. Joins `model` and `rl`, and knows no environment and no engine. A
batch of any number of rows is cut into micro-batches of one fixed shape;
unnormalised gradients and (sum, count) pairs are summed over them (and by the
mesh over devices and hosts) and divided once. An empty mask leaves weights and
optimizer untouched; so does an update whose gradient or whose new weights are
not finite, which is counted.

On a mesh over several processes each one brings its own rows, as many as it
has; they agree on the number of micro-batches and on the program.

Letters: B rows, T tokens, W parts that the mesh splits rows into, N
loss-carrying tokens of a part of a micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from agentjax import update
from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.attention import Attention, best_attention
from agentjax.model.config import ModelConfig
from agentjax.optimizers import check_numbers
from agentjax.rl import losses
from agentjax.rl.batch import Batch, add_rows, empty_batch
from agentjax.rl.losses import PolicyLoss
from agentjax.update import State, Sums

Loss = Callable[..., PolicyLoss]


class Learner:
  """Updates a policy.

  Args:
    config: the model's. optimizer: an Optax transformation.
    loss: a policy loss of `rl.losses`, options bound.
    rows, length: shape of a micro-batch over all processes; rows divide over
      data * fsdp.
    shares: fractions of a micro-batch's tokens that may carry loss; one
      program each, the smallest that fits is used.
    kl_coef: weight of k3 to the reference, with the ratio's gradient.
    entropy_coef: weight of the entropy bonus.
    chunk: tokens whose logits exist at once, on each part of the rows.
    dtype: of compute.
    remat, unroll, attention: see `transformer.forward`; attention None is
      `best_attention`'s for the devices and the length.
    mesh: None for one device.
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    optimizer: optax.GradientTransformation,
    loss: Loss = losses.ppo_clip,
    rows: int,
    length: int,
    shares: Sequence[float] = (1.0,),
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    chunk: int = 1024,
    dtype: str = 'float32',
    remat: bool = True,
    unroll: bool = False,
    attention: Attention | None = None,
    mesh: Mesh | None = None,
  ):
    check_numbers(kl_coef=kl_coef, entropy_coef=entropy_coef)
    for name, value in (('rows', rows), ('length', length), ('chunk', chunk)):
      if value < 1:
        raise ValueError(f'learner.{name} is {value}: give at least 1')
    ascending = list(shares) == sorted(set(shares))
    if not shares or not ascending or shares[0] <= 0 or shares[-1] != 1.0:
      raise ValueError(
        f'shares {shares}: give ascending fractions above 0, up to 1.0'
      )
    if length > config.context:
      raise ValueError(
        f'length {length} exceeds the {config.context} positions of the model'
      )
    self.config, self.rows, self.length = config, rows, length
    self.kl_coef = kl_coef
    self.mesh, self._optimizer = mesh, optimizer
    self._parts = 1
    if mesh is not None:
      meshes.check(config, mesh, rows=rows)
      self._parts = meshes.ways('batch', mesh)
    self._capacities = [
      max(1, int(rows // self._parts * length * s)) for s in shares
    ]
    self.local_rows = self._local_rows()
    add = functools.partial(
      update.add,
      parts=self._parts,
      config=config,
      loss=loss,
      kl_coef=kl_coef,
      entropy_coef=entropy_coef,
      chunk=chunk,
      dtype=jnp.dtype(dtype),
      remat=remat,
      unroll=unroll,
      attention=attention or best_attention(config, length, mesh),
    )
    self._jit(add)

  def _jit(self, add: Callable) -> None:
    optimizer = self._optimizer
    # Pinned: left alone, XLA may keep sums and moments whole on every chip,
    # and arrays that it may place as it likes compile other programs than
    # those that it may not: what a checkpoint gives back.
    here = SingleDeviceSharding(jax.local_devices()[0])
    pins = {
      name: {'out_shardings': here} for name in ('sums', 'state', 'apply')
    }
    if self.mesh is not None:
      everywhere = NamedSharding(self.mesh, PartitionSpec())
      state = self._state_shardings(everywhere)
      sums = Sums(state.params, everywhere, everywhere)
      pins['sums'] = {'out_shardings': sums}
      pins['state'] = {'out_shardings': state}
      pins['apply'] = {'out_shardings': (state, everywhere)}
    self._zeros = jax.jit(update.zeros, **pins['sums'])
    self._add = jax.jit(
      add, static_argnames='capacity', donate_argnums=2, **pins['sums']
    )
    self._apply = jax.jit(
      functools.partial(update.apply, optimizer=optimizer),
      donate_argnums=0,
      **pins['apply'],
    )
    self._init = jax.jit(
      functools.partial(update.init, optimizer=optimizer), **pins['state']
    )

  # ---- state --------------------------------------------------------------

  def shardings(self) -> Any:
    """Shardings of the parameters, or None without a mesh."""
    if self.mesh is None:
      return None
    return meshes.shardings(
      meshes.param_axes(self.config),
      self.mesh,
      transformer.init_shapes(self.config),
    )

  def _state_shardings(self, everywhere: NamedSharding) -> State:
    params = self.shardings()
    shapes = transformer.init_shapes(self.config)

    def place(leaf, sharding, param):
      # Adafactor keeps rows and columns of a parameter, which are small.
      return sharding if leaf.shape == param.shape else everywhere

    opt_state = optax.tree.map_params(
      self._optimizer,
      place,
      jax.eval_shape(self._optimizer.init, shapes),
      params,
      shapes,
      transform_non_params=lambda _: everywhere,
    )
    return State(params, opt_state, everywhere, everywhere)

  def init(self, params: Any) -> State:
    """A state with `params`, which it takes over, and a fresh optimizer."""
    if (shardings := self.shardings()) is not None:
      params = jax.device_put(params, shardings)
    with self._on_mesh():
      return self._init(params)

  def _on_mesh(self):
    if self.mesh is None:
      return contextlib.nullcontext()
    return jax.set_mesh(self.mesh)

  def compile(self, state: State, reference: Any = None) -> State:
    """Runs every program once on an empty batch, which changes nothing."""
    empty = empty_batch(self.local_rows, self.length)
    self._agree(0, 0)
    for capacity in self._capacities:
      state, _ = self._update(state, [empty], capacity, reference)
    return state

  def lower(self) -> dict[str, jax.stages.Lowered]:
    """The programs that do the work, from shapes alone; needs a mesh.

    So they compile for chips that are not there. Parameters are float32.
    """
    shapes = transformer.init_shapes(self.config)
    with self._on_mesh():
      # Shapes that come out of a jitted program know how they are split.
      state = jax.eval_shape(self._init, shapes)
      sums = jax.eval_shape(self._zeros, shapes)
      batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=self._batch_sharding()
        ),
        empty_batch(self.rows, self.length),
      )
      out = {
        f'add {c}': self._add.lower(state.params, None, sums, batch, capacity=c)
        for c in self._capacities
      }
      out['apply'] = self._apply.lower(state, sums)
    return out

  # ---- update -------------------------------------------------------------

  def update(
    self, state: State, batch: Batch, reference: Any = None
  ) -> tuple[State, dict[str, float]]:
    """One optimizer step on the rows of all processes.

    Args:
      state: given up.
      batch: this process's rows [B, length], B a multiple of `local_rows`;
        another process may have more or fewer. Processes that share a part
        of the rows (a tensor axis over hosts) must give the same.
      reference: parameters of the KL's reference policy, or None.

    Returns:
      The new state, and metrics averaged over all loss-carrying tokens.
    """
    local, B = self.local_rows, batch.tokens.shape[0]
    if B % local or batch.tokens.shape[1] != self.length:
      raise ValueError(
        f'batch of shape {batch.tokens.shape}: rows must be a multiple of '
        f'{local} and the length {self.length}, as rl.batch.pack makes them'
      )
    part = self.rows // self._parts
    counts = (batch.weights > 0).reshape(B // part, -1).sum(-1)
    n, most = self._agree(B // local, int(counts.max(initial=0)))
    batch = add_rows(batch, n * local)
    pieces = [
      Batch(*(x[i : i + local] for x in batch))
      for i in range(0, n * local, local)
    ]
    capacity = next(c for c in self._capacities if c >= most)
    return self._update(state, pieces, capacity, reference)

  def _local_rows(self) -> int:
    """Rows of a micro-batch that this process brings."""
    if self.mesh is None:
      return self.rows
    placed = self._batch_sharding().addressable_devices_indices_map(
      (self.rows, self.length)
    )
    spans = {index[0].indices(self.rows) for index in placed.values()}
    return sum(stop - start for start, stop, _ in spans)

  def _agree(self, *numbers: int) -> list[int]:
    """The maximum of each number over the processes of the mesh.

    Every process must run the same programs equally often.
    """
    if self.mesh is None or jax.process_count() == 1:
      return list(numbers)
    all_numbers = multihost_utils.process_allgather(np.array(numbers, np.int32))
    return [int(n) for n in all_numbers.max(0)]

  def _update(self, state, pieces, capacity, reference):
    with self._on_mesh():
      sums = self._zeros(state.params)
      for piece in pieces:
        sums = self._add(
          state.params, reference, sums, self._put(piece), capacity=capacity
        )
      state, metrics = self._apply(state, sums)
    return state, {k: float(v) for k, v in jax.device_get(metrics).items()}

  def _batch_sharding(self) -> NamedSharding:
    return NamedSharding(self.mesh, PartitionSpec(meshes.RULES['batch']))

  def _put(self, piece: Batch) -> Any:
    if self.mesh is None:
      return piece
    sharding = self._batch_sharding()
    return Batch(
      *(jax.make_array_from_process_local_data(sharding, x) for x in piece)
    )
