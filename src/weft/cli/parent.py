"""Ends this process when another one is gone: no peer of a demo outlives the demo.

On Linux the kernel sends the signal; everywhere a thread looks as well, since the parent may be gone already. The
signal is SIGTERM, so the peer says goodbye.

It does not know what this process does.
"""

import ctypes
import os
import signal
import sys
import threading

import psutil

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 1.0


def stop_with_parent(pid: int) -> None:
    """Send this process SIGTERM once the process `pid` is gone."""
    if sys.platform == "linux" and os.getppid() == pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch, args=(pid,), daemon=True, name="parent-watch").start()


def _watch(pid: int) -> None:
    waiting = threading.Event()
    while psutil.pid_exists(pid) and os.getppid() in (pid, 0):
        waiting.wait(_LOOK_EVERY_S)
    signal.raise_signal(signal.SIGTERM)
