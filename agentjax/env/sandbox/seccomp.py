"""Which system calls the policy's code may make: one list, for both backends.

Floor 1, env/sandbox. Refused is what reaches over the edge of a sandbox (name
spaces, mounts, other processes' memory, the kernel's keys, clock and modules),
what outlives a call where no limit counts it (System V and POSIX queues), and
what the kernel has had most of its holes in. Calls that this file does not
know, newer ones, do not exist in a sandbox. Everything else is let through:
the file is about the kernel, and what a container's other walls do is theirs.

`program` is a classic BPF program, as `bwrap --seccomp` reads it;
`docker_profile` is the same list in the form that a Docker engine reads. This
file knows no sandbox and starts nothing.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import struct
import sys

from agentjax.env.sandbox import syscalls

REFUSED = frozenset(
  # Mounts, roots, handles of files outside of every folder that is shown.
  'mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen '
  'fsconfig fsmount fspick mount_setattr statmount listmount swapon swapoff '
  'quotactl quotactl_fd name_to_handle_at open_by_handle_at sysfs ustat '
  # Name spaces; for `clone` see below.
  'unshare setns '
  # Other processes, and what watches the whole machine.
  'ptrace process_vm_readv process_vm_writev process_madvise process_mrelease '
  'kcmp pidfd_getfd perf_event_open bpf lookup_dcookie acct syslog '
  'fanotify_init fanotify_mark '
  # Keys outlive processes and name spaces.
  'add_key request_key keyctl '
  # The machine: modules, clock, names, ports, halt.
  'init_module finit_module delete_module create_module query_module '
  'get_kernel_syms kexec_load kexec_file_load settimeofday clock_settime '
  'adjtimex clock_adjtime sethostname setdomainname iopl ioperm modify_ldt '
  'reboot vhangup uselib _sysctl nfsservctl lsm_set_self_attr '
  # Memory that is placed, hidden or faulted by the caller.
  'userfaultfd memfd_secret mbind set_mempolicy set_mempolicy_home_node '
  'get_mempolicy migrate_pages move_pages '
  # Of the whole machine there are few; or they reach its disks.
  'io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents sync '
  'syncfs '
  # Work that no filter sees.
  'io_uring_setup io_uring_enter io_uring_register '
  # They outlive the call, and no limit counts them.
  'shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd '
  'msgrcv msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify '
  'mq_getsetattr '
  # Numbers without a call behind them.
  'afs_syscall tuxcall security getpmsg putpmsg vserver epoll_ctl_old '
  'epoll_wait_old'.split()
)
# Its flags lie in memory, where a filter cannot look. Told that there is none,
# the C library takes `clone`, whose flags are a number.
MISSING = frozenset(['clone3'])
# CLONE_NEW*: of mounts, cgroup, host name, IPC, users, processes, network.
_NEW_NAMESPACES = 0x7E02_0000
# First argument -> let through where it has one of these values.
_ONLY = {
  # Unix, IPv4, IPv6. What waits in a netlink socket (16) is the kernel's
  # memory, and no limit counts it. Sockets between virtual machines (40) know
  # no name space: they would reach the host.
  'socket': (1, 2, 10),
  # Linux, 32 bits, uname 2.6, both, and "which is it?".
  'personality': (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF),
}
# (name, argument, value): refused. Where the runner has the policy's uid, the
# kernel lets the one set the other's limits and priorities: RLIMIT_NOFILE=0
# for process 1 would end the runner, and the policy's failure would pass for
# infrastructure. Signals it ignores, and its memory is closed to all.
_RUNNER, _PRIO_USER, _IOPRIO_USER = 1, 2, 3
_ON_RUNNER = (
  ('prlimit64', 0, _RUNNER),
  ('sched_setparam', 0, _RUNNER),
  ('sched_setscheduler', 0, _RUNNER),
  ('sched_setaffinity', 0, _RUNNER),
  ('sched_setattr', 0, _RUNNER),
  ('setpriority', 1, _RUNNER),
  ('setpriority', 0, _PRIO_USER),
  ('ioprio_set', 1, _RUNNER),
  ('ioprio_set', 0, _IOPRIO_USER),
)

_AUDIT_ARCH = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
_X32 = 0x4000_0000  # x86_64's second table of system calls starts here

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _RETURN = 0x20, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000


def program(machine: str | None = None) -> bytes | None:
  """The filter for a machine, this one if None; None where it is not known."""
  machine = machine or platform.machine()
  if machine not in _AUDIT_ARCH or sys.byteorder != 'little':
    return None
  number = syscalls.numbers(machine)
  refuse = _step(_RETURN, _ERRNO | errno.EPERM)
  missing = _step(_RETURN, _ERRNO | errno.ENOSYS)
  load_number = _step(_LOAD, _NUMBER)
  out = [
    *(_step(_LOAD, _ARCH), _step(_EQUAL, _AUDIT_ARCH[machine], 1, 0), refuse),
    *(load_number, _step(_AT_LEAST, _X32, 0, 1), refuse),
  ]
  for first, after in _gaps(set(number.values())):
    out += [_step(_AT_LEAST, first, 0, 2), _step(_AT_LEAST, after, 1, 0)]
    out.append(missing)
  for names, answer in ((REFUSED, refuse), (MISSING, missing)):
    for value in sorted(number[name] for name in names & set(number)):
      out += [_step(_EQUAL, value, 0, 1), answer]
  # Of arguments the lower half: these are 32 bits wide.
  out += [_step(_EQUAL, number['clone'], 0, 3), _step(_LOAD, _ARGUMENTS)]
  out += [_step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse]
  for name, values in _ONLY.items():
    length = len(values)
    out += [load_number, _step(_EQUAL, number[name], 0, length + 2)]
    out.append(_step(_LOAD, _ARGUMENTS))
    for i, value in enumerate(values):
      out.append(_step(_EQUAL, value, length - i, 0))
    out.append(refuse)
  for name, argument, value in _ON_RUNNER:
    out += [load_number, _step(_EQUAL, number[name], 0, 3)]
    out.append(_step(_LOAD, _ARGUMENTS + 8 * argument))
    out += [_step(_EQUAL, value, 0, 1), refuse]
  return b''.join([*out, _step(_RETURN, _ALLOW)])


def open_program() -> int | None:
  """A descriptor to read `program` from, or None; the caller's to close."""
  data = program()
  if data is None:
    return None
  fd = os.memfd_create('seccomp')
  os.write(fd, data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


def docker_profile() -> str:
  """The list as a seccomp profile: `security_opt=['seccomp=' + profile]`.

  For engines from 20.10.10 on. Other machines' calls (32 bits, x32) end the
  process; of what is not in the profile the engine says EPERM, and ENOSYS of
  what is newer.
  """
  known = set().union(*(syscalls.numbers(m) for m in _AUDIT_ARCH))
  plain = known - REFUSED - MISSING - set(_ONLY) - {'clone'}
  allowed = {'action': 'SCMP_ACT_ALLOW'}
  rules = [
    {'names': sorted(plain), **allowed},
    {
      **{'names': sorted(MISSING), 'action': 'SCMP_ACT_ERRNO'},
      'errnoRet': errno.ENOSYS,
    },
    {
      **{'names': ['clone'], **allowed},
      'args': [_where('MASKED_EQ', _NEW_NAMESPACES, 0)],
    },
  ]
  for name, values in _ONLY.items():
    for value in values:  # one of the rules is enough
      rules.append({'names': [name], **allowed, 'args': [_where('EQ', value)]})
  profile = {
    'defaultAction': 'SCMP_ACT_ERRNO',
    'archMap': [
      {'architecture': f'SCMP_ARCH_{m.upper()}', 'subArchitectures': []}
      for m in _AUDIT_ARCH
    ],
    'syscalls': rules,
  }
  return json.dumps(profile, separators=(',', ':'))


def _where(how: str, value: int, value_two: int = 0) -> dict:
  return {
    **{'index': 0, 'value': value, 'valueTwo': value_two},
    'op': f'SCMP_CMP_{how}',
  }


def _gaps(known: set[int]) -> list[tuple[int, int]]:
  """(first, first after) of each run of numbers below _X32 without a call."""
  edges = [-1, *sorted(known), _X32]
  return [
    (a + 1, b) for a, b in zip(edges, edges[1:], strict=False) if b - a > 1
  ]


def _step(code: int, value: int, jump_true: int = 0, jump_false: int = 0):
  return struct.pack('=HBBI', code, jump_true, jump_false, value)
