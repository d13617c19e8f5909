"""The process that lives in a sandbox and runs what the host asks for.

It stands at the far end of every tool call: PID 1 of the container, started
with the whole source of this folder on its command line, so that any image
with a python3 will do. It knows nothing of the package it is shipped in,
imports the standard library and itself (relatively) alone, and keeps to
Python 3.8.

What it promises:
  * Requests and replies are frames over the stdin and stdout it was started
    with; children never hold these files, and the runner is not dumpable, so
    that they cannot be reached through /proc either.
  * Children run in a session of their own, under another uid where the
    runner is root. After each call everything that it left is killed and
    reaped: the next call finds no process of the last. The interpreters of
    sessions alone live on, and are frozen until they are asked again.
  * What a child says is never more than its output. How a call ended is what
    the runner saw itself: exits, counters of the kernel, its own clock.
  * End of file on stdin (the host is gone) ends the runner, and with it, it
    being PID 1, every process of the sandbox, in the middle of a call too.
  * No signal of a child ends the runner. The end of its lifetime in a call is
    that call's timeout, and is reported.

`serve` answers requests, over `frames`; `children` and `sessions` are the
processes of calls, `interpreter` and `shell` what they become; `processes`
says what they give up and how all is ended; `watch` is the time of a call,
`streams` what is written in it, `counters` which limits it hit.
"""
