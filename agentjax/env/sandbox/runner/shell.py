"""A shell whose folder, variables and functions live on from call to call.

bash where the image has it, else /bin/sh. The loop around the policy's lines
stands in one line, so that these count theirs from 1, and in two loops, so
that a `break` of the policy's ends its own call alone.

Descriptors: 7 has a token for each call, 8 is a file with its text, on 9 the
loop says `TOKEN CODE`. What the policy runs has none of them.
"""

import os

REQUEST, TEXT, DONE = 7, 8, 9
BASH = '/bin/bash'

# $_code is set before the lines are run: `break` leaves no other. stderr is
# closed to the loop itself, which `set -x` would show.
_LOOP = (
  'while {{ :; }} 2>/dev/null; do while {{ :; }} 2>/dev/null; do '
  '{{ {own} printf "%s %s\\n" "$_call" "$_code" >&9; '
  'IFS= {own} read -r _call <&7 || exit 0; {text}; _code=0; }} 2>/dev/null; '
  '{own} eval "$_text" 7<&- 8<&- 9>&-; '
  '{{ _code=$?; {after}; }} 2>/dev/null; '
  'done; done'
)


def program():
  """(argv, what ends the text of a call)."""
  if os.access(BASH, os.X_OK):
    loop = _LOOP.format(
      own='builtin',
      text='IFS= builtin read -r -d "" _text <&8',
      # Else it would tell the next call how this one's jobs were killed.
      after='builtin disown -a',
    )
    return [BASH, '--norc', '--noprofile', '-c', loop, 'shell'], b'\0'
  loop = _LOOP.format(own='command', text='_text=$(cat <&8)', after=':')
  return ['/bin/sh', '-c', loop, 'shell'], b''
