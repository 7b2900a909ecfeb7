"""What a process keeps of freed memory."""

import platform
import subprocess
import sys

import pytest

# Page faults of taking sixteen blocks of a megabyte, after as many were freed.
AGAIN = """
import resource, sys
import numpy as np
from weft.run.host import take_singly

take_singly(int(sys.argv[1]))
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(1 << 20, np.uint8) for _ in range(16)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(nbytes: int) -> int:
    found = subprocess.run([sys.executable, "-c", AGAIN, str(nbytes)], capture_output=True, check=True, timeout=60)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide for themselves")
def test_freed_blocks_are_kept_below_the_size_that_is_said() -> None:
    pages = (16 << 20) // 4096
    assert faults(32 << 20) < pages / 10
    assert faults(1 << 19) >= pages
