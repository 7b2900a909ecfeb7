// How a run stood at a time: the history with everything after that left out.
//
// Sums over many rows are kept between calls and carried forward; going back begins them anew, which takes some
// milliseconds where there are 100,000 rows.
//
// Of a run with stages, each stage's rounds are a share of the work.
//
// A round's tokens are taken as brought in equal parts by those that counted: the history has no finer account.

import { STAGE_OF_PROOF, STAGE_OF_ROUND, count, isAway, last } from "./history.js";

const MOST_BACK = 2_048; // rows among which one of a stage is looked for
const NUM_RECENT = 20; // rounds that a pace is taken over

/** A sum over the first rows of a list. */
class Fold {
  constructor(zero, step) {
    this.zero = zero;
    this.step = step;
    this.done = Infinity;
    this.moves = -1;
  }

  to(rows, num, moves) {
    if (num < this.done || moves !== this.moves) {
      this.done = 0;
      this.moves = moves;
      this.sum = this.zero();
    }
    for (; this.done < num; this.done++) this.step(this.sum, rows[this.done]);
    return this.sum;
  }
}

export class Moment {
  constructor(history) {
    this.history = history;
    this.at = Infinity; // the time that is shown; Infinity: all there is
    const shares = () =>
      new Fold(
        () => [],
        (sum, row) => this._bring(sum, row),
      );
    this._shares = shares();
    this._sharesBeside = shares();
    this._links = new Fold(() => new Map(), link);
    this._audits = new Fold(noAudits, audit);
    this._counted = new Fold(() => ({ num: 0, works: new Set() }), counted);
    this._usage = new Fold(() => ({ lastOf: [], byRound: new Map() }), use);
  }

  /** The time that is shown, as a number. */
  get time() {
    return Math.min(this.at, this.history.end);
  }

  count(name) {
    return count(this.history.rows[name], this.at);
  }

  last(name) {
    return last(this.history.rows[name], this.at);
  }

  state(peer) {
    return last(this.history.statesOf[peer] ?? [], this.at);
  }

  turn(peer) {
    return last(this.history.turnsOf[peer] ?? [], this.at);
  }

  isHere(peer) {
    const row = this.state(peer);
    return row !== undefined && !isAway(row[2]);
  }

  get tokens() {
    return this.last("rounds")?.[5] ?? this.last("train")?.[1] ?? 0;
  }

  /** The tokens that each peer brought, in whichever stage, by peer. */
  get shares() {
    const [own, beside] = this._bothShares;
    return beside.total ? this.history.peers.map((_, peer) => (own[peer] ?? 0) + (beside[peer] ?? 0)) : own;
  }

  share(peer) {
    const [own, beside] = this._bothShares;
    const total = (own.total ?? 0) + (beside.total ?? 0);
    return total ? ((own[peer] ?? 0) + (beside[peer] ?? 0)) / total : 0;
  }

  get _bothShares() {
    const { rows, moves } = this.history;
    return [
      this._shares.to(rows.rounds, this.count("rounds"), moves.rounds),
      this._sharesBeside.to(rows.beside, this.count("beside"), moves.beside),
    ];
  }

  /** The stages of the run: {members, rate, waiting, layers} of each; none where it has no stages. */
  get stages() {
    const layers = this.history.run.layers ?? [];
    const [, , members = [], rates = [], waiting = []] = this.last("stages") ?? [];
    return Array.from({ length: Math.max(layers.length, members.length) }, (_, stage) => ({
      members: members[stage] ?? [],
      rate: rates[stage] ?? 0,
      waiting: waiting[stage] ?? 0,
      layers: layers[stage] ?? "",
    }));
  }

  /** The last round of a stage, or undefined. */
  roundOf(stage) {
    const [own, beside] = ["rounds", "beside"].map((name) => this._lastOf(name, STAGE_OF_ROUND, stage));
    return own && beside ? (own[0] > beside[0] ? own : beside) : (own ?? beside);
  }

  /** The last proof of a stage's rounds, or undefined; of a run without stages, of its own. */
  proof(stage) {
    return this._lastOf("proofs", STAGE_OF_PROOF, stage);
  }

  _lastOf(name, column, stage) {
    const rows = this.history.rows[name];
    const end = this.count(name);
    for (let i = end - 1; i >= Math.max(0, end - MOST_BACK); i--) {
      if (rows[i][column] === stage) return rows[i];
    }
    return undefined;
  }

  /** The links that are up: by pair, [at, from, to, transport]. */
  get links() {
    return this._links.to(this.history.rows.links, this.count("links"), this.history.moves.links);
  }

