"""The end of a demo: are the replicas one, how good is the model, what did it cost, what can be done with it."""

from concurrent.futures import Future
from pathlib import Path

import msgspec

from weft.cli.demo.ngram_baseline import ORDER
from weft.cli.demo.swarm import Swarm
from weft.cli.home import command_for
from weft.cli.model.generate import excerpt
from weft.cli.model.trained import Trained, open_trained
from weft.cli.run.running import Report
from weft.cli.run.summary import INDENT, beside, measured, try_next
from weft.cli.screen.draw import ring
from weft.dashboard import figures
from weft.dashboard.view import View
from weft.errors import CheckpointError
from weft.ids import RunId, short
from weft.model.weights import write_folder

_WAIT_S = 600.0  # for the n-gram model, which had all of the training's time


def finish(folder: Path, swarm: Swarm, view: View, score: "Future[float]") -> int:
    """Print how the demo ended, export the model, and return the exit code: 0 if all replicas are one.

    Raises:
        CheckpointError: a peer has not said how it ended.
    """
    reports = {name: read_report(swarm.report(name)) for name in swarm.names}
    first = next(iter(reports.values()))
    lines = ["", *judge(first, view, score.result(_WAIT_S)), "", "replicas"]
    lines += [f"  {name}  {report.replica}" for name, report in reports.items()]
    digests = {report.replica for report in reports.values()}
    is_one = len(digests) == 1
    lines.append(
        f"  all {len(reports)} are equal, bit for bit"
        if is_one
        else f"  they differ: {len(digests)} different models, and one was promised"
    )
    print("\n".join(lines))  # noqa: T201
    if not is_one:
        return 1
    trained = open_trained(first.checkpoint, swarm.home)
    exported = export(trained, folder / "export")
    prompt = trained.run.train.sample_prompt if trained.run is not None else ""
    if first.sample:
        print(f"\nit writes\n\n{excerpt(prompt + first.sample.rstrip())}\n")  # noqa: T201
    print(  # noqa: T201
        f"{beside('checkpoint', first.checkpoint)}\n{beside('exported', exported)}\nto load it with transformers\n"
        f'  AutoModelForCausalLM.from_pretrained("{exported}")\n\n{try_next(command_for(swarm.home), short(first.run))}'
    )
    return 0


def finished_run(swarm: Swarm) -> RunId | None:
    """Return the run that all peers have brought to its end earlier, or None."""
    try:
        reports = [read_report(swarm.report(name)) for name in swarm.names]
    except CheckpointError:
        return None
    return RunId(reports[0].run) if all(report.reason == "complete" for report in reports) else None


def judge(report: Report, view: View, ngram: float) -> list[str]:
    """Return the lines about quality and cost."""
    lines = [f"{report.reason} after {report.committed_tokens:,} tokens in {report.round} rounds"]
    if report.nats_per_byte is not None:
        verdict = "better" if report.nats_per_byte < ngram else "not better yet: train longer"
        lines += [
            f"held-out     {report.nats_per_byte:.4f} nats per byte",
            *measured(view),
            f"{INDENT}an order-{ORDER} n-gram model of the same text has {ngram:.4f}:",
            f"{INDENT}this model is {verdict}",
        ]
    sent, received = figures.nbytes(view.sent_nbytes), figures.nbytes(view.received_nbytes)
    arrived = "as much received" if received == sent else f"{received} received"
    lines.append(f"bytes        {sent} sent by all peers together, {arrived}")
    lines.append(f"{INDENT}{ring(view, view.sent_nbytes + view.received_nbytes)}")
    return lines


def read_report(path: Path) -> Report:
    """
    Raises:
        CheckpointError: there is none, or half of one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} does not say how the peer ended: {error}. See the log beside it.") from error


def export(trained: Trained, target: Path) -> Path:
    """Write the model as a Hugging Face folder, in place of one that an earlier demo wrote."""
    if not target.exists():
        tokenizer = trained.tokenizer
        write_folder(target, trained.config, trained.vector, tokenizer.to_json(), stop_id=tokenizer.end_of_text)
    return target
