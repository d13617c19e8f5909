"""A command: removes the sandboxes that dead runs have left.

    python -m agentjax.env.sandbox reap [--host HOST ...]

Floor 1, env/sandbox, above `reaper.py`. Prints what it removed, a name a line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from agentjax.env.sandbox import reap


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog='python -m agentjax.env.sandbox',
    description='Looks after sandboxes.',
  )
  commands = parser.add_subparsers(required=True)
  command = commands.add_parser(
    'reap', help='removes the sandboxes that dead runs have left'
  )
  command.add_argument(
    '--host', action='append', default=[], help='an engine; may be repeated'
  )
  removed = reap(parser.parse_args(argv).host)
  for name in removed:
    print(name)
  print(f'{len(removed)} removed')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())
