"""What tests of one folder leave out of the code, those of others have: whichever came before in a process."""

import os

import pytest
import torch

from weft.codec.build import build
from weft.codec.config import Fp32Config
from weft.net.transport import limits
from weft.store import rounds


def test_what_scenarios_leave_out_is_there_in_other_tests() -> None:
    with pytest.raises(TypeError):
        build(Fp32Config()).encode(torch.zeros(2, 2))  # shapes are checked
    assert os.fsync.__module__ == "posix"
    assert rounds._SYNCHRONOUS != "OFF"
    assert limits.Burden.do.__module__ == limits.__name__
