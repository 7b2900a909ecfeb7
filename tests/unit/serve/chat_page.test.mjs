// The chat page's modules without a browser: events, faults, the API, conversations, what is kept, and text.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Api } from "./api.js";
import { BEGUN, Events, fold } from "./events.js";
import { Fault, ofStatus } from "./faults.js";
import { course } from "./messages.js";
import { Run } from "./run.js";
import { Key, Shelf } from "./shelf.js";
import * as talking from "./talk.js";
import { blocks, Sentences } from "./text.js";

const chunk = (content, more = {}) => ({ model: "m@3", choices: [{ delta: { content }, finish_reason: null }], ...more });
const END = { choices: [{ delta: {}, finish_reason: "stop" }] };
const USAGE = { choices: [], usage: { prompt_tokens: 5, completion_tokens: 3 }, system_fingerprint: "fp_3" };
const event = (told) => `data: ${JSON.stringify(told)}\n\n`;
const WHOLE = [event(chunk("")), event(chunk("Hé")), ": still here\n\n", event(chunk("llo")), event(END), event(USAGE)];

/** What stands for fetch: it answers with pieces of bytes, and notes what it was asked. */
function server(pieces, { status = 200, headers = {} } = {}) {
  const asked = [];
  const ask = async (address, options) => {
    asked.push({ address, ...options, body: options.body && JSON.parse(options.body) });
    const body = new ReadableStream({
      async start(control) {
        for (const piece of pieces) {
          if (options.signal?.aborted) return control.error(options.signal.reason);
          if (piece instanceof Error) return control.error(piece);
          control.enqueue(typeof piece === "string" ? new TextEncoder().encode(piece) : piece);
          await new Promise((go) => setTimeout(go));
        }
        control.close();
      },
    });
    return new Response(body, { status, headers });
  };
  return { ask, asked, api: new Api("v1", () => null, ask) };
}

async function all(answers) {
  const found = [];
  for await (const answer of answers) found.push(answer);
  return found;
}

const fails = async (pieces, options, words) => {
  const { api } = server(pieces, options);
  const error = await all(api.answer({ model: "m" })).then(
    () => assert.fail("it did not fail"),
    (error) => error,
  );
  assert.ok(error instanceof Fault, error.stack);
  assert.match(error.words, words);
  assert.ok(error.advice.length > 5);
  return error;
};

// --- events ---

test("events are the same wherever the pieces end", () => {
  const text = 'data: {"a":1}\r\n\r\n: comment\r\nevent: x\r\ndata: two\r\ndata:lines\r\n\r\ndata\n\ndata: last';
  const wanted = ['{"a":1}', "two\nlines", "", "last"];
  for (let size = 1; size <= text.length; size += 1) {
    const events = new Events();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...events.take(text.slice(at, at + size)));
    assert.deepEqual([...found, ...events.end()], wanted, `pieces of ${size}`);
  }
});

test("a line without an end is refused", () => {
  const events = new Events();
  assert.throws(() => {
    for (let num = 0; num < 10; num += 1) events.take("x".repeat(1_000_000));
  }, /without an end/);
});

test("an answer is folded from its events, whatever stands in them", () => {
  const told = [chunk("a"), { choices: [{ delta: { content: null } }] }, {}, { choices: null }, chunk("b"), END, USAGE];
  const answer = told.map((each) => JSON.stringify(each)).concat("[DONE]", "null", "3").reduce(fold, BEGUN);
  assert.deepEqual(answer, {
    text: "ab", model: "m@3", version: "fp_3", finish: "stop", numTokens: 3, numRead: 5, course: null, error: null, isWhole: true,
  });
  assert.equal(fold(BEGUN, "{").error.message, "The server sent an event that is no JSON.");
  assert.equal(fold(BEGUN, '{"error": "broken"}').error.message, "broken");
});

test("whom an answer came by is told in words, with what went on in whose place", () => {
  const members = ["aaaa1111", "bbbb2222", "cccc3333"];
  const mends = [
    { stage: 2, before: "anna0000", member: "bbbb2222", after_tokens: 37, why: "parted", pause_s: 0.8 },
    { stage: 3, before: "carl0000", member: "dora0000", after_tokens: 0, why: "silent", pause_s: null },
    { stage: 3, before: "dora0000", member: "cccc3333", after_tokens: 1, why: "new word", pause_s: 1.2 },
  ];
  const rounds = [{ round: 12, after_tokens: 0 }, { round: 14, after_tokens: 1 }];
  assert.equal(
    course({ members, mends, rounds, num_mends: 5 }).replaceAll("\u00a0", " "),
    "stage 1: aaaa1111 · stage 2: anna0000 → bbbb2222 after 37 tokens, 0.8 s (its link broke) · " +
      "stage 3: carl0000 → dora0000 before the first token (it fell silent) → cccc3333 after 1 token, 1.2 s (new word) · " +
      "2 changes before these · weights of round 12, then 14 after 1 token",
  );
  assert.equal(course({ members: ["anna0000"], mends: [], rounds: [], num_mends: 0 }), "computed by anna0000");
  for (const odd of ["x", {}, { members: 3, mends: [null, 3], rounds: [null] }, { members: [null], mends: [{ stage: 1 }] }]) {
    assert.equal(typeof course(odd), "string");
  }
});

