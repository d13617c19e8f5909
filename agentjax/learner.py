"""The learner: one masked, jitted update from packed trajectories.

Floor 2. Joins `model` and `rl`, and knows no environment and no engine. A
batch of any number of rows is cut into micro-batches of one fixed shape;
unnormalised gradients and (sum, count) pairs are summed over them (and by the
mesh over devices and hosts) and divided once. An empty mask leaves weights and
optimizer untouched; so does an update whose gradient or whose new weights are
not finite, which is counted.

On a mesh over several processes each one brings its own rows, as many as it
has; they agree on the number of micro-batches and on the program.

Letters: K micro-batches of one call, B rows, T tokens, W parts that the mesh
splits rows into, N loss-carrying tokens of a part of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from agentjax import score, update
from agentjax.forward import Forward, trained_alone
from agentjax.model import lora as adapters
from agentjax.model import mesh as meshes
from agentjax.model import transformer
from agentjax.model.attention import Attention, best_attention
from agentjax.model.config import ModelConfig
from agentjax.model.remat import Policy
from agentjax.optimizers import check_numbers
from agentjax.placing import Placing
from agentjax.rl import kl, losses
from agentjax.rl.batch import Batch, add_rows, empty_batch
from agentjax.update import Critic, Loss, Objective, State


class Learner:
  """Updates a policy.

  Args:
    config: the model's. optimizer: an Optax transformation.
    loss: a policy loss of `rl.losses`, options bound.
    rows, length: shape of a micro-batch over all processes; rows divide over
      data * fsdp.
    shares: fractions of a micro-batch's tokens that may carry loss; one
      program each, the smallest that fits is used.
    micro_batches: K, how many of them one call of a program runs; what a batch
      lacks to a multiple is filled with empty ones.
    kl_coef: weight of the KL to the reference, in the loss.
    kl_value, kl_gradient: of `rl.kl`, which of it at a token, and whose
      gradient goes with it; `kl.full` is exact and needs no other gradient.
    entropy_coef: weight of the entropy bonus.
    critic: of PPO; None for none.
    lora: shape of adapters, which are trained in place of the parameters.
    reject, stale: of `rl.correction`, options bound: which tokens `keep`
      keeps, by log rho and by the versions that sampled them.
    chunk: tokens whose logits exist at once, on each part of the rows.
    dtype: of compute.
    remat, unroll, attention: see `transformer.forward`; attention None is
      `best_attention`'s for the devices and the length.
    kept: M, of batches of truncated sampling: log-probs are renormalised over
      the ids that the sampler kept, the reference's too; entropy and the exact
      KL stay those of the whole distribution. 0 is off.
    trees: rows may hold trees (`rl.tree_rows`): what trajectories share
      stands there once. For losses of tokens: one of
      trajectories or turns takes a tree for one of them.
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
    micro_batches: int = 1,
    kl_coef: float = 0.0,
    kl_value: Callable = kl.k3,
    kl_gradient: Callable = kl.ratio_gradient,
    entropy_coef: float = 0.0,
    critic: Critic | None = None,
    lora: adapters.LoRA | None = None,
    reject: Sequence[score.Reject] = (),
    stale: Callable | None = None,
    chunk: int = 1024,
    dtype: str = 'float32',
    remat: bool | Policy | None = True,
    unroll: bool = False,
    attention: Attention | None = None,
    kept: int = 0,
    trees: bool = False,
    mesh: Mesh | None = None,
  ):
    check_numbers(kl_coef=kl_coef, entropy_coef=entropy_coef)
    for name, value in (('rows', rows), ('length', length), ('chunk', chunk),
                        ('micro_batches', micro_batches)):  # fmt: skip
      if value < 1:
        raise ValueError(f'learner.{name} is {value}: give at least 1')
    if not 0 <= kept <= config.vocab_size:
      raise ValueError(
        f'learner.kept is {kept}: give 0 (off) to the {config.vocab_size} ids '
        'that there are'
      )
    ascending = list(shares) == sorted(set(shares))
    if not shares or not ascending or shares[0] <= 0 or shares[-1] != 1.0:
      raise ValueError(
        f'shares {shares}: give ascending fractions above 0, up to 1.0'
      )
    for name, value, kind in (
      ('critic', critic, Critic), ('lora', lora, adapters.LoRA),
    ):  # fmt: skip
      if value is not None and not isinstance(value, kind):
        raise ValueError(
          f'learner.{name} is {value!r}: give a {kind.__name__}, in a config a '
          f"section with 'call': '{kind.__module__}.{kind.__name__}'"
        )
    if trees and critic is not None and critic.turn_ends:
      raise ValueError(
        'learner.critic.turn_ends with learner.trees: in a row that holds a '
        'tree, turns of two branches may stand side by side and be taken for '
        'one; drop one of them'
      )
    if lora is not None and critic is not None and critic.own_trunk:
      raise ValueError(
        'learner.critic.own_trunk trains a decoder of its own beside lora: '
        'share the trunk, or drop lora'
      )
    self.config, self.rows, self.length = config, rows, length
    self.lora, self.kept = lora, kept
    self.kl_coef, self.critic = kl_coef, critic
    self.reject, self.stale, self.trees = tuple(reject), stale, trees
    self.mesh, self._optimizer = mesh, optimizer
    self._micro_batches = micro_batches
    self._parts = 1
    if mesh is not None:
      meshes.check(config, mesh, rows=rows)
      self._parts = meshes.ways('batch', mesh)
    self._capacities = [
      max(1, int(rows // self._parts * length * s)) for s in shares
    ]
    self._placing = Placing(config, mesh, rows, lora)
    self.local_rows = self._placing.local_rows
    self.frozen: Any = None
    self._model = Forward(
      config,
      self._parts,
      chunk,
      jnp.dtype(dtype),
      remat,
      unroll,
      attention or best_attention(config, length, mesh, trees),
      trained_alone
      if lora is None
      else functools.partial(adapters.attach, scale=lora.scale),
      trees,
    )
    self.objective = Objective(
      loss, kl_value, kl_gradient, entropy_coef, critic
    )
    self._jit()

  def _jit(self) -> None:
    state, sums, metrics, rows = self._placing.pins(
      self._optimizer, self.critic
    )
    whole = {'optimizer': self._optimizer, 'critic': self.critic}
    model = {'model': self._model}

    def jit(function, out, options=None, **more):
      function = functools.partial(function, **(options or {}))
      return jax.jit(function, out_shardings=out, **more)

    self._zeros = jit(update.zeros, sums)
    self._add = jit(
      update.add, sums, model | {'objective': self.objective},
      static_argnames='capacity', donate_argnums=4,
    )  # fmt: skip
    self._apply = jit(update.apply, (state, metrics), whole, donate_argnums=0)
    self._init = jit(update.init, state, whole | model)
    self._logprobs = jit(
      score.logprobs, rows, model, static_argnames='capacity'
    )
    self._values = jit(score.values, rows, model)
    self._keep = jit(
      score.keep, rows, {'reject': self.reject, 'stale': self.stale}
    )

  # ---- state --------------------------------------------------------------

  def begin(self, params: Any, seed: int) -> State:
    """A state that begins with these parameters of the whole policy.

    With `lora` they stay as they are, in `frozen`, and it begins with adapters
    that change nothing yet.
    """
    if self.lora is None:
      return self.init(params)
    self.frozen = params
    if self.mesh is not None:
      self.frozen = jax.device_put(params, self._placing.whole())
    fresh = functools.partial(adapters.init, config=self.config, lora=self.lora)
    return self.init(jax.jit(fresh)(jax.random.key(seed)))

  def whole(self, params: Any) -> Any:
    """All parameters of the policy, as forward pass and engine take them."""
    return self._model.whole(self.frozen, params)

  def trained(self, params: Any) -> Any:
    """What an engine takes that has the frozen parameters already."""
    return self._model.whole(None, params)

  def shardings(self) -> Any:
    """Shardings of the trained parameters, or None without a mesh."""
    return self._placing.trained()

  def init(self, params: Any) -> State:
    """A state with `params`, which it takes over, and fresh optimizers."""
    if (shardings := self.shardings()) is not None:
      params = jax.device_put(params, shardings)
    with self._placing.on_mesh():
      return self._init(params, self.frozen)

  def compile(
    self, state: State, reference: Any = None, *, scores: bool = False
  ) -> State:
    """Runs every program once on an empty batch, which changes nothing.

    Args:
      scores: `logprobs` too.
    """
    empty = empty_batch(self.local_rows, self.length, self.kept)
    self._placing.agree(0, 0)
    for capacity in self._capacities:
      if scores:
        self._score(self._logprobs, [empty], empty, state.params, self.frozen,
                    capacity=capacity)  # fmt: skip
      state, _ = self._update(state, [empty], capacity, reference, self.kl_coef)
    if self.corrects:
      self.keep(empty, 0)
    if self.critic is not None:
      self.values(state, empty)
    return state

  @property
  def corrects(self) -> bool:
    """Whether `keep` may reject a token."""
    return bool(self.reject) or self.stale is not None

  def lower(self) -> dict[str, jax.stages.Lowered]:
    """The programs that do the work, from shapes alone; needs a mesh.

    So they compile for chips that are not there. Parameters are float32.
    """
    frozen = None
    if self.lora is not None:
      frozen = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        transformer.init_shapes(self.config), self._placing.whole(),
      )  # fmt: skip
    K = self._micro_batches
    with self._placing.on_mesh():
      # Shapes that come out of a jitted program know how they are split.
      state = jax.eval_shape(self._init, self._placing.shapes(), frozen)
      sums = jax.eval_shape(self._zeros, state.params, state.critic)
      batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
          (K, *x.shape), x.dtype, sharding=self._placing.batch(1)
        ),
        empty_batch(self.rows, self.length, self.kept),
      )
      out = {
        f'add {c}': self._add.lower(
          (state.params, state.critic), frozen, None, np.float32(0), sums,
          batch, capacity=c,
        )
        for c in self._capacities
      }  # fmt: skip
      out['apply'] = self._apply.lower(state, sums)
    return out

  # ---- update -------------------------------------------------------------

  def update(
    self,
    state: State,
    batch: Batch,
    reference: Any = None,
    kl_coef: float | None = None,
  ) -> tuple[State, dict[str, float]]:
    """One optimizer step on the rows of all processes.

    Args:
      state: given up.
      batch: this process's rows [B, length], B a multiple of `local_rows`;
        another process may have more or fewer. Processes that share a part
        of the rows (a tensor axis over hosts) must give the same.
      reference: trained parameters of the KL's reference policy, or None.
      kl_coef: in place of the learner's own.

    Returns:
      The new state, and metrics: the loss as it was minimised, all others
      averaged over all loss-carrying tokens. What leaves of a tree share is one
      token there, and in the loss what its weight says.
    """
    kl_coef = self.kl_coef if kl_coef is None else kl_coef
    check_numbers(kl_coef=kl_coef)
    if kl_coef and reference is None:
      raise ValueError(
        f'kl_coef is {kl_coef}, and there is no reference to hold the policy '
        'to: give one, or a kl_coef of 0'
      )
    pieces, capacity = self._pieces(batch)
    return self._update(state, pieces, capacity, reference, kl_coef)

  def logprobs(self, params: Any, batch: Batch) -> np.ndarray:
    """float32 [B, T] of the batch's loss-carrying tokens, 0 elsewhere."""
    pieces, capacity = self._pieces(batch)
    return self._score(
      self._logprobs, pieces, batch, params, self.frozen, capacity=capacity
    )

  def values(self, state: State, batch: Batch) -> np.ndarray:
    """float32 [B, T]: the critic's value of the state AFTER each token."""
    pieces, _ = self._pieces(batch)
    return self._score(
      self._values, pieces, batch, state.critic, state.params, self.frozen
    )

  def keep(self, batch: Batch, version: int) -> np.ndarray:
    """bool [B, T]: loss-carrying tokens that `reject` and `stale` leave.

    Args:
      version: of the policy now, as tokens are marked with.
    """
    pieces, _ = self._pieces(batch)
    return self._score(self._keep, pieces, batch, np.int32(version), last=True)

  def _pieces(self, batch: Batch) -> tuple[list[Batch], int]:
    """Micro-batches, as many as any process has, and their capacity."""
    local, B = self.local_rows, batch.tokens.shape[0]
    if B % local or batch.tokens.shape[1] != self.length:
      raise ValueError(
        f'batch of shape {batch.tokens.shape}: rows must be a multiple of '
        f'{local} and the length {self.length}, as rl.batch.pack makes them'
      )
    if (kept := batch.kept.shape[2]) != self.kept:
      raise ValueError(
        f'the batch has room for {kept} kept ids a token and the learner for '
        f'{self.kept}: give pack and Learner the same kept'
      )
    # A row may be longer than that: positions restart in it.
    if (last := int(batch.positions.max(initial=0))) >= self.config.context:
      raise ValueError(
        f'a trajectory has {last + 1} tokens, the model '
        f'{self.config.context} positions: lower limits.context'
      )
    part = self.rows // self._parts
    counts = (batch.weights > 0).reshape(B // part, -1).sum(-1)
    n, most = self._placing.agree(B // local, int(counts.max(initial=0)))
    batch = add_rows(batch, n * local)
    pieces = [
      Batch(*(x[i : i + local] for x in batch))
      for i in range(0, n * local, local)
    ]
    return pieces, next(c for c in self._capacities if c >= most)

  def _update(self, state, pieces, capacity, reference, kl_coef):
    K = self._micro_batches
    missing = -len(pieces) % K
    empty = empty_batch(self.local_rows, self.length, self.kept)
    pieces = pieces + [empty] * missing
    with self._placing.on_mesh():
      sums = self._zeros(state.params, state.critic)
      for i in range(0, len(pieces), K):
        stacked = Batch(*map(np.stack, zip(*pieces[i : i + K], strict=True)))
        sums = self._add(
          (state.params, state.critic), self.frozen, reference,
          np.float32(kl_coef), sums, self._placing.put(stacked, 1),
          capacity=capacity,
        )  # fmt: skip
      state, metrics = self._apply(state, sums)
    return state, {k: float(v) for k, v in jax.device_get(metrics).items()}

  def _score(self, program, pieces, batch, *args, last=False, **options):
    """A program's [B, T] of all rows that this process brought."""
    out = []
    with self._placing.on_mesh():
      for piece in pieces:
        placed = self._placing.put(piece)
        given = (placed, *args) if last else (*args, placed)
        out.append(self._placing.fetch(program(*given, **options)))
    return np.concatenate(out)[: batch.tokens.shape[0]]
