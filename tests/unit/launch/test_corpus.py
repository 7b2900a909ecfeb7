"""What is told of a machine's settings where a run is trained on texts."""

from msgspec.structs import replace

from unit.peer.tiny import run_config
from weft.events import Event, Notice
from weft.launch.corpus import Corpus
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust


def told(run: RunConfig, settings: PeerConfig) -> list[str]:
    events: list[Event] = []
    Corpus()._note(run, settings, events.append)
    return [event.text for event in events if isinstance(event, Notice)]


def test_where_nobody_is_audited_a_check_has_no_effect() -> None:
    run, settings = run_config(), PeerConfig(check=5)
    (line,) = told(run, settings)
    assert "do not audit each other: check" in line
    assert told(replace(run, trust=AuditedTrust()), settings) == []
    assert told(run, PeerConfig()) == []
