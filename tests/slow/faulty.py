"""Runs one command of weft again and again, each time with another call of the C library failing; for `test_faults`.

    LD_PRELOAD=faults.so python faulty.py FOLDER once|for-good SHARD/SHARDS COMMAND...

Of the places, it is those whose number leaves SHARD when it is divided by SHARDS. HOME in the command stands for a
fresh copy of FOLDER. Standard output: a line of JSON for each place. Where the command failed once, it is run again
without a fault: `again` is its exit code then.
"""

import ctypes
import faulthandler
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

DEADLINE_S = 300  # wall time: a busy machine is no fault. What hangs says where, and ends with 1.


def main() -> None:
    folder, how, shards, *command = sys.argv[1:]
    # Loaded once: every command is run in a fork of this process.
    import torch

    import weft.launch.session
    import weft.training.trainer  # noqa: F401

    torch.set_num_threads(1)
    home = Path(folder).with_name("home")
    place, step = map(int, shards.split("/"))
    while True:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(folder, home)
        code, failed, said = in_fork(home, command, place, is_for_good=how == "for-good")
        if not failed and code is not None:
            return  # there is no such place any more
        again = None if how == "for-good" else in_fork(home, command, -1, is_for_good=False)[0]
        row = {"place": place, "failed": failed, "code": code, "said": said, "again": again}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        place += step


def in_fork(home: Path, command: Sequence[str], place: int, *, is_for_good: bool) -> tuple[int | None, str, str]:
    """Return the exit code (None: a signal ended it), which call failed, and what was said."""
    from weft.cli.main import run

    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.faults_last.restype = ctypes.c_char_p
    told = home.with_name("said.txt")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=handle)
        library.faults_arm(str(home).encode(), place, int(is_for_good))
        code = run(["--home", str(home), *(each.replace("HOME", str(home)) for each in command)])
        failed = library.faults_last()
        library.faults_arm(b"", -1, 0)
        os.write(writing, failed or b"none")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    with open(reading) as pipe:
        failed = pipe.read() or "unknown: it did not end by itself"
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return None if code < 0 else code, "" if failed == "none" else failed, told.read_text(errors="replace")


if __name__ == "__main__":
    main()
