// Sums over audits, as the page has them, of the rows in told.json: by now, and as they were at a time.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { shareWords } from "./audits.js";
import { History } from "./history.js";
import { Moment } from "./moment.js";

const told = JSON.parse(readFileSync("told.json", "utf-8"));
const history = new History();
history.append(told);
const moment = new Moment(history);
const named = ({ of }) => Object.fromEntries([...of].map(([peer, found]) => [history.name(peer), found]));

const now = moment.audits;
assert.deepEqual([now.numCounted, now.numAudited, now.numSteps, now.numParts], [6, 3, 13, 2]);
assert.deepEqual(named(now), {
  anna: { nums: { unanswered: 1 }, distance: null },
  bert: { nums: { equal: 1, differs: 1 }, distance: 0.5 },
  cccccccc: { nums: { equal: 2, unanswered: 1 }, distance: 2e-6 },
});
assert.equal(
  shareWords(now, history.run.audit_rate).replaceAll("\u00a0", " "),
  "3 of 6 contributions audited (50 %); the run asks for 10 %, of newcomers for four times as much. " +
    "Done again: 13 training steps; merged again: 2 parts.",
);
assert.equal(
  shareWords({ numCounted: 0, numAudited: 0, numSteps: 1, numParts: 1 }, null),
  "0 of 0 contributions audited. Done again: 1 training step; merged again: 1 part.",
);

moment.at = 11.2; // back in time
const before = moment.audits;
assert.deepEqual([before.numCounted, before.numAudited, before.numSteps, before.numParts], [3, 1, 1, 0]);
moment.at = Infinity;
assert.equal(moment.audits.numAudited, 3);

history.append({ audits: [[25, 0, 7, 4, true, 1, "equal", 1e-6]] }); // of one that the round did not count
const beyond = moment.audits;
assert.deepEqual([beyond.numCounted, beyond.numAudited, beyond.numSteps], [6, 3, 14]);
