// What members found of each other's work: how much of it was audited, what audits of each peer came to, and the last
// of them. Only of a run whose members audit each other.
//
// Audits are those that peers told of: of who is not heard nobody knows what it audited.

import { find, make, tell } from "./dom.js";
import { bounded, percent, plural, since, three, whole } from "./words.js";

const NUM_LATEST = 8;
const MOST_LATEST = 200;
const RESULTS = ["equal", "differs", "unanswered"];

export class Audits {
  constructor(history, moment) {
    Object.assign(this, { history, moment });
    this.isAll = false;
    this.shown = "";
    find("audits-more").addEventListener("click", () => {
      this.isAll = !this.isAll;
      this.shown = "";
      this.refresh();
    });
  }

  refresh() {
    const num = this.moment.count("audits");
    const rate = this.history.run.audit_rate ?? null;
    find("audits-panel").hidden = rate === null && num === 0;
    if (find("audits-panel").hidden) return;
    const { numCounted } = this.moment.audits;
    const key = [num, numCounted, rate, this.isAll, this.history.numCalls, this.history.moves.audits].join();
    if (key === this.shown) return; // so that a reader may select text
    this.shown = key;
    tell(find("audits-words"), shareWords(this.moment.audits, rate));
    this._peers(this.moment.audits.of);
    this._latest(num);
  }

  _peers(of) {
    const rows = [...of].sort(([one], [other]) => one - other).map(([peer, found]) => this._peer(peer, found));
    find("audits-peers").replaceChildren(...rows);
    find("audits-of").hidden = rows.length === 0;
  }

  _peer(peer, { nums, distance }) {
    const cells = RESULTS.map((result) => {
      const num = nums[result] ?? 0;
      return make("td", { class: num ? `number ${result}` : "number" }, whole(num));
    });
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, bounded(this.history.name(peer), 60)),
      make("td", { class: "number" }, whole(RESULTS.reduce((sum, result) => sum + (nums[result] ?? 0), 0))),
      ...cells,
      make("td", { class: "number" }, distanceWords(distance)),
    );
  }

  _latest(num) {
    const most = this.isAll ? MOST_LATEST : NUM_LATEST;
    const rows = this.history.rows.audits.slice(Math.max(0, num - most), num).reverse();
    find("audits-latest").replaceChildren(...rows.map((row) => this._one(row)));
    find("audits-last").hidden = rows.length === 0;
    const button = find("audits-more");
    button.hidden = num <= NUM_LATEST;
    button.setAttribute("aria-expanded", String(this.isAll));
    tell(button, this.isAll ? "Show fewer" : `Show the last ${whole(Math.min(num, MOST_LATEST))}`);
  }

  _one([at, by, member, round, isSteps, num, result, distance]) {
    return make(
      "tr",
      {},
      make("td", {}, make("time", {}, since(at - this.history.start))),
      make("td", { class: "number" }, whole(round)),
      make("th", { scope: "row" }, bounded(this.history.name(by), 60)),
      make("td", {}, bounded(this.history.name(member), 60)),
      make("td", {}, isSteps ? plural(num, "training step") : `part ${whole(num)} of the result`),
      make("td", { class: result }, result),
      make("td", { class: "number" }, distanceWords(distance)),
    );
  }
}

/** Return how much of the work was audited, beside what the run asks for. */
export function shareWords({ numCounted, numAudited, numSteps, numParts }, rate) {
  const part = numCounted ? ` (${percent(numAudited / numCounted)})` : "";
  const asked = rate === null ? "" : `; the run asks for ${percent(rate)}, of newcomers for four times as much`;
  return (
    `${whole(numAudited)} of ${plural(numCounted, "contribution")} audited${part}${asked}. ` +
    `Done again: ${plural(numSteps, "training step")}; merged again: ${plural(numParts, "part")}.`
  );
}

function distanceWords(distance) {
  if (distance === null) return "–";
  return distance === 0 ? "0" : distance >= 0.01 ? three(distance) : distance.toExponential(1).replace("-", "−");
}
