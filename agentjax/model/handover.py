"""Parameters from the learner's mesh to an engine's, in one jitted program.

Floor 1, model/. Learner and engine split the same parameters differently, and
an engine may stand on a part of the learner's chips, by default one host's.
The program runs on all chips of the learner and makes one copy per group of
chips that an engine could stand on; the copies whose chips are this engine's
become its arrays, without another transfer. This file knows no engine: what
is made of the parameters, and how it is split, is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def copies(mesh: Mesh, devices: Sequence[jax.Device]) -> Mesh:
  """A mesh of all `devices`: `mesh`, repeated along a new axis `copies`.

  Every process gets the same one if its own `mesh` stands at the same place
  among its devices.

  Raises:
    ValueError: the devices are not a multiple of such groups.
  """
  inside = list(mesh.devices.flat)
  if set(inside) == set(devices):
    grid = mesh.devices[None]
  else:
    local: dict[int, list[jax.Device]] = {}
    for device in devices:
      local.setdefault(device.process_index, []).append(device)
    mine = local.get(inside[0].process_index, [])
    if set(inside) - set(mine) or any(
      len(group) % len(inside) or len(group) != len(mine)
      for group in local.values()
    ):
      raise ValueError(
        f'an engine on the {len(inside)} devices {[d.id for d in inside]} '
        f'cannot take parameters of {len(devices)} devices of '
        f'{len(local)} processes: give it all of them, or a divisor of one '
        "process's share"
      )
    at = [mine.index(d) for d in inside]
    order = at + [i for i in range(len(mine)) if i not in at]
    grid = np.array([[local[p][i] for i in order] for p in sorted(local)])
    grid = grid.reshape(-1, *mesh.devices.shape)
  names = ('copies', *mesh.axis_names)
  return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


class HandOver:
  """Calls `function(params)` so that its result is split by `shardings`.

  Args:
    function: pure; of a tree of parameters.
    shardings: tree of NamedShardings of its result, all on one mesh.
  """

  def __init__(self, function: Callable[[Any], Any], shardings: Any):
    self._function, self._shardings = function, shardings
    self._mesh = jax.tree.leaves(shardings)[0].mesh
    self._programs: dict[Any, tuple[Callable, Mesh]] = {}

  def __call__(self, params: Any) -> Any:
    """Parameters on any mesh that holds the engine's, on one device that
    they are not bound to, or on the host."""
    source = getattr(jax.tree.leaves(params)[0], 'sharding', None)
    if not isinstance(source, NamedSharding):
      source = None
    devices = None if source is None else tuple(source.mesh.devices.flat)
    program, mesh = self._program(devices)
    if source is None:
      return program(params)
    order = tuple(mesh.devices.flat)
    if order != devices:
      # A program has one order of devices: the shards change their chips.
      params = jax.device_put(
        params,
        jax.tree.map(lambda x: _reordered(x.sharding, order), params),
      )
    return jax.tree.map(_own_copy, program(params), self._shardings)

  def _program(self, devices) -> tuple[Callable, Mesh]:
    if devices not in self._programs:
      if devices is None:
        mesh, out = self._mesh, self._shardings
      else:
        mesh = copies(self._mesh, devices)
        out = jax.tree.map(
          lambda s: NamedSharding(mesh, s.spec), self._shardings
        )
      self._programs[devices] = (
        jax.jit(self._function, out_shardings=out),
        mesh,
      )
    return self._programs[devices]


def _reordered(sharding: NamedSharding, order) -> NamedSharding:
  mesh = sharding.mesh
  grid = np.array(order).reshape(mesh.devices.shape)
  return NamedSharding(
    Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types),
    PartitionSpec(*sharding.spec),
  )


def _own_copy(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  """The shards of `x` on the chips of `sharding`, as one array."""
  by_device = {s.device: s.data for s in x.addressable_shards}
  return jax.make_array_from_single_device_arrays(
    x.shape,
    sharding,
    [by_device[d] for d in sharding.addressable_devices],
  )
