"""A seccomp filter that keeps the policy's code off the runner and off others.

Floor 1, env/sandbox, used by `bwrap.py`. The kernel's keyrings belong to a uid,
which sandboxes share: what one episode put there the next could read, so that
they are refused. The rest matters without root, where the runner
and its children have one uid, and the kernel lets processes of one uid set
each other's limits and priorities: RLIMIT_NOFILE=0 for process 1 would end the
runner, and the policy's failure would pass for infrastructure. With the filter
such calls are refused with EPERM if they name process 1. (Signals the runner
ignores; its memory and files are closed because it is not dumpable.)

The filter is a classic BPF program, as `bwrap --seccomp` reads it. This file
knows no sandbox and starts nothing.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
import sys

# Of a machine: its number in AUDIT_ARCH, its calls of keyrings, and others as
# (number, argument, value): refused where the argument has the value.
_RUNNER, _PRIO_USER, _IOPRIO_USER = 1, 2, 3
_MACHINES = {
  'x86_64': (
    0xC000003E,
    (248, 249, 250),  # add_key, request_key, keyctl
    (
      (302, 0, _RUNNER),  # prlimit64
      (142, 0, _RUNNER),  # sched_setparam
      (144, 0, _RUNNER),  # sched_setscheduler
      (203, 0, _RUNNER),  # sched_setaffinity
      (314, 0, _RUNNER),  # sched_setattr
      (141, 1, _RUNNER),  # setpriority
      (141, 0, _PRIO_USER),
      (251, 1, _RUNNER),  # ioprio_set
      (251, 0, _IOPRIO_USER),
    ),
  ),
  'aarch64': (
    0xC00000B7,
    (217, 218, 219),
    (
      (261, 0, _RUNNER),
      (118, 0, _RUNNER),
      (119, 0, _RUNNER),
      (122, 0, _RUNNER),
      (274, 0, _RUNNER),
      (140, 1, _RUNNER),
      (140, 0, _PRIO_USER),
      (30, 1, _RUNNER),
      (30, 0, _IOPRIO_USER),
    ),
  ),
}
_X32 = 0x4000_0000  # x86_64's second table of system calls starts here

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0000 | errno.EPERM


def program() -> bytes | None:
  """The filter for this machine; None where its calls are not known here."""
  if platform.machine() not in _MACHINES or sys.byteorder != 'little':
    return None
  arch, keyrings, rules = _MACHINES[platform.machine()]
  refuse = _step(_RETURN, _REFUSE)
  out = [_step(_LOAD, _ARCH), _step(_EQUAL, arch, 1, 0), refuse]
  out += [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), refuse]
  for number in keyrings:
    out += [_step(_EQUAL, number, 0, 1), refuse]
  for number, argument, value in rules:
    out += [_step(_LOAD, _NUMBER), _step(_EQUAL, number, 0, 3)]
    # The lower half: process ids and their like are 32 bits wide.
    out += [_step(_LOAD, _ARGUMENTS + 8 * argument)]
    out += [_step(_EQUAL, value, 0, 1), refuse]
  return b''.join([*out, _step(_RETURN, _ALLOW)])


def open_program() -> int | None:
  """A descriptor to read `program` from, or None; the caller's to close."""
  data = program()
  if data is None:
    return None
  fd = os.memfd_create('shield')
  os.write(fd, data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def _step(code: int, value: int, jump_true: int = 0, jump_false: int = 0):
  return struct.pack('=HBBI', code, jump_true, jump_false, value)
