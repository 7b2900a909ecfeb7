// The chat page of `weft serve`: conversations on the left, one of them on the right.
//
//   shelf (this browser) -> talks -> what is shown            question -> talk -> Run -> api -> more of the answer
//
// Each conversation may have an answer on its way; it goes on while another one is looked at.

import { Api } from "./api.js";
import { find, make, tell } from "./dom.js";
import { course, editor, fault, isSending, message, show } from "./messages.js";
import { Run } from "./run.js";
import { Key, Shelf, storageOf } from "./shelf.js";
import * as talking from "./talk.js";
import { Sentences } from "./text.js";
import { startTheme } from "./theme.js";

const DRAW_MS = 60; // between two drawings of an answer that grows
const NEAR_PX = 60; // from the end: who is so near follows what comes
const MOST_SAID = 40; // sentences that wait for a screen reader

class Page {
  constructor() {
    this.shelf = new Shelf(storageOf("localStorage"));
    this.key = new Key(storageOf("sessionStorage"));
    this.api = new Api("v1", () => this.key.value);
    this.talks = new Map(this.shelf.all().map((talk) => [talk.id, talk]));
    this.runs = new Map(); // by the conversation's id, while an answer is on its way
    this.faults = new Map(); // by the same, until the next try
    this.models = [];
    this.modelFault = null;
    this.editing = null; // the index of a message
    this.drawing = null;
    this.sentences = new Sentences();
    this.talk = [...this.talks.values()][0] ?? this.fresh();
  }

