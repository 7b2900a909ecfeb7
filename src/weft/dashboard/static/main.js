// The page of `weft watch`: it fetches the history, shows a moment of it, and draws what changed.
//
//   source -> history -> moment (the time that is shown) -> header, curves, graph, peers, rounds, events, stories
//
// Whatever changes marks the page as due. A frame draws the graph, which lives; the rest is drawn a few times a second.

import { Audits } from "./audits.js";
import { Curves, leftWords } from "./curves.js";
import { find, tell } from "./dom.js";
import { Events } from "./events.js";
import { Graph } from "./graph.js";
import { History, STAGE_OF_ROUND } from "./history.js";
import { Moment } from "./moment.js";
import { Peers } from "./peers.js";
import { Replay } from "./replay.js";
import { Rounds } from "./rounds.js";
import { Selection } from "./selection.js";
import { follow } from "./source.js";
import { Stages } from "./stages.js";
import { Stories } from "./stories.js";
import { onTheme, startTheme } from "./theme.js";
import { bounded, done, duration, short, whole } from "./words.js";

const PAUSE_MS = 120; // between drawings of all panels, at least
const SILENT_S = 60; // a step or a round may take so long
const LOOK_MS = 10_000; // between two looks whether anything was told
const MOST_BUSY = 4; // and so many times as long as a drawing takes, so that scrolling stays smooth

function start() {
  startTheme();
  const history = new History();
  const moment = new Moment(history);
  const selection = new Selection();
  const page = {
    due: false,
    source: "loading",
    isAwake: false,
    drawn: 0,
    pause_ms: PAUSE_MS,
    before: performance.now(),
  };
  const changed = () => {
    page.due = true;
    wake();
  };
  const wake = () => {
    if (!page.isAwake) requestAnimationFrame(frame);
    page.isAwake = true;
  };
  const replay = new Replay(history, moment, changed);
  const curves = new Curves(history, moment);
  const graph = new Graph(history, moment, selection, wake);
  const peers = new Peers(history, moment, selection);
  const rounds = new Rounds(history, moment, selection);
  const stages = new Stages(history, moment, selection);
  const audits = new Audits(history, moment);
  const events = new Events(history, moment, selection);
  const panels = [peers, stages, audits, events, new Stories(history, moment), replay, graph];

  const draw = () => {
    drawHeader(history, moment, page.source, replay.isPlaying);
    if (!history.hasRows) return;
    curves.draw();
    for (const panel of panels) panel.refresh();
    rounds.draw();
  };
  const frame = (now) => {
    if (replay.frame(Math.min(now - page.before, PAUSE_MS) / 1000)) changed();
    page.before = now;
    graph.pace = replay.isPlaying ? replay.speed : 1;
    if (replay.isPlaying) graph.came = now;
    if (page.due && now - page.drawn > page.pause_ms) {
      page.due = false;
      page.drawn = now;
      draw();
      page.pause_ms = Math.max(PAUSE_MS, MOST_BUSY * (performance.now() - now));
    }
    graph.frame(now);
    page.isAwake = false;
    if (page.due || replay.isPlaying || graph.isLively(now)) wake(); // else the page sleeps, and costs nothing
  };
  onTheme(changed);
  setInterval(() => history.isOver || changed(), LOOK_MS);
  new ResizeObserver(changed).observe(document.body);
  wake();
  follow(
    (piece, isWhole) => {
      if (isWhole) history.clear();
      history.append(piece);
      graph.came = performance.now();
      changed();
    },
    (state) => {
      page.source = state;
      changed();
    },
  );
}

function drawHeader(history, moment, source, isPlaying) {
  const { run, peers } = history;
  const name = bounded(run.name || "a run of weft", 80);
  tell(find("name"), name);
  document.title = `${name} · weft`;
  const [state, words] = standing(history, moment, source, isPlaying);
  find("standing").dataset.is = state;
  tell(find("standing"), words);
  if (!history.hasRows) return;
  const share = run.total_tokens ? moment.tokens / run.total_tokens : null;
  tell(find("round"), whole(moment.last("rounds")?.[1] ?? 0));
  tell(find("proven"), provenWords(moment));
  tell(find("done"), share === null ? short(moment.tokens) : done(share));
  const of = share !== null && share < 1 ? ` of ${short(run.total_tokens)}` : ""; // the last round may count some more
  tell(find("tokens"), share === null ? "tokens" : `${short(moment.tokens)}${of} tokens`);
  find("bar").value = Math.min(1, share ?? 0);
  find("bar").hidden = share === null;
  const here = peers.reduce((num, _, peer) => num + (moment.isHere(peer) ? 1 : 0), 0);
  tell(find("alive"), whole(here));
  const finished = peers.reduce((num, _, peer) => num + (moment.state(peer)?.[2] === "finished" ? 1 : 0), 0);
  tell(find("known"), `of ${whole(peers.length)} known${finished ? `, ${whole(finished)} finished` : ""}`);
  const watching = moment.last("watching")?.[1] ?? 0;
  tell(find("watching"), watching ? `watching: ${whole(watching)}` : "");
  tell(find("left"), leftWords(moment));
  tell(find("pace"), moment.pace ? `${short(moment.pace)} tokens/s` : "");
}

/** Return how many signed the last round whose signatures were checked where the page comes from. */
function provenWords(moment) {
  const last = moment.last("rounds");
  const proof = moment.proof(last?.[STAGE_OF_ROUND]);
  if (!proof) return "";
  const [, round, signed, electors] = proof;
  const which = round === last?.[1] ? "" : `${whole(round)} `;
  return `${which}signed by ${whole(signed)} of ${whole(electors)}`;
}

/** Return how the page stands to the run: live, in the past, lost. */
function standing(history, moment, source, isPlaying) {
  if (source === "loading") return ["wait", "Loading"];
  if (source === "lost") return ["warn", "Connection lost, trying again"];
  if (moment.at < history.end) return ["past", isPlaying ? "Replaying" : "In the past"];
  if (!history.hasRows) return ["wait", "Nothing has happened yet"];
  if (!history.isLive) return ["past", "Finished log"];
  if (history.isComplete) return ["past", "Finished"];
  if (history.isOver) return ["past", "Nobody trains any more"];
  const { silent_s } = history;
  return silent_s > SILENT_S ? ["warn", `Nothing was told for ${duration(silent_s)}`] : ["live", "Live"];
}

start();
