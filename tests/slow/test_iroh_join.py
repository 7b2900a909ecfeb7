"""A machine that TCP does not reach joins over iroh: two network namespaces on one cable, with real processes.

    founder's namespace 10.77.0.1 ═══ veth ═══ 10.77.0.2 joiner's namespace

Nothing of this leaves the two namespaces, and whatever runs in them ends with the process that made them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from unit.cli.small import RUN, TEXT
from weft.cli.run.running import Report
from weft.events import DataReady, LinkUp, RoundCommitted
from weft.log import read_jsonl

pytestmark = pytest.mark.slow

ENDS_S = 240
ENTER = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# How TCP between the two is stopped: told at once, or swallowed on the founder's side as a careless firewall does.
BLOCKS = {
    "unreachable": ("ip rule add ipproto tcp to 10.77.0.0/24 unreachable", "true"),
    "swallowed": ("true", "ip rule add ipproto tcp to 10.77.0.0/24 blackhole"),
}
SCRIPT = """
set -e
ip link set lo up
unshare --net sh -c 'while ! test -s ticket; do sleep 0.1; done; exec "$0" -m weft --home joiner join - \\
    --yes --name joiner --transports tls,iroh --threads 1 --quiet --report joiner.json <ticket 2>joiner.err' "$PYTHON" &
joiner=$!
until [ "$(readlink /proc/$joiner/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.1; done
ip link add cable type veth peer name cable2 netns $joiner
ip addr add 10.77.0.1/24 dev cable
ip link set cable up
nsenter --target $joiner --net sh -ec "ip link set lo up; ip addr add 10.77.0.2/24 dev cable2; \\
    ip link set cable2 up; $AT_JOINER"
eval "$AT_FOUNDER"
"$PYTHON" -m weft --home founder train run.toml --wait-for 2 --name founder --host 10.77.0.1 --port 7077 \\
    --transports tls,iroh --threads 1 --quiet --report founder.json 2>founder.err >printed &
founder=$!
until test -s printed || ! kill -0 $founder; do sleep 0.1; done
cp printed ticket.part
mv ticket.part ticket
wait $founder
wait $joiner
"""


@pytest.mark.parametrize("block", BLOCKS)
def test_a_join_over_iroh_where_tls_does_not_get_through(tmp_path: Path, block: str) -> None:
    pytest.importorskip("iroh", reason="iroh has no wheel for this platform")
    if not all(shutil.which(program) for program in ("unshare", "nsenter", "ip")):
        pytest.skip("needs unshare, nsenter and ip (Linux) for networks of its own")
    probe = "ip link add cable type veth peer name cable2 && ip rule add ipproto tcp to 10.77.0.0/24 blackhole"
    if subprocess.run([*ENTER, "sh", "-c", probe], capture_output=True, timeout=10).returncode != 0:
        pytest.skip("this machine does not permit network namespaces with a cable between them")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(
        RUN.replace("tokens = 320", "tokens = 640") + '\n[method]\ntype = "fedavg"\nevery = 5\n'
    )
    at_joiner, at_founder = BLOCKS[block]
    done = subprocess.run(
        [*ENTER, "sh", "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "AT_JOINER": at_joiner, "AT_FOUNDER": at_founder},
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    said = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.err")))
    assert done.returncode == 0, done.stderr + said

    founder, joiner = (
        msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=Report) for name in ("founder", "joiner")
    )
    assert (founder.reason, joiner.reason) == ("complete", "complete")
    assert founder.replica == joiner.replica

    (log,) = (tmp_path / "joiner").glob("runs/*/*/log.jsonl")
    events = [entry.event for entry in read_jsonl(log)]
    (link,) = [event for event in events if isinstance(event, LinkUp)]
    assert link.transport == "iroh"
    assert link.address.startswith(f"iroh://{founder.peer}?addr=")
    assert any(each.startswith("tls://10.77.0.1:7077") for each in link.tried), link.tried
    fetched = [event.fetched_nbytes for event in events if isinstance(event, DataReady)]
    assert fetched[0] > 0  # shards came over iroh too
    commits = [event for event in events if isinstance(event, RoundCommitted)]
    assert {peer for commit in commits for peer in commit.contributors} == {founder.peer, joiner.peer}
