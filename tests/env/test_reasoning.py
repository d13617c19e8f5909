"""reasoning-gym: every generator, its grader, and answers that mean harm."""

import importlib.util

import pytest
from requirements import require

from agentjax.env import reasoning
from agentjax.env.apart import Apart
from agentjax.env.reasoning import Gym
from agentjax.types import Status, Task, ToolCall, ToolSpec, Turn, Verdict

GOLD = """
from agentjax.env import reasoning

def gold(name, config, seed, index):
  return reasoning.entry_of(name, config, seed, index)[1]['answer']
"""


@pytest.fixture(scope='module')
def gym():
  require(
    'reasoning-gym',
    importlib.util.find_spec('reasoning_gym') is not None,
    "pip install 'agentjax[data]'",
  )
  made = Gym(workers=1, grade_s=2)
  yield made
  made.close()


@pytest.fixture(scope='module')
def gold(tmp_path_factory):
  """task -> the generator's own answer, which no task carries."""
  folder = tmp_path_factory.mktemp('gold')
  (folder / 'tests_reasoning_gold.py').write_text(GOLD)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    with Apart('tests_reasoning_gold:gold', workers=1) as apart:

      def ask(task):
        v = task.verify
        return apart(v['dataset'], dict(v['config']), v['seed'], v['index'])

      yield ask


def test_there_are_over_a_hundred(gym):
  names = gym.datasets()
  assert len(names) > 100 and not set(names) & set(reasoning.LEFT_OUT)


@pytest.mark.parametrize('name', ['gcd', 'countdown', 'acre'])
def test_right_and_wrong_answers(gym, gold, name):
  train = gym.tasks(name, 'train', 4)
  assert gym.tasks(name, 'train', 3) == train[:3]
  assert len({t.id for t in train}) == 4
  for task in train[:2]:
    right = gold(task)
    assert gym.solved(task, right)
    assert gym.solved(task, f'so <answer> {right} </answer>')
    assert gym.graded(task, right).value == 1.0
    for wrong in (None, '', ' ', 'xyz', '<answer></answer>', right + '1'):
      assert not gym.solved(task, wrong)
      assert gym.graded(task, wrong).value < 1.0


def test_no_question_is_in_both_splits(gym):
  """Of seeds that make the same questions, and few of them."""
  questions = {
    split: {
      t.messages[-1].content
      for seed in (0, 3)
      for t in gym.tasks('coin_flip', split, 12, seed)
    }
    for split in reasoning.SPLITS
  }
  assert not questions['train'] & questions['test']
  assert len(questions['train']) >= 12


def test_a_config_makes_other_tasks(gym):
  plain = gym.tasks('chain_sum', 'train', 2)
  hard = gym.tasks(
    'chain_sum', 'train', 2, config={'min_digits': 6, 'max_digits': 6}
  )
  assert {t.id for t in plain}.isdisjoint(t.id for t in hard)
  assert not gym.solved(hard[0], '12')


@pytest.mark.parametrize(
  ('arguments', 'says'),
  [
    (('nothing', 'train', 1), 'none of that name'),
    (('game_of_life_halting', 'train', 1), 'any text'),
    (('gcd', 'dev', 1), 'choose'),
    (('gcd', 'train', -1), 'choose'),
  ],
)
def test_what_is_not_offered_is_refused(gym, arguments, says):
  with pytest.raises(ValueError, match=says):
    gym.tasks(*arguments)


def test_a_task_of_another_version_is_no_task(gym):
  (task,) = gym.tasks('gcd', 'train', 1)
  other = Task(task.id, task.messages, {**task.verify, 'question': 'x'})
  with pytest.raises(RuntimeError, match='make them anew'):
    gym.score(other, '1')


# ---- harm -------------------------------------------------------------------

TOUCH = "__import__('pathlib').Path({path!r}).touch()"


