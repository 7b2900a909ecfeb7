"""What a member sends on of its texts: rows to the next stage, tokens to who asks and to the first stage."""

from weft.engine.draw import Drawn
from weft.ids import PeerId
from weft.pipeline.link import StageLink, parcel
from weft.tasks import Tasks
from weft.texts.chain import joined
from weft.texts.held import HeldText
from weft.texts.log import Log
from weft.texts.messages import MAX_INLINE_NBYTES, MAX_PIECE, RowsOfText, TextRows, TokenDrawn, shared_out
from weft.texts.section import packed


class Outbox:
    """Rows gather until they are sent, as few notes as may be.

    Args:
        log: of what came out.
        onward: the stage that rows go to.
        row_nbytes: of each.
        tasks: of the member.
    """

    def __init__(self, link: StageLink, log: Log, onward: int, row_nbytes: int, tasks: Tasks) -> None:
        self._link, self._log, self._tasks = link, log, tasks
        self._onward, self._row_nbytes = onward, row_nbytes
        self._rows: dict[PeerId, list[RowsOfText]] = {}

    def put(self, text: HeldText, start: int, stop: int) -> None:
        """Send rows of the log on, from a place to a place."""
        per_note = max(1, MAX_INLINE_NBYTES // self._row_nbytes)
        while start < stop:
            num = min(stop - start, MAX_PIECE if stop - start > per_note else per_note)
            self._put(text, start, start + num)
            start += num

    def _put(self, text: HeldText, start: int, stop: int) -> None:
        data = self._log.part(text.id, start, stop)
        if len(data) != (stop - start) * self._row_nbytes:
            return  # the log has just lost it: whoever asks finds out
        chain = joined([each or b"" for each in text.sequence.chain[start : stop + 1]])
        blob = None
        if len(data) > MAX_INLINE_NBYTES:
            given = parcel(data)
            self._link.give(given)
            text.blobs.append(given)
            blob, data = given.digest, b""
        rows = RowsOfText(
            sequence=text.id, attempt=text.sequence.attempt, start=start, chain=chain, data=data, blob=blob
        )
        self._rows.setdefault(text.opened.onward, []).append(rows)

    def tell(self, text: HeldText, place: int, drawn: Drawn) -> None:
        """Let who asks have a token, and the first stage."""
        chain = text.sequence.chain[place] or b""
        token = TokenDrawn(
            sequence=text.id,
            attempt=text.sequence.attempt,
            place=place,
            chain=chain,
            token=drawn.token,
            logprob=drawn.logprob,
            likeliest=drawn.likeliest,
        )
        self._tasks.spawn(self._link.post(text.asker, token))
        if place + 1 >= text.opened.most or drawn.token in text.opened.stop_ids:
            return
        rows = RowsOfText(
            sequence=text.id, attempt=text.sequence.attempt, start=place, chain=chain, data=packed([drawn.token])
        )
        self._rows.setdefault(text.opened.onward, []).append(rows)

    async def send(self) -> None:
        """Send what has gathered."""
        outbox, self._rows = self._rows, {}
        for peer, rows in outbox.items():
            for some in shared_out(rows):
                await self._link.post(peer, TextRows(stage=self._onward, rows=tuple(some)))