test("an answer's course is that of the last event that tells one", () => {
  const told = (weft) => JSON.stringify({ choices: [{ delta: {}, ...(weft && { weft }) }] });
  const answer = [told({ members: ["a"] }), told(null), told({ members: ["b"] }), told(null)].reduce(fold, BEGUN);
  assert.deepEqual(answer.course, { members: ["b"] });
});

// --- the API ---

test("an answer comes as it is written, with its figures", async () => {
  const { api, asked } = server([...WHOLE, "data: [DONE]\n\n"]);
  const answers = await all(api.answer({ model: "m" }));
  assert.deepEqual(answers.map((each) => each.text).slice(0, 3), ["", "Hé", "Héllo"]);
  assert.equal(answers.at(-1).numTokens, 3);
  assert.equal(asked[0].address, "v1/chat/completions");
  assert.deepEqual(asked[0].body, { model: "m", stream: true, stream_options: { include_usage: true } });
  assert.equal(asked[0].headers.authorization, undefined);
});

test("a letter whose bytes come apart is one letter", async () => {
  const bytes = new TextEncoder().encode(WHOLE.join(""));
  const { api } = server(Array.from(bytes, (byte) => new Uint8Array([byte])));
  assert.equal((await all(api.answer({}))).at(-1).text, "Héllo");
});

test("what is read after the end is no part of the answer", async () => {
  const { api } = server([event(chunk("a")), "data: [DONE]\n\n", new Error("the line is closed")]);
  assert.equal((await all(api.answer({}))).at(-1).text, "a");
});

test("a bare end, an event of an error and a broken line are faults, with what to do", async () => {
  await fails([event(chunk("a"))], {}, /broke off/);
  await fails([], {}, /ended the answer before it began/);
  await fails([event(chunk("a")), new Error("reset")], {}, /broke off/);
  await fails([event(chunk("a")), event({ error: { message: "stage 2 is gone", code: "500" } })], {}, /middle .* stage 2/);
  const error = await fails([event({ error: { message: "All are busy", code: "no_path" } })], {}, /Members .* busy/);
  assert.doesNotMatch(error.words, /whole model/);
  assert.match(error.advice, /missing .* busy/);
});

test("each status has words of its own", async () => {
  const body = (message, code) => [JSON.stringify({ error: { message, type: "x", code } })];
  assert.ok((await fails(body("no"), { status: 401 }, /wants an API key/)).needsKey);
  await fails(body("long", "context_length_exceeded"), { status: 400 }, /longer than the model reads/);
  await fails(body("what", "model_not_found"), { status: 404 }, /does not have this model/);
  await fails(body("spent", "insufficient_quota"), { status: 429 }, /is spent/);
  const host = await fails(body("by name", "host_not_allowed"), { status: 403 }, /at this address/);
  assert.equal(host.needsKey, false);
  assert.ok((await fails(body("not yours"), { status: 403 }, /may not do that/)).needsKey);
  await fails(body("large"), { status: 429, headers: { "x-should-retry": "false" } }, /never takes so much/);
  await fails(body("role"), { status: 400 }, /refuses the request \(400\). It says: role\./);
  await fails(["<html>"], { status: 502 }, /The server failed\./);
  const busy = await fails(body("slow"), { status: 429, headers: { "retry-after": "7" } }, /no more requests/);
  assert.match(busy.advice, /in 7 seconds/);
  const id = await fails(body("oh"), { status: 500, headers: { "x-request-id": "r-1" } }, /failed/);
  assert.match(id.advice, /r-1/);
  assert.match(ofStatus(401, { message: "" }, () => null, true).words, /does not take this/);
});

test("a server that is not there is told so", async () => {
  const api = new Api("v1", () => null, () => Promise.reject(new TypeError("fetch failed")));
  await assert.rejects(api.models(), { words: "The server cannot be reached." });
});

test("models are listed and the key is sent", async () => {
  const { ask, asked } = server(['{"data": [{"id": "a"}, {"id": "b"}]}']);
  assert.deepEqual(await new Api("v1", () => "k", ask).models(), ["a", "b"]);
  assert.equal(asked[0].headers.authorization, "Bearer k");
});

test("a run knows how fast it was, and what is there stays when it is stopped", async () => {
  const { api } = server(WHOLE);
  let now = 0;
  const whole = new Run(api, () => (now += 0.5), () => {});
  await whole.go({});
  assert.deepEqual(
    [whole.note.first_s, whole.note.tokens_per_s, whole.note.version, whole.note.isStopped, whole.fault],
    [0.5, 4, "fp_3", false, null],
  );
  const burst = new Run(api, () => 1, () => {});
  await burst.go({});
  assert.equal(burst.note.tokens_per_s, null);
  const half = new Run(api, () => 1, () => half.answer.text && half.stop());
  await half.go({});
  assert.deepEqual([half.answer.text, half.note.isStopped, half.fault], ["Hé", true, null]);
});

