// The history, as the server tells it: lists of rows that only grow. `until` says how far each list goes at a moment.

export const LISTS = ["states", "links", "rounds", "turns", "train", "heldout", "bytes", "samples", "methods", "events", "advice"];

export class Store {
  constructor() {
    this.run = {};
    this.cursor = 0;
    this.isLive = true;
    this.isPublic = false;
    this.peers = []; // [key, name, device, software], by number
    this.numbers = new Map(); // of keys
    this.first = Infinity;
    this.last = -Infinity;
    for (const name of LISTS) this[name] = [];
  }

  // Take a piece of the history, or all of it.
  add(piece) {
    this.run = piece.run ?? this.run;
    this.cursor = piece.cursor;
    this.isLive = piece.is_live;
    this.isPublic = piece.is_public;
    for (const row of piece.peers ?? []) {
      const number = this.numbers.get(row[0]);
      if (number === undefined) {
        this.numbers.set(row[0], this.peers.length);
        this.peers.push(row);
      } else {
        this.peers[number] = row; // it tells its name anew
      }
    }
    for (const name of LISTS) {
      for (const row of piece[name] ?? []) {
        this[name].push(row);
        if (row[0] < this.first) this.first = row[0];
        if (row[0] > this.last) this.last = row[0];
      }
    }
  }

  name(number) {
    const row = this.peers[number];
    return row ? row[1] || row[0].slice(0, 8) : "";
  }

  // How many rows of a list there are at a moment. Times are in order but for a few seconds.
  until(list, at) {
    let low = 0;
    let high = list.length;
    if (high === 0 || list[high - 1][0] <= at) return high;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle][0] <= at) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

// What peers were doing at a moment: for each number its last row of `states`, or undefined.
export function standing(store, at) {
  const found = new Array(store.peers.length);
  const count = store.until(store.states, at);
  for (let i = 0; i < count; i += 1) found[store.states[i][1]] = store.states[i];
  return found;
}

// The tokens of each peer that rounds have counted by then: of a round each has an equal share.
export function contributed(store, at) {
  const found = new Float64Array(store.peers.length);
  const count = store.until(store.rounds, at);
  for (let i = 0; i < count; i += 1) {
    const [, , , , tokens, , counted] = store.rounds[i];
    for (const peer of counted) found[peer] += tokens / counted.length;
  }
  return found;
}

// The links that stand at a moment, as [one, other, transport].
export function linked(store, at) {
  const found = new Map();
  const count = store.until(store.links, at);
  for (let i = 0; i < count; i += 1) {
    const [, one, other, transport] = store.links[i];
    const key = one < other ? one * 1e6 + other : other * 1e6 + one;
    if (transport) found.set(key, [one, other, transport]);
    else found.delete(key);
  }
  return [...found.values()];
}

export const AWAY = new Set(["gone", "left", "stopped", "finished", "silent"]);
