"""Which store serves a model on the devices at hand.

Floor 1, model/, above `cache`, `ragged` and `fused`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from agentjax.model.cache import Spans, Store
from agentjax.model.config import ModelConfig
from agentjax.model.fused import Fused
from agentjax.model.ragged import Ragged

# Platform -> the kernel that ships for it.
KERNELS = {'tpu': Ragged, 'gpu': Fused, 'cuda': Fused}


def best_store(
  config: ModelConfig, dtype: str, mesh: Mesh | None
) -> Callable[..., Store]:
  """The platform's kernel where it fits model and dtype, else plain XLA.

  What a kernel does not fit (float32 caches, head sizes, soft-caps) is served
  by `Spans` on every platform.
  """
  devices = jax.devices() if mesh is None else mesh.devices.flat
  kernel = KERNELS.get(devices[0].platform)
  return kernel if kernel and kernel.fits(config, dtype, mesh) else Spans
