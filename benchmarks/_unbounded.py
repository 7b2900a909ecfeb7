"""weft without bounds on what others cost it in computing: what `floods` measures beside it."""

import runpy
import sys

from weft.net.transport import limits

limits.BURST_S = limits.ADDRESS_BURST_S = 1e9

if __name__ == "__main__":
    sys.argv[0] = "weft"
    runpy.run_module("weft", run_name="__main__")
