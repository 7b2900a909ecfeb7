// The history of a run as it has come so far: lists of small rows, each in the order of time.
//
//   append(piece)        takes rows up; a piece has the same keys as the whole
//   count(rows, at)      how many rows are not after a time
//
// Rows are never changed, so going back in time means leaving the last ones out. It knows nothing of the page.

import { bounded } from "./words.js";

export const LISTS = [
  "states",
  "links",
  "rounds",
  "turns",
  "train",
  "heldout",
  "bytes",
  "proofs",
  "samples",
  "methods",
  "events",
  "advice",
  "stages",
  "moves",
  "beside",
  "watching",
  "audits",
];

// Columns that are there where a run has stages: of which one a row is.
export const STAGE_OF_ROUND = 9;
export const STAGE_OF_TURN = 8;
export const STAGE_OF_PROOF = 4;

/** Return how many rows are not after a time; the rows are in order. */
export function count(rows, at) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the last row that is not after a time, or undefined. */
export function last(rows, at) {
  return rows[count(rows, at) - 1];
}

const AWAY = new Set(["gone", "left", "stopped", "finished", "silent", ""]);

/** Whether who is in a state is not here: "was training" is what others told last before they stopped themselves. */
export function isAway(state) {
  return AWAY.has(state) || state.startsWith("was ");
}

/** Put rows in order again from a place on; return whether any had to move. */
function settle(rows, from) {
  for (let i = Math.max(from, 1); i < rows.length; i++) {
    if (rows[i][0] < rows[i - 1][0]) {
      rows.sort((a, b) => a[0] - b[0]); // stable, and quick where little is out of order
      return true;
    }
  }
  return false;
}

export class History {
  constructor() {
    this.moves = Object.fromEntries(LISTS.map((name) => [name, 0])); // how often rows of a list changed places
    this.clear();
  }

  /** Forget all rows. */
  clear() {
    for (const name of LISTS) this.moves[name] += 1;
    this.run = {};
    this.isLive = false;
    this.isPublic = false;
    this.moved = [0, 0, 0]; // bytes by now, those of ring DDP, and how many peers' they are
    this._silent_s = 0; // when the last piece came
    this._cameAt_ms = performance.now();
    this.cursor = 0;
    this.start = Infinity;
    this.end = -Infinity;
    this.peers = []; // {key, name, device, software}
    this.numCalls = 0; // grows when a peer comes or tells its name
    this.rows = Object.fromEntries(LISTS.map((name) => [name, []]));
    this.statesOf = []; // by peer, the rows of `states`
    this.turnsOf = [];
    this.missesOf = []; // by peer, [at, round, reason]
    this.roundOf = new Map(); // by number, the row of `rounds`
    this.throughOf = new Map(); // by number, who counted in a round through somebody else
    this._numberOf = new Map();
    this._numCalled = new Map(); // by name, how many peers are called so
    this._namedIn = new Map(); // by number of a round, who it names
  }

  append(piece) {
    this.run = piece.run ?? this.run;
    this.isLive = piece.is_live ?? this.isLive;
    this.isPublic = piece.is_public ?? this.isPublic;
    this.moved = piece.moved ?? this.moved;
    if (piece.silent_s !== undefined) [this._silent_s, this._cameAt_ms] = [piece.silent_s, performance.now()];
    this.cursor = piece.cursor ?? this.cursor;
    for (const row of piece.peers ?? []) this._call(row);
    for (const name of LISTS) if (piece[name]?.length) this._extend(name, piece[name]);
    this._share(this.statesOf, piece.states, (row) => row[1]);
    this._share(this.turnsOf, piece.turns, (row) => row[1]);
    for (const row of piece.rounds ?? []) this._round(row);
    for (const row of piece.beside ?? []) this._leftOut(row);
    for (const row of piece.turns ?? []) this._through(row);
  }

  get hasRows() {
    return this.end >= this.start;
  }

  /** Seconds since anything was told, by the clock of the machine that the page comes from. */
  get silent_s() {
    return this._silent_s + (performance.now() - this._cameAt_ms) / 1000;
  }

  get isComplete() {
    return Boolean(this.run.total_tokens) && (this.rows.rounds.at(-1)?.[5] ?? 0) >= this.run.total_tokens;
  }

  /** Whether all is trained, or nobody trains any more, as far as is known. */
  get isOver() {
    if (!this.isLive || this.isComplete) return true;
    return this.peers.length > 0 && this.peers.every((_, peer) => isAway(this.statesOf[peer].at(-1)?.[2] ?? ""));
  }

  name(peer) {
    const known = this.peers[peer];
    if (!known) return "somebody";
    const part = known.key.slice(0, 8);
    if (!known.name) return part;
    return this._numCalled.get(known.name) > 1 ? `${known.name} (${part})` : known.name;
  }

  /** Take up a peer; a key that was there before tells its name anew. */
  _call([key, name, device, software]) {
    if (!this._numberOf.has(key)) {
      this._numberOf.set(key, this.peers.length);
      this.peers.push({});
      for (const lists of [this.statesOf, this.turnsOf, this.missesOf]) lists.push([]);
    }
    this.numCalls += 1;
    const known = this.peers[this._numberOf.get(key)];
    if (known.name) this._numCalled.set(known.name, this._numCalled.get(known.name) - 1);
    Object.assign(known, { key, name: bounded(name, 200), device, software });
    if (known.name) this._numCalled.set(known.name, (this._numCalled.get(known.name) ?? 0) + 1);
  }

  _extend(name, more) {
    const rows = this.rows[name];
    const before = rows.length;
    for (const row of more) rows.push(row);
    if (settle(rows, before)) this.moves[name] += 1;
    this.start = Math.min(this.start, rows[0][0]);
    this.end = Math.max(this.end, rows[rows.length - 1][0]);
  }

  /** Put rows into the lists of the peers they are of. */
  _share(lists, rows, peerOf) {
    const before = new Map();
    for (const row of rows ?? []) {
      const own = lists[peerOf(row)];
      if (!own) continue;
      if (!before.has(own)) before.set(own, own.length);
      own.push(row);
    }
    for (const [own, from] of before) settle(own, from);
  }

  _round(row) {
    this.roundOf.set(row[1], row);
    this._namedIn.set(row[1], new Set(row[6]));
    this._leftOut(row);
  }

  _leftOut(row) {
    for (const [peer, reason] of row[7]) {
      const own = this.missesOf[peer];
      if (!own) continue;
      own.push([row[0], row[1], reason]);
      settle(own, own.length - 1);
    }
  }

  /** Note who counted in a round without being named by it: one that contributes through another. */
  _through([, peer, number, , , , , isCounted, stage]) {
    if (stage !== undefined) return; // nobody contributes through others there
    const named = this._namedIn.get(number);
    if (!isCounted || !named || named.has(peer)) return;
    if (!this.throughOf.has(number)) this.throughOf.set(number, new Set());
    this.throughOf.get(number).add(peer);
    this.moves.rounds += 1; // shares of that round are reckoned anew
  }
}
