// The stages of a run whose model is cut: a lane for each, with who computes it, how fast, and what waits; and who moved.
//
// Members are those that peers see at work; a bar is a stage's rate beside the fastest stage's. A round of a stage is as
// its members tell, unless it says by how many it was signed: then that was checked where the page comes from.

import { find, make, tell } from "./dom.js";
import { bounded, plural, short, since, whole } from "./words.js";

const MOST_NAMED = 6;
const NUM_MOVES = 6;

export class Stages {
  constructor(history, moment, selection) {
    Object.assign(this, { history, moment, selection });
    this.isAll = false;
    this.shown = "";
    find("moves-more").addEventListener("click", () => {
      this.isAll = !this.isAll;
      this.shown = "";
      this.refresh();
    });
  }

  refresh() {
    const { stages } = this.moment;
    find("stages-panel").hidden = stages.length === 0;
    if (!stages.length) return;
    const isBegun = stages.some(({ members }) => members.length);
    const most = Math.max(...stages.map(({ rate }) => rate));
    const slowest = slowestOf(stages);
    const lanes = stages.map((stage, number) => this._lane(stage, number, { num: stages.length, most, slowest, isBegun }));
    const key = JSON.stringify([lanes, this.isAll, this.moment.count("moves")]);
    if (key === this.shown) return; // so that a reader may select text
    this.shown = key;
    find("stages").replaceChildren(...lanes.map((lane) => this._row(lane)));
    tell(find("stages-words"), this._words(stages, slowest));
    this._moves();
  }

  _lane({ members, rate, waiting, layers }, number, { num, most, slowest, isBegun }) {
    const round = this.moment.roundOf(number);
    const proof = this.moment.proof(number);
    return {
      name: `${number + 1} of ${num}`,
      layers,
      members: this._members(members),
      isEmpty: isBegun && members.length === 0,
      rate: rate > 0 ? `${short(rate)}${number === slowest ? ", slowest" : ""}` : "–",
      part: most ? (rate / most) * 100 : 0,
      isSlowest: number === slowest,
      waiting: whole(waiting),
      round: round ? whole(round[1]) : "–",
      proof: proof ? `${proof[1] === round?.[1] ? "" : `${whole(proof[1])} `}by ${proof[2]} of ${proof[3]}` : "not checked",
    };
  }

  _members(members) {
    if (!members.length) return "nobody";
    const names = members.slice(0, MOST_NAMED).map((peer) => bounded(this.history.name(peer), 30));
    const more = members.length > MOST_NAMED ? ` and ${members.length - MOST_NAMED} more` : "";
    return `${members.length}: ${names.join(", ")}${more}`;
  }

  _row(lane) {
    const bar = make("span", { class: "part", "data-is": lane.isSlowest ? "slowest" : "rate", "aria-hidden": "true" });
    bar.style.inlineSize = `${lane.part}%`;
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, lane.name),
      make("td", {}, lane.layers || "–"),
      make("td", { class: lane.isEmpty ? "state warn" : "state" }, lane.members),
      make("td", { class: "rate" }, make("span", {}, lane.rate), make("span", { class: "track" }, bar)),
      make("td", { class: "number" }, lane.waiting),
      make("td", { class: "number" }, lane.round),
      make("td", { class: "quiet" }, lane.proof),
    );
  }

  _words(stages, slowest) {
    const empty = stages.flatMap(({ members }, stage) => (members.length ? [] : [stage + 1]));
    if (empty.length === stages.length) return "Nobody computes a stage now.";
    if (empty.length) return `Nobody computes stage ${empty.join(", ")} now: micro-batches wait.`;
    if (slowest === null) return "Micro-batches pass from the first stage to the last, and back.";
    const others = Math.min(...stages.filter((_, stage) => stage !== slowest).map(({ rate }) => rate));
    const fast = `${short(stages[slowest].rate)} samples/s, and every other could do ${short(others)}`;
    return `Stage ${slowest + 1} is the slowest: ${fast}. The run goes at its pace.`;
  }

  _moves() {
    const num = this.moment.count("moves");
    const rows = this.history.rows.moves.slice(0, num).reverse();
    find("moves").replaceChildren(
      ...rows
        .slice(0, this.isAll ? 200 : NUM_MOVES)
        .map(([at, peer, stage, isHeld, reason]) =>
          make(
            "li",
            {},
            make("time", {}, since(at - this.history.start)),
            make(
              "span",
              {},
              `${bounded(this.history.name(peer), 60)} ${isHeld ? "takes" : "leaves"} stage ${stage + 1}: ${bounded(reason, 300)}`,
            ),
          ),
        ),
    );
    tell(find("moves-head"), num ? `${plural(num, "move")}, newest first` : "Nobody has taken a stage yet");
    const button = find("moves-more");
    button.hidden = num <= NUM_MOVES;
    button.setAttribute("aria-expanded", String(this.isAll));
    tell(button, this.isAll ? "Show fewer" : `Show all ${num}`);
  }
}

/** Return the stage that the others wait for, by what is measured, or null. */
function slowestOf(stages) {
  const rates = stages.map(({ rate }) => rate);
  const least = Math.min(...rates);
  return stages.length > 1 && least > 0 && least < Math.max(...rates) ? rates.indexOf(least) : null;
}