@pytest.mark.parametrize('name', [*reasoning._EVALUATED, *reasoning._PARSED])
def test_nothing_that_a_policy_wrote_is_run(gym, tmp_path, name):
  """These graders evaluate an answer; the first line shows that they would."""
  (task,) = gym.tasks(name, 'train', 1)
  path = tmp_path / 'touched'
  code = TOUCH.format(path=str(path))
  for answer in (
    code, f'[{code}]', f'str({code})', f'1 if {code} else 2',
    f'[x for x in [{code}]]', f'(lambda: {code})()', f'{code} + 1',
    f'x*{code}', f'sin({code})', f"f'{{{code}}}'",
  ):  # fmt: skip
    assert gym.score(task, answer) < 0.5
  assert not path.exists()


def test_they_would_run_it():
  """Else the test above would say nothing: sympy evaluates an answer."""
  sympy = pytest.importorskip('sympy')
  assert sympy.parse_expr('__import__("os").getpid()') > 0


@pytest.mark.parametrize(
  ('name', 'answer', 'harmless'),
  [
    ('countdown', '40*(94 - 90) + 83', True), ('countdown', '1.5*2', True),
    ('countdown', 'print(1)', False), ('countdown', '1 .real', False),
    ('countdown', 'x.y', False), ('countdown', '[1]', False),
    ('countdown', '1\n2', False), ('countdown', '"a"', False),
    ('simple_integration', '3*x**2/2 + C', True),
    ('simple_integration', 'sin(x) + exp(2*x)', True),
    ('simple_integration', 'open(x)', False),
    ('n_queens', '[[1, 0], [0, 1]]', True), ('n_queens', '_ Q\nQ _', True),
    ('n_queens', 'exit()', False), ('n_queens', '(1, 2)', True),
    ('gcd', 'exit()', True),
  ],
)  # fmt: skip
def test_what_a_grader_may_see(name, answer, harmless):
  assert reasoning.is_harmless(name, answer) is harmless


def test_work_without_end_is_bounded(gym):
  (task,) = gym.tasks('puzzle24', 'train', 1)
  assert gym.score(task, '9**9**9**9') < 0.5
  assert gym.score(task, 'nothing') < 0.5  # and the next is served


# ---- in an environment ------------------------------------------------------


class Python:
  """Stands for a Python tool; evaluates one product."""

  spec = ToolSpec('python', 'Runs code.', {'type': 'object'})

  def __call__(self, arguments):
    return '42'


def answer(text):
  return Turn(text, Verdict.ANSWER, answer=text)


def test_one_turn_and_several(gym, gold):
  (task,) = gym.tasks('gcd', 'train', 1)
  right = gold(task)
  env = reasoning.environment(gym.solved)
  assert env.reset(task).tools == ()
  assert env.step(answer(right)).status is Status.DONE
  assert env.verify(Status.DONE).value == 1.0

  closed = []
  env = reasoning.environment(
    gym.graded, tools=[Python()], close=lambda: closed.append(1)
  )
  assert [t.name for t in env.reset(task).tools] == ['python']
  call = Turn('', Verdict.CALLS, calls=(ToolCall('python', {'code': '6*7'}),))
  assert env.step(call).observations[0].body == '42'
  env.step(answer('0'))
  reward = env.verify(Status.DONE)
  assert reward.value < 0.5 and not reward.success
  assert reward.parts['calls'] == 1.0 and 'score' in reward.parts
  env.close()
  assert closed

  env = reasoning.environment(gym.solved)
  env.reset(task)
  assert env.verify(Status.TOKEN_LIMIT).value == 0.0


@pytest.mark.long
def test_every_generator_makes_tasks_and_gives_nothing_for_nothing(gym):
  """The grader is asked what nothing, and an echo of the question, earn."""
  failed = {}
  for name in gym.datasets():
    (task,) = gym.tasks(name, 'train', 1)
    question = task.messages[-1].content
    for said in (None, '', 'I do not know.', question):
      if gym.solved(task, said):
        failed[name] = said
  assert not failed
