"""What a run with stages whose members audit each other says of it, and what that makes of its stages."""

import msgspec
import pytest

from unit.peer.tiny import MODEL, run_config
from unit.stages.pieces import CUT, RUN
from weft.errors import ConfigError
from weft.ids import Digest
from weft.pipeline.config import PipelineConfig
from weft.run.amend import first_charter
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig, staged
from weft.run.trust import AuditedTrust, RecordedTrust
from weft.sync.method.presets import DdpConfig
from weft.sync.records.charter import PassageTerms
from weft.training.device import as_audited, audits_nbytes
from weft.training.section_memory import KEPT_NBYTES, of_run, passages_nbytes, section_memory

AUDITED = AuditedTrust(audit_rate=0.25, quarantine=0)


def audited(run: StagedConfig = RUN) -> StagedConfig:
    return msgspec.structs.replace(run, trust=AUDITED)


def test_a_stage_says_how_often_micro_batches_are_computed_again_and_audits_no_training_steps() -> None:
    charter = first_charter(audited().of_stage(1))
    assert charter.passages == PassageTerms(rate=0.25)
    assert charter.audits is msgspec.UNSET
    assert charter.is_recorded is True
    recorded = msgspec.structs.replace(RUN, trust=RecordedTrust())
    assert first_charter(recorded.of_stage(1)).passages is msgspec.UNSET


def test_a_matrix_that_changes_in_rounds_of_its_own_cannot_be_computed_with_again() -> None:
    tied = msgspec.structs.replace(CUT, is_tied=True)
    initials = tuple(Digest(digit * 64) for digit in "1234")
    run = staged(run_config(DdpConfig(), tied), initials, PipelineConfig())
    with pytest.raises(ConfigError, match="is_tied = false"):
        audited(run)


def test_machines_keep_their_own_settings_where_sections_are_computed() -> None:
    peer = PeerConfig(micro_batch=3, precision="bf16")
    assert as_audited(audited(), peer) == peer
    assert audits_nbytes(audited()) == 0
    assert MODEL.num_layers, "whole models have others"


def test_memory_of_what_is_kept_for_others_and_of_one_more_micro_batch_is_counted() -> None:
    usual, more = (of_run(run.of_stage(1)) for run in (RUN, audited()))
    assert passages_nbytes(usual) == 0 < passages_nbytes(more) < KEPT_NBYTES
    held = [section_memory(each, RUN.cuts[1], num_members=3, num_taken=4) for each in (usual, more)]
    five = section_memory(usual, RUN.cuts[1], num_members=3, num_taken=5)
    assert held[1].activations == five.activations > held[0].activations
    assert held[1].copies == held[0].copies + passages_nbytes(more)
