// The table of peers: sortable, and of any length; what is known of the one that is picked; and, where visitors come,
// what the visitor's own peer brought.

import { find, make, tell } from "./dom.js";
import { List } from "./list.js";
import { kindOf } from "./selection.js";
import { bounded, nbytes, percent, plural, short } from "./words.js";

const COLUMNS = ["name", "state", "round", "speed", "share", "link"];
const FALLING = new Set(["round", "speed", "share"]); // sorted from the largest first

export class Peers {
  constructor(history, moment, selection) {
    Object.assign(this, { history, moment, selection });
    this.order = [];
    this.by = "share";
    this.isFalling = true;
    this.me = null;
    this.numNamed = 0;
    this.list = new List(find("peers"), {
      id: "peer",
      make: peerRow,
      fill: (row, i) => this._fill(row, this.order[i]),
      pick: (i) => selection.pick(this.order[i].peer),
    });
    for (const button of find("peers").querySelectorAll("[data-by]")) {
      button.addEventListener("click", () => this._sortBy(button.dataset.by));
    }
    find("me").addEventListener("change", (event) => this._be(event.target.value));
    selection.onChange(() => {
      this.list.draw();
      this._tellPicked();
    });
  }

  refresh() {
    const links = this._linksOf();
    this.stageOf = this._stagesOf();
    this.order = this.history.peers.map((known, peer) => this._known(known, peer, links[peer]));
    this.most = this.order.reduce((most, each) => Math.max(most, each.share), 0);
    this._sort();
    this.list.show(this.order.length);
    this._tellPicked();
    if (this.history.isPublic) this._tellMe();
  }

  _known(known, peer, links) {
    const row = this.moment.state(peer);
    const turn = this.moment.turn(peer);
    const isHere = this.moment.isHere(peer);
    const rate = isHere && turn && turn[4] > 0 ? (turn[5] + turn[6]) / turn[4] : 0;
    return {
      peer,
      name: this.history.name(peer),
      state: row?.[2] || "not here",
      kind: row ? kindOf(row[2]) : "idle",
      by: row && row[6] !== peer ? row[6] : null,
      round: row?.[3] ?? turn?.[2] ?? -1,
      speed: isHere ? (row?.[5] ?? 0) : 0,
      share: this.moment.share(peer),
      link: isHere
        ? [rate ? `${nbytes(rate)}/s` : "", [...(links ?? [])].sort().join(", ")].filter(Boolean).join(" · ")
        : "",
    };
  }

  /** Return the numbers of the stages that each peer computes, by peer. */
  _stagesOf() {
    const held = [];
    this.moment.stages.forEach(({ members }, stage) => {
      for (const peer of members) (held[peer] ??= []).push(stage + 1);
    });
    return held;
  }

  /** Return what each peer's links run over, by peer. */
  _linksOf() {
    const links = [];
    for (const [, one, other, transport] of this.moment.links.values()) {
      for (const peer of [one, other]) (links[peer] ??= new Set()).add(bounded(transport, 16));
    }
    return links;
  }

  _sortBy(column) {
    this.isFalling = column === this.by ? !this.isFalling : FALLING.has(column);
    this.by = column;
    this._sort();
    this.list.draw();
  }

  _sort() {
    const sign = this.isFalling ? -1 : 1;
    const value = (known) => known[this.by];
    this.order.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (typeof x === "string") return sign * x.localeCompare(y, "en") || a.peer - b.peer;
      return sign * (x - y) || a.peer - b.peer;
    });
    for (const head of find("peers").querySelectorAll("[role=columnheader]")) {
      const isBy = head.firstElementChild.dataset.by === this.by;
      head.setAttribute("aria-sort", isBy ? (this.isFalling ? "descending" : "ascending") : "none");
    }
  }

  _fill(row, known) {
    const cells = row.children;
    cells[0].title = known.name;
    tell(cells[0], bounded(known.name, 80));
    cells[1].dataset.kind = known.kind;
    tell(cells[1], this._stateWords(known));
    cells[1].title = cells[1].textContent;
    tell(cells[2], known.round < 0 ? "–" : String(known.round));
    tell(cells[3], known.speed ? short(known.speed) : "–");
    tell(cells[4].lastElementChild, percent(known.share));
    cells[4].firstElementChild.style.inlineSize = `${this.most ? (known.share / this.most) * 100 : 0}%`;
    tell(cells[5], known.link || "–");
    row.classList.toggle("picked", known.peer === this.selection.peer);
  }

  /** Return a peer's state, and whose word it is where it is not its own. */
  _stateWords({ peer, state, by }) {
    const held = this.stageOf[peer];
    const stage = held ? `stage ${held.join(", ")} · ` : "";
    return stage + bounded(state, 40) + (by === null ? "" : `, says ${bounded(this.history.name(by), 40)}`);
  }

  _tellPicked() {
    const peer = this.selection.peer;
    const known = this.history.peers[peer];
    const row = this.order.find((each) => each.peer === peer);
    if (!known || !row) {
      tell(find("picked"), "Pick a peer to see more.");
      return;
    }
    const facts = [known.device, known.software, row.link, known.key && `key ${known.key.slice(0, 12)}…`].filter(
      Boolean,
    );
    tell(find("picked"), bounded(`${row.name}: ${this._stateWords(row)}. ${facts.join(" · ")}`, 400));
  }

  // --- visitors ---

  _tellMe() {
    if (this.numNamed !== this.history.numCalls) this._nameAll();
    find("me-line").hidden = false;
    const share = this.me === null ? 0 : this.moment.share(this.me);
    tell(find("me-share"), this.me === null ? "" : `You trained ${percent(share)} of this`);
    tell(find("me-words"), this.me === null ? "Choose your peer to see what it brought." : this._thanks());
  }

  _thanks() {
    const counted = this.history.turnsOf[this.me].filter((turn) => turn[7] && turn[0] <= this.moment.at);
    const brought = `${short(this.moment.shares[this.me] ?? 0)} tokens in ${plural(counted.length, "round")}`;
    return `${brought} of ${bounded(this.history.run.name ?? "this run", 60)}. Thank you.`;
  }

  _nameAll() {
    const names = this.history.peers.map((_, peer) => [bounded(this.history.name(peer), 60), peer]);
    names.sort((a, b) => a[0].localeCompare(b[0], "en"));
    const options = names.map(([name, peer]) => make("option", { value: peer }, name));
    find("me").replaceChildren(make("option", { value: "" }, "nobody yet"), ...options);
    find("me").value = this.me ?? "";
    this.numNamed = this.history.numCalls;
  }

  _be(value) {
    this.me = value === "" ? null : Number(value);
    this._tellMe();
    this.selection.pick(this.me);
  }
}

function peerRow() {
  const cells = COLUMNS.map((name) => make("span", { class: name, role: "gridcell" }));
  cells[4].append(make("span", { class: "part", "aria-hidden": "true" }), make("span"));
  return make("div", {}, ...cells);
}