// --- conversations ---

const TALK = () => {
  const begun = talking.begun("1", 1, "m", { ...talking.SETTINGS, system: "Be brief." });
  return talking.answered(talking.asked(begun, "one?", 2), "1", { model: "m" }, 3);
};

test("a question goes on with what was said before", () => {
  const talk = talking.asked(TALK(), "two?", 4);
  assert.deepEqual(talking.request(talk), {
    model: "m",
    messages: [
      { role: "system", content: "Be brief." },
      { role: "user", content: "one?" },
      { role: "assistant", content: "1" },
      { role: "user", content: "two?" },
    ],
  });
  const set = { ...talk, settings: { system: " ", temperature: 0, maxTokens: 9 } };
  const { messages, ...rest } = talking.request(set);
  assert.equal(messages[0].role, "user");
  assert.deepEqual(rest, { model: "m", temperature: 0, max_tokens: 9 });
});

test("an edit cuts what came after, a retry the answer, and neither changes what was", () => {
  const talk = talking.answered(talking.asked(TALK(), "two?", 4), "2", {}, 5);
  assert.deepEqual(talking.edited(talk, 0, "zero?", 6).messages, [{ role: "user", content: "zero?" }]);
  assert.equal(talking.unanswered(talk).messages.at(-1).content, "two?");
  assert.equal(talk.messages.length, 4);
  assert.throws(() => talking.edited(talk, 1, "x", 6));
});

test("a question that was never answered is one with the next", () => {
  const talk = talking.asked(talking.answered(talking.asked(TALK(), "two?", 4), "", {}, 5), "three?", 6);
  assert.ok(talking.isWaiting(talk));
  assert.deepEqual(talking.request(talk).messages.at(-1), { role: "user", content: "two?\n\nthree?" });
});

test("an export is what a program reads", () => {
  const told = JSON.parse(talking.exported(TALK()));
  assert.deepEqual([told.format, told.version, told.model], ["weft-chat", 1, "m"]);
  assert.deepEqual(told.messages.map((each) => each.role), ["system", "user", "assistant"]);
  assert.equal(talking.title(talking.begun("2", 1)), "New conversation");
  assert.equal(talking.title(TALK()), "one?");
});

// --- what is kept ---

class Storage {
  constructor() {
    this.held = new Map();
  }
  get length() {
    return this.held.size;
  }
  key(index) {
    return [...this.held.keys()][index];
  }
  getItem(name) {
    return this.held.get(name) ?? null;
  }
  setItem(name, value) {
    if (this.isFull) throw new Error("QuotaExceededError");
    this.held.set(name, value);
  }
  removeItem(name) {
    this.held.delete(name);
  }
}

test("conversations are kept, newest first, and what is none is passed over", () => {
  const storage = new Storage();
  const shelf = new Shelf(storage);
  const later = { ...TALK(), id: "2", at: 9 };
  for (const talk of [TALK(), later]) shelf.put(talk);
  storage.setItem("weft-talk-bad", "{");
  storage.setItem("weft-talk-odd", '{"id": "x", "at": 1, "messages": [{"role": "root"}]}');
  storage.setItem("weft-theme", "dark");
  assert.deepEqual(new Shelf(storage).all().map((talk) => talk.id), ["2", "1"]);
  shelf.drop("2");
  assert.deepEqual(shelf.all(), [TALK()]);
});

test("a browser that keeps nothing is noticed", () => {
  assert.deepEqual(new Shelf(null).all(), []);
  assert.equal(new Shelf(null).isKeeping, false);
  const storage = new Storage();
  storage.isFull = true;
  const shelf = new Shelf(storage);
  shelf.put(TALK());
  assert.equal(shelf.isKeeping, false);
  const key = new Key(storage);
  key.set("k");
  assert.equal(key.value, "k");
});

// --- text ---

test("fenced code is told from prose, and one that is open is code already", () => {
  const text = "Look:\n```py\nx = 1\n\n`y`\n```\n\nand\n~~~\nraw ```\n~~~\nend\n````\n```\nin\n";
  assert.deepEqual(blocks(text), [
    { kind: "prose", text: "Look:", language: "" },
    { kind: "code", text: "x = 1\n\n`y`", language: "py" },
    { kind: "prose", text: "and", language: "" },
    { kind: "code", text: "raw ```", language: "" },
    { kind: "prose", text: "end", language: "" },
    { kind: "code", text: "```\nin\n", language: "" },
  ]);
  assert.deepEqual(blocks(""), []);
});

test("sentences are said once, when they are whole", () => {
  const sentences = new Sentences();
  assert.deepEqual(sentences.take("It is 3."), []);
  assert.deepEqual(sentences.take("It is 3.5 m. Then"), ["It is 3.5 m."]);
  assert.deepEqual(sentences.take('It is 3.5 m. Then "stop!" he\nsaid'), ['Then "stop!"', "he"]);
  assert.deepEqual(sentences.take('It is 3.5 m. Then "stop!" he\nsaid', true), ["said"]);
});
