// The peer that a reader looks at, which the graph, the table and the rounds show alike.

export class Selection {
  constructor() {
    this.peer = null;
    this._calls = [];
  }

  onChange(call) {
    this._calls.push(call);
  }

  pick(peer) {
    this.peer = peer;
    for (const call of this._calls) call(peer);
  }
}

const WORK = /^(fetching|tokenizing|evaluating)\b/; // how far it has come follows
const KINDS = new Map([
  ...["training", "helping", "joined", "back", "waiting", "exchanging"].map((state) => [state, "good"]),
  ...["starting", "paused", "joining", "syncing"].map((state) => [state, "wait"]),
  ...["gone", "left", "stopped", ""].map((state) => [state, "idle"]),
  ["finished", "done"],
]);

/** Return what a state means for who looks: good, wait, warn; done and idle are not here. */
export function kindOf(state) {
  if (state?.startsWith("was ")) return "idle";
  return KINDS.get(state ?? "") ?? (WORK.test(state) ? "wait" : "warn");
}
