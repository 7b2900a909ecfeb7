// Where the history comes from: once as a whole, then piece by piece over server-sent events.

const AGAIN_MS = 3_000;

/** Fetch the history and follow it.
 *
 * take(piece, isWhole)   is given the whole and then what comes; the whole again where the server was away, since one
 *                        that began anew counts its rows from the start
 * tell(state)            "loading", "live", "lost" (it tries again by itself), "ended"
 */
export async function follow(take, tell) {
  tell("loading");
  let whole;
  try {
    const answer = await fetch("api/history", { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    whole = await answer.json();
  } catch {
    tell("lost");
    setTimeout(() => follow(take, tell), AGAIN_MS);
    return;
  }
  take(whole, true);
  if (!whole.is_live) return tell("ended");
  listen(whole.cursor ?? 0, take, tell);
}

function listen(cursor, take, tell) {
  const stream = new EventSource(`api/stream?after=${cursor}`);
  let next = cursor;
  let numFailed = 0;
  const again = () => {
    stream.close();
    follow(take, tell);
  };
  stream.addEventListener("open", () => {
    if (numFailed > 1) return again(); // nobody listened in between; else it was only a line that closed
    numFailed = 0;
    return tell("live");
  });
  stream.addEventListener("more", (event) => {
    const piece = JSON.parse(event.data);
    if (piece.cursor <= next) return again();
    next = piece.cursor;
    return take(piece, false);
  });
  stream.addEventListener("end", () => {
    stream.close();
    take({ is_live: false }, false);
    tell("ended");
  });
  stream.addEventListener("error", () => {
    tell("lost");
    numFailed += 1;
    if (stream.readyState === EventSource.CLOSED) setTimeout(again, AGAIN_MS); // else the browser tries again by itself
  });
}