  /** What audits have come to: contributions that rounds counted, and how many of them were audited; training steps that
   *  were done again, parts that were merged again; and of each peer, by its number, {nums: by result, distance}. */
  get audits() {
    const { rows, moves } = this.history;
    const sum = this._audits.to(rows.audits, this.count("audits"), moves.audits);
    const { num, works } = this._counted.to(rows.rounds, this.count("rounds"), moves.rounds);
    const numAudited = [...sum.works].filter((work) => works.has(work)).length;
    return { numCounted: num, numAudited, numSteps: sum.numSteps, numParts: sum.numParts, of: sum.of };
  }

  /** The share of its time that the median peer spent in training steps, by round: [at, share]. */
  get usage() {
    const { turns } = this.history.rows;
    const { byRound } = this._usage.to(turns, turns.length, this.history.moves.turns);
    const points = [];
    for (const each of byRound.values()) {
      if (each.median === null) each.median = median(each.shares);
      points.push([each.at, each.median]);
    }
    return points.sort((a, b) => a[0] - b[0]);
  }

  /** The newest round that was evaluated, whenever that was told: [at, tokens, nats per token, per byte, round]. Where
   *  the loss is of pairs of answers it is per pair, and what was found of them stands last. */
  get heldout() {
    const rows = this.history.rows.heldout.slice(0, this.count("heldout"));
    return rows.reduce((newest, row) => (newest && newest[1] > row[1] ? newest : row), undefined);
  }

  /** Bytes that were moved, and that ring DDP would have moved for the same rounds; null where none are counted. */
  get moved() {
    if (this.at >= this.history.end && this.history.moved[0] > 0) return this.history.moved.slice(0, 2);
    return this.last("bytes")?.slice(2) ?? null;
  }

  /** Whose bytes these are: of others nothing is known. */
  get heard() {
    return this.history.peers.map((_, peer) => peer).filter((peer) => this.turn(peer));
  }

  /** Tokens per second of the whole run, over the last rounds. */
  get pace() {
    const { rounds } = this.history.rows;
    const num = this.count("rounds");
    if (num < 2) return 0;
    const first = rounds[Math.max(0, num - 1 - NUM_RECENT)];
    const until = rounds[num - 1];
    return until[0] > first[0] ? Math.max(0, (until[5] - first[5]) / (until[0] - first[0])) : 0;
  }

  /** Seconds until all tokens are done at the pace of late, or null where that is not known. */
  get left_s() {
    const total = this.history.run.total_tokens;
    if (!total) return null;
    if (this.tokens >= total) return 0;
    return this.pace ? (total - this.tokens) / this.pace : null;
  }

  _bring(sum, [, number, , , tokens, , contributors, , contributed]) {
    sum.total = (sum.total ?? 0) + tokens;
    if (contributed) {
      contributors.forEach((peer, i) => (sum[peer] = (sum[peer] ?? 0) + contributed[i]));
      return;
    }
    const through = this.history.throughOf.get(number) ?? [];
    const part = tokens / (contributors.length + (through.size ?? 0) || 1);
    for (const peer of contributors) sum[peer] = (sum[peer] ?? 0) + part;
    for (const peer of through) sum[peer] = (sum[peer] ?? 0) + part;
  }
}

function link(sum, row) {
  const [, one, other, transport] = row;
  const pair = Math.min(one, other) * 65_536 + Math.max(one, other);
  if (transport) sum.set(pair, row);
  else sum.delete(pair);
}

function counted(sum, [, number, , , , , contributors]) {
  sum.num += contributors.length;
  for (const peer of contributors) sum.works.add(`${number} ${peer}`);
}

function noAudits() {
  return { works: new Set(), numSteps: 0, numParts: 0, of: new Map() };
}

function audit(sum, [, , member, round, isSteps, num, result, distance]) {
  if (isSteps) {
    sum.works.add(`${round} ${member}`);
    if (result !== "unanswered") sum.numSteps += num;
  } else sum.numParts += 1;
  if (!sum.of.has(member)) sum.of.set(member, { nums: {}, distance: null });
  const found = sum.of.get(member);
  found.nums[result] = (found.nums[result] ?? 0) + 1;
  if (distance !== null) found.distance = Math.max(found.distance ?? 0, distance);
}

function use(sum, [at, peer, number, work_s]) {
  const before = sum.lastOf[peer];
  sum.lastOf[peer] = at;
  if (before === undefined || at <= before) return;
  if (!sum.byRound.has(number)) sum.byRound.set(number, { at, shares: [], median: null });
  const round = sum.byRound.get(number);
  round.at = Math.max(round.at, at);
  round.shares.push(Math.min(1, Math.max(0, work_s / (at - before))));
  round.median = null;
}

export function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
