"""Peers of `_text_peer`, each a process, forked by one that has imported what they need.

Fifteen that import torch each would take a minute of a processor, and some gigabytes.
"""

import ctypes
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.lossy import Process

CLONE_NEWNET = 0x40000000

_FORKS = multiprocessing.get_context("forkserver")


class Forked(Process):
    """
    Args:
        space: the network namespace that it enters; None: it stays in this one.
        options: see `_text_peer`.
    """

    def __init__(self, space: str | None, options: dict[str, Any]) -> None:
        _FORKS.set_forkserver_preload(["benchmarks._text_peer"])
        orders, told = _FORKS.Pipe(duplex=False)
        said, words = _FORKS.Pipe(duplex=False)
        self._child = _FORKS.Process(target=_be, args=(space, options, orders, words), daemon=True)
        self._child.start()
        orders.close()
        words.close()
        files = (os.fdopen(os.dup(told.fileno()), "w"), os.fdopen(os.dup(said.fileno())))
        told.close()
        said.close()
        self._begin(f"_text_peer {json.dumps(options)}", *files)

    def kill(self) -> None:
        self._child.kill()
        self._child.join()


def _be(space: str | None, options: dict[str, Any], orders: Connection, words: Connection) -> None:
    from benchmarks import _text_peer  # only in the processes that are forked

    if space is not None:
        with open(f"/run/netns/{space}") as net:
            if ctypes.CDLL(None, use_errno=True).setns(net.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")
    os.dup2(orders.fileno(), 0)
    os.dup2(words.fileno(), 1)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    _text_peer.main(options)
