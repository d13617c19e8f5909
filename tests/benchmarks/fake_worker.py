"""A peer without a model, for the tests of the protocol."""

import os
import sys

from benchmarks import worker


def double(value):
  print('a library that prints')
  return {'value': 2 * value}


def fail():
  raise ValueError('no such weights')


def leave():
  sys.stdout.flush()
  os._exit(3)


if __name__ == '__main__':
  worker.serve({'double': double, 'fail': fail, 'leave': leave}, ())
