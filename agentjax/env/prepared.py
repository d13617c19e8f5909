"""Tasks in TFDS's files: prepared once, read by number, without TensorFlow.

Floor 1, env. A builder writes the tasks of a source as array_record; what is
read back is a sequence that holds nothing in memory. The folder is named after
what the tasks were made of, so that other files, or another way of reading
them, are never taken for these: TFDS itself takes up whatever it finds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence

from agentjax.records import task_from_json, task_to_json
from agentjax.types import Task

_SPLIT = 'tasks'


class PreparedTasks(Sequence):
  """Tasks by number, read from disk one by one.

  `fingerprint` names what they were made of.
  """

  def __init__(self, source, fingerprint: str):
    self._source, self.fingerprint = source, fingerprint

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Task:
    if not 0 <= index < len(self):
      raise IndexError(f'task {index} of {len(self)}')
    record = self._source[index]
    if int(record['index']) != index:
      raise ValueError(f'record {index} is number {int(record["index"])}')
    return task_from_json(json.loads(record['task']))


def prepare(
  make: Callable[[], Iterable[Task]],
  data_dir: str | os.PathLike,
  *,
  name: str,
  files: Sequence[str | os.PathLike],
  how: str,
) -> PreparedTasks:
  """The tasks of `make`, in its order, from `data_dir` or put there now.

  Args:
    name: of the set, small letters and underscores.
    files: that the tasks are made of. how: what else they depend on, such as
      the prompt.

  Raises:
    ValueError: there are no tasks, or an id comes twice.
  """
  fingerprint = _fingerprint(name, files, how)
  builder = _builder_class()(
    make, data_dir=os.fspath(data_dir), config=f'{name}_{fingerprint}'
  )
  builder.download_and_prepare(file_format='array_record')
  return PreparedTasks(builder.as_data_source(split=_SPLIT), fingerprint)


def _fingerprint(name: str, files: Sequence, how: str) -> str:
  """By the files' content: a file that was copied is the same."""
  digest = hashlib.sha256(json.dumps([1, name, how]).encode())
  for path in files:
    inner = hashlib.sha256()
    with pathlib.Path(path).open('rb') as file:
      while piece := file.read(1 << 20):
        inner.update(piece)
    digest.update(inner.digest())
  return digest.hexdigest()[:16]


@functools.cache
def _builder_class():
  # Importing it takes seconds, which most programs need not pay.
  import numpy as np
  import tensorflow_datasets as tfds

  class AgentjaxTasks(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Tasks as JSON, with their number. A config is one set of files."""

    VERSION = tfds.core.Version('1.0.0')
    # Nothing is downloaded; looking for checksums beside the builder's code
    # needs a package that TFDS does not ask for.
    url_infos: dict = {}

    def __init__(self, make, *, config: str, **options):
      self._make = make
      super().__init__(config=tfds.core.BuilderConfig(name=config), **options)

    def _info(self):
      # A nested record would be transposed on its way; text is not.
      features = {'index': np.int64, 'task': tfds.features.Text()}
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict(features),
        description='Tasks of AgentJAX.',
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      return {_SPLIT: self._generate_examples()}

    def _generate_examples(self):
      seen = set()
      for index, task in enumerate(self._make()):
        if task.id in seen:
          raise ValueError(f'task id {task.id!r} comes twice')
        seen.add(task.id)
        text = json.dumps(task_to_json(task))
        yield index, {'index': index, 'task': text}
      if not seen:
        raise ValueError('there are no tasks')

  return AgentjaxTasks
