"""Search-R1's rules: what answers a question, and what that earns.

Floor 1, env. Functions on text; they know no retriever and no environment.
Where paper and released code differ, each has a function of its own: the plain
name is what the paper means, `released_...` what the code does. A config
passes in one or the other. Source: arXiv:2503.09516, section 3; format and
retrieval rewards: arXiv:2505.15117.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

from agentjax.env.transcript import Transcript
from agentjax.types import Reward, Task

_NO_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ARTICLE = re.compile(r'\b(?:a|an|the)\b')
_ANSWER = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)
_INFORMATION = re.compile(r'<information>(.*?)</information>', re.DOTALL)
_ACTION = re.compile(r'<(search|answer)>(.*?)</\1>', re.DOTALL)
_TAG = re.compile(r'(</?(?:think|search|information|answer)>)')

# ---- comparing answers ------------------------------------------------------


def normalize(text: str) -> str:
  """Lower case, no ASCII punctuation, no English articles, single blanks.

  In this order: 'U.S.A.' is 'usa', 'A.' is empty, '3,000' is '3000'.
  """
  bare = text.lower().translate(_NO_PUNCTUATION)
  return ' '.join(_ARTICLE.sub(' ', bare).split())


def exact_match(answer: str | None, golden: str | Sequence[str]) -> bool:
  """Whether `answer` is one of the golden ones after `normalize`.

  What normalizes to nothing (a letter grade A, a band called The The) is
  compared as it stands, so that nothing equals nothing.
  """
  if answer is None:
    return False
  said = normalize(answer)
  for gold in _listed(golden):
    wanted = normalize(gold)
    if wanted and said == wanted:
      return True
    bare = gold.strip().lower()
    if not wanted and bare and answer.strip().lower() == bare:
      return True
  return False


def contains(answer: str | None, golden: str | Sequence[str]) -> bool:
  """Whether one of the golden answers, normalized, stands in `answer`."""
  if answer is None:
    return False
  said = normalize(answer)
  wanted = [normalize(gold) for gold in _listed(golden)]
  return any(w in said for w in wanted if w)


def released_exact_match(answer: str | None, golden) -> bool:
  """As the code does: what normalizes to nothing equals anything such."""
  if answer is None:
    return False
  said = normalize(answer)
  return any(normalize(gold) == said for gold in _listed(golden))


def released_contains(answer: str | None, golden) -> bool:
  """As the code does: an empty golden answer stands in everything."""
  if answer is None:
    return False
  said = normalize(answer)
  return any(normalize(gold) in said for gold in _listed(golden))


def _listed(golden: str | Sequence[str]) -> Sequence[str]:
  return [golden] if isinstance(golden, str) else golden


# ---- the answer of an episode -----------------------------------------------


def own_answer(transcript: Transcript) -> str | None:
  """The answer that ended the episode, in the policy's own last turn.

  Neither prompt nor observation is looked at, whatever tags stand there.
  """
  return transcript.answer


def released_answer(transcript: Transcript) -> str | None:
  """As the code extracts it: the last of two or more in the whole text.

  The prompt's own example is one of them, so that a policy which says nothing
  is scored as if it had answered 'Beijing', and the tags of a retrieved
  passage or of the complaint about a bad action are scored as its answer.
  """
  return extract_released(transcript.text())


def extract_released(text: str) -> str | None:
  """The last `<answer>` of `text`, None where there are fewer than two."""
  found = _ANSWER.findall(text)
  return found[-1].strip() if len(found) > 1 else None


# ---- reading a turn as the code does ----------------------------------------


def released_cut(text: str) -> str:
  """A turn up to the first `</search>`, else up to the first `</answer>`.

  A search counts even where an answer was closed before it. The code samples
  on to its limit and cuts afterwards; here sampling halts at either.
  """
  for closing in ('</search>', '</answer>'):
    head, found, _ = text.partition(closing)
    if found:
      return head + found
  return text


def released_action(text: str) -> tuple[str | None, str]:
  """('search' or 'answer' or None, its text): the first tag that is closed."""
  found = _ACTION.search(text)
  return (found[1], found[2].strip()) if found else (None, '')


# ---- format -----------------------------------------------------------------

_NEXT = {
  ('start', '<think>'): 'in think',
  ('read', '<think>'): 'in think',
  ('in think', '</think>'): 'thought',
  ('thought', '<search>'): 'in search',
  ('in search', '</search>'): 'searched',
  ('searched', '<information>'): 'in information',
  ('in information', '</information>'): 'read',
  ('thought', '<answer>'): 'in answer',
  ('in answer', '</answer>'): 'end',
}


def follows_format(text: str) -> bool:
  """Think, then search and information or answer, over and over; all closed.

  Nothing but blanks stands between the blocks, and an answer is the last.
  """
  state = 'start'
  for part in _TAG.split(text):
    if _TAG.fullmatch(part):
      state = _NEXT.get((state, part), 'wrong')
    elif part.strip() and not state.startswith('in '):
      return False
  return state == 'end'


def own_format(transcript: Transcript) -> bool:
  """Whether the policy's turns follow the format.

  What the environment said stands for one information block a turn, whatever
  is in it: a passage with a tag in it is not the policy's doing, and an
  information block that the policy invents is no part of the format.
  """
  if any('information>' in turn for turn in transcript.turns):
    return False
  block = '<information></information>'
  return follows_format(block.join(transcript.turns))


def released_format(
  transcript: Transcript, *, marker: str = '<|im_start|>assistant'
) -> bool:
  """As the code judges: the whole text behind the first `marker`.

  A chat template without this marker (Llama's) never has the format.
  """
  _, found, said = transcript.text().partition(marker)
  return bool(found) and follows_format(said.lstrip())


def own_retrieval(transcript: Transcript, golden) -> bool:
  """Whether a golden answer stands in what the environment returned."""
  return any(contains(text, golden) for text in transcript.observations)


def released_retrieval(transcript: Transcript, golden) -> bool:
  """As the code judges: in any information block, invented ones too."""
  blocks = _INFORMATION.findall(transcript.text())
  return any(released_contains(block, golden) for block in blocks)


# ---- rewards ----------------------------------------------------------------

# (task, what was said) -> reward.
Scoring = Callable[[Task, Transcript], Reward]


def golden(task: Task) -> list[str]:
  """The golden answers of a task, `verify['answers']`.

  Raises:
    ValueError: there is none.
  """
  answers = task.verify.get('answers')
  if not answers or not all(isinstance(a, str) for a in answers):
    raise ValueError(
      f"task {task.id!r} has verify['answers'] {answers!r}: give a list of "
      'at least one text'
    )
  return list(answers)


def answer_reward(
  task: Task,
  transcript: Transcript,
  *,
  extract: Callable[[Transcript], str | None] = own_answer,
  match: Callable[..., bool] = exact_match,
  wrong: float = 0.0,
) -> Reward:
  """1 for a right answer, `wrong` for another one, 0 for none."""
  answer = extract(transcript)
  right = match(answer, golden(task))
  value = 1.0 if right else wrong if answer is not None else 0.0
  return Reward(value, right, _parts(transcript, answer))


def format_reward(
  task: Task,
  transcript: Transcript,
  *,
  structure: float = 0.2,
  final: float = 0.1,
  retrieval: float = 0.0,
  extract: Callable[[Transcript], str | None] = own_answer,
  match: Callable[..., bool] = exact_match,
  has_format: Callable[[Transcript], bool] = own_format,
  has_gold: Callable[..., bool] = own_retrieval,
) -> Reward:
  """1 for a right answer in the format, less in these steps.

  Right outside of the format: 1 - structure. Wrong or none inside of it:
  structure, and retrieval more if a passage held the answer. Wrong outside of
  it: final. None outside of it: 0. Source: arXiv:2505.15117.
  """
  answers = golden(task)
  answer, formatted = extract(transcript), has_format(transcript)
  right = match(answer, answers)
  found = formatted and has_gold(transcript, answers)
  if right:
    value = 1.0 if formatted else 1.0 - structure
  elif formatted:
    value = structure + (retrieval if found else 0.0)
  else:
    value = final if answer is not None else 0.0
  parts = _parts(transcript, answer)
  parts |= {'format': float(formatted), 'gold_retrieved': float(found)}
  return Reward(value, right, parts)


def _parts(transcript: Transcript, answer: str | None) -> dict[str, float]:
  return {
    'answered': float(answer is not None),
    'searches': float(transcript.searches),
    'invalid': float(transcript.invalid),
  }