  start() {
    startTheme();
    find("new").addEventListener("click", () => this.open(this.fresh()));
    find("export").addEventListener("click", () => this.exportTalk());
    find("delete").addEventListener("click", () => this.drop());
    find("stop").addEventListener("click", () => this.runs.get(this.talk.id)?.stop());
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find("question").addEventListener("keydown", (event) => {
      if (isSending(event)) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.editing === null) this.runs.get(this.talk.id)?.stop();
    });
    find("model").addEventListener("change", (event) => this.put({ ...this.talk, model: event.target.value }));
    for (const id of ["system", "temperature", "max-tokens"]) {
      find(id).addEventListener("change", () => this.readSettings());
    }
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.useKey(find("key").value.trim());
    });
    find("forget").addEventListener("click", () => {
      this.key.set(null);
      this.draw();
      tell(find("status"), "The API key is forgotten.");
    });
    find("list-toggle").addEventListener("click", () =>
      this.list(!document.body.classList.contains("is-listing")),
    );
    window.addEventListener("storage", (event) => this.changedElsewhere(event));
    window.addEventListener("pagehide", () => {
      for (const [id, run] of this.runs) this.end(id, run);
    });
    this.draw();
    this.askModels();
    find("question").focus();
  }

  // --- conversations ---

  fresh() {
    const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    return talking.begun(id, Date.now(), this.talk?.model ?? null, this.talk?.settings);
  }

  open(talk) {
    this.talk = talk;
    this.editing = null;
    this.list(false);
    tell(find("status"), "");
    this.hush(this.runs.get(talk.id)?.answer.text);
    this.draw({ isAtEnd: true });
    find("question").focus();
  }

  /** Take a conversation as it is now; one without messages is kept nowhere. */
  put(talk) {
    if (talk.id === this.talk.id) this.talk = talk;
    if (!talk.messages.length) return;
    this.talks.delete(talk.id);
    this.talks = new Map([...this.talks, [talk.id, talk]].sort(([, a], [, b]) => b.at - a.at));
    this.shelf.put(talk);
  }

  drop() {
    const talk = this.talk;
    this.runs.get(talk.id)?.stop();
    this.talks.delete(talk.id);
    this.shelf.drop(talk.id);
    this.faults.delete(talk.id);
    this.open([...this.talks.values()][0] ?? this.fresh());
    if (!talk.messages.length) return;
    const undo = make("button", { type: "button" }, "Undo");
    undo.addEventListener("click", () => {
      this.put(talk);
      this.open(talk);
    });
    find("status").replaceChildren(`“${talking.title(talk)}” is deleted.`, undo);
  }

  exportTalk() {
    const address = URL.createObjectURL(new Blob([talking.exported(this.talk)], { type: "application/json" }));
    const name = talking.title(this.talk).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
    make("a", { href: address, download: `${name}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  changedElsewhere(event) {
    if (!Shelf.isOurs(event.key)) return;
    const known = new Map(this.shelf.all().map((talk) => [talk.id, talk]));
    for (const id of this.runs.keys()) if (this.talks.has(id)) known.set(id, this.talks.get(id));
    this.talks = known;
    if (this.editing !== null) return this.drawList();
    const { id, messages } = this.talk;
    if (known.has(id)) this.talk = known.get(id);
    else if (messages.length) this.talk = this.fresh();
    this.draw();
  }

  list(isShown) {
    document.body.classList.toggle("is-listing", isShown);
    find("list-toggle").setAttribute("aria-expanded", String(isShown));
  }

  // --- what is asked ---

  async askModels() {
    this.modelFault = null;
    try {
      this.models = await this.api.models();
      if (!this.models.length) this.modelFault = NO_MODEL;
    } catch (error) {
      this.modelFault = error;
    }
    this.drawTop();
    this.drawEnd();
  }

  readSettings() {
    const [temperature, maxTokens] = [find("temperature"), find("max-tokens")];
    if (!temperature.checkValidity() || !maxTokens.checkValidity()) return false;
    const number = (field) => (field.value === "" ? null : field.valueAsNumber);
    const settings = { system: find("system").value, temperature: number(temperature), maxTokens: number(maxTokens) };
    this.put({ ...this.talk, settings });
    return true;
  }

  send() {
    const question = find("question");
    if (!question.value.trim()) return;
    if (this.runs.has(this.talk.id)) return tell(find("status"), "An answer is being written: stop it first, or wait.");
    if (!this.isReady()) return;
    this.put(talking.asked(this.talk, question.value, Date.now()));
    question.value = "";
    this.answer();
  }

  retry() {
    if (!this.isReady()) return;
    this.put(talking.unanswered(this.talk));
    this.answer();
  }

  edit(index, content) {
    if (!this.isReady()) return;
    this.runs.get(this.talk.id)?.stop();
    this.editing = null;
    this.put(talking.edited(this.talk, index, content, Date.now()));
    this.answer();
    find("question").focus();
  }

  /** Whether something can be asked; says why not. */
  isReady() {
    if (!this.readSettings()) {
      find("settings").open = true;
      find("settings").querySelector(":invalid").reportValidity();
      return false;
    }
    if (this.talk.model === null || (this.models.length && !this.models.includes(this.talk.model))) {
      this.put({ ...this.talk, model: this.models[0] ?? null });
    }
    if (this.talk.model !== null) return true;
    tell(find("status"), "It is not known yet which models the server has.");
    if (this.modelFault) this.askModels();
    return false;
  }

  async answer() {
    const { id } = this.talk;
    this.faults.delete(id);
    const run = new Run(this.api, () => performance.now() / 1000, () => this.grow(id));
    this.runs.set(id, run);
    this.hush();
    tell(find("status"), "");
    this.draw({ isAtEnd: true });
    await run.go(talking.request(this.talk));
    this.end(id, run);
  }

  /** An answer is over, however it came to that: keep what there is of it. */
  end(id, run) {
    if (this.runs.get(id) !== run) return; // a page that is left has kept it, or the question was changed
    this.runs.delete(id);
    if (run.fault) this.faults.set(id, run.fault);
    const talk = id === this.talk.id ? this.talk : this.talks.get(id);
    if (talk) this.put(talking.answered(talk, run.answer.text, run.note, Date.now()));
    if (id !== this.talk.id) return this.drawList();
    this.say(run.answer.text, true);
    this.draw();
  }

  useKey(key) {
    this.key.set(key);
    find("key").value = "";
    const isAgain = this.faults.get(this.talk.id)?.needsKey;
    this.faults.delete(this.talk.id);
    this.draw();
    this.askModels().then(() => isAgain && this.retry());
  }

  // --- what is shown ---

  draw({ isAtEnd = false } = {}) {
    const box = find("messages");
    const follows = isAtEnd || isNearEnd(box);
    tell(find("name"), talking.title(this.talk));
    this.drawList();
    this.drawTop();
    this.drawSettings();
    const { messages } = this.talk;
    const run = this.runs.get(this.talk.id);
    const shown = messages.map((each, index) => this.messageOf(each, index));
    if (!messages.length) shown.push(make("p", { class: "welcome" }, "Ask the model something."));
    this.growing = run ? message({ role: "assistant", content: "", note: { model: this.talk.model } }) : null;
    if (this.growing) {
      this.growing.append(make("p", { class: "note course" }));
      shown.push(this.growing);
    }
    box.replaceChildren(...shown);
    if (run) this.drawAnswer();
    this.drawEnd();
    if (follows) box.scrollTop = box.scrollHeight;
  }

  messageOf(each, index) {
    const { id, messages } = this.talk;
    if (each.role === "assistant") {
      const isLast = index === messages.length - 1 && !this.runs.has(id) && !this.faults.has(id);
      return message(each, isLast ? [{ label: "Retry", act: () => this.retry() }] : []); // else the fault has it
    }
    const change = (to) => {
      this.editing = to;
      this.draw();
      if (to !== null) find("messages").querySelector("textarea").focus();
      else find("question").focus();
    };
    if (index === this.editing) {
      return editor(
        each.content,
        (text) => this.edit(index, text),
        () => change(null),
      );
    }
    return message(each, [{ label: "Edit", act: () => change(index) }]);
  }

  drawList() {
    const items = [...this.talks.values()].map((talk) => {
      const isHere = talk.id === this.talk.id;
      const button = make("button", { type: "button", "aria-current": isHere ? "true" : null }, talking.title(talk));
      if (this.runs.has(talk.id)) button.append(" …");
      button.addEventListener("click", () => this.open(this.talks.get(talk.id) ?? talk));
      return make("li", {}, button);
    });
    const list = find("talks");
    const where = [...list.querySelectorAll("button")].indexOf(document.activeElement);
    list.replaceChildren(...items);
    list.querySelectorAll("button")[where]?.focus();
    tell(
      find("kept"),
      this.shelf.isKeeping
        ? "Conversations are kept in this browser only."
        : "This browser has no room for conversations: they last until the page is closed. Export what you need.",
    );
  }

  drawTop() {
    const choice = find("model");
    const names = this.models.length ? this.models : [this.modelFault ? "none known" : "asking for models …"];
    if (names.join("\n") !== [...choice.options].map((option) => option.value).join("\n")) {
      choice.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    }
    choice.disabled = !this.models.length;
    choice.value = names.includes(this.talk.model) ? this.talk.model : names[0];
    find("export").disabled = find("delete").disabled = !this.talk.messages.length;
  }

  drawSettings() {
    const { system, temperature, maxTokens } = this.talk.settings;
    const set = (id, value) => {
      if (find(id) !== document.activeElement) find(id).value = value ?? "";
    };
    set("system", system);
    set("temperature", temperature);
    set("max-tokens", maxTokens);
    find("forget").hidden = this.key.value === null;
  }

  /** What stands below the messages: what went wrong, what can be done. */
  drawEnd() {
    const box = find("messages");
    const follows = isNearEnd(box);
    for (const old of box.querySelectorAll(".fault")) old.remove();
    const isRunning = this.runs.has(this.talk.id);
    const wrong = isRunning ? null : (this.faults.get(this.talk.id) ?? null);
    if (wrong) box.append(fault(wrong, () => this.retry()));
    else if (!isRunning && this.editing === null && talking.isWaiting(this.talk)) {
      box.append(fault(UNANSWERED, () => this.retry()));
    }
    if (this.modelFault && !wrong) box.append(fault(this.modelFault, () => this.askModels()));
    find("key-form").hidden = !(wrong?.needsKey || this.modelFault?.needsKey);
    find("send").hidden = isRunning;
    find("stop").hidden = !isRunning;
    box.setAttribute("aria-busy", String(isRunning));
    if (follows) box.scrollTop = box.scrollHeight;
  }

  grow(id) {
    if (id !== this.talk.id || this.drawing !== null) return;
    this.drawing = setTimeout(() => {
      this.drawing = null;
      this.drawAnswer();
    }, DRAW_MS);
  }

  drawAnswer() {
    const run = this.runs.get(this.talk.id);
    if (!run || !this.growing) return;
    const box = find("messages");
    const follows = isNearEnd(box);
    show(this.growing.querySelector(".text"), run.answer.text);
    tell(this.growing.querySelector(".course"), run.answer.course ? course(run.answer.course) : "");
    this.say(run.answer.text, false);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  // --- what is read out ---

  /** Say nothing of what was before, nor of what is there already. */
  hush(text = "") {
    this.sentences = new Sentences();
    this.sentences.take(text);
    find("said").replaceChildren();
  }

  say(text, isOver) {
    const box = find("said");
    box.append(...this.sentences.take(text, isOver).map((sentence) => make("p", {}, sentence)));
    while (box.childElementCount > MOST_SAID) box.firstElementChild.remove();
  }
}

const NO_MODEL = { words: "The server has no model.", advice: "See what whoever runs it has started it with." };
const UNANSWERED = { words: "This question has no answer yet.", advice: "Ask again, or edit the question." };

const isNearEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;

new Page().start();
