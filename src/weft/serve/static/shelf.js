// What this browser keeps: conversations for good, the API key until the tab is closed. Nothing of it is sent anywhere.

import { read } from "./talk.js";

const PREFIX = "weft-talk-"; // each conversation by itself, so that two tabs do not undo each other's
const KEY = "weft-api-key";

/** Conversations in a storage. A browser may forbid a page to keep anything, or have no room: `isKeeping` says so. */
export class Shelf {
  constructor(storage) {
    this.storage = storage;
    this.isKeeping = storage !== null;
  }

  /** Return all, the newest first; what cannot be read is left where it is. */
  all() {
    return this.#try(() => {
      const names = Array.from({ length: this.storage.length }, (_, index) => this.storage.key(index));
      const found = names.filter((name) => name?.startsWith(PREFIX)).map((name) => this.#one(name));
      return found.filter((talk) => talk !== null).sort((a, b) => b.at - a.at);
    }, []);
  }

  put(talk) {
    this.#try(() => this.storage.setItem(PREFIX + talk.id, JSON.stringify(talk)));
  }

  drop(id) {
    this.#try(() => this.storage.removeItem(PREFIX + id));
  }

  /** Return whether a name in the storage is a conversation's: another tab may have changed it. */
  static isOurs(name) {
    return name === null || name.startsWith(PREFIX);
  }

  #one(name) {
    try {
      return read(JSON.parse(this.storage.getItem(name)));
    } catch {
      return null;
    }
  }

  #try(act, otherwise) {
    if (this.storage === null) return otherwise;
    try {
      const done = act();
      this.isKeeping = true;
      return done;
    } catch {
      this.isKeeping = false;
      return otherwise;
    }
  }
}

/** The API key of this tab. */
export class Key {
  constructor(storage) {
    this.storage = storage;
    this.value = null;
    try {
      this.value = storage?.getItem(KEY) || null;
    } catch {
      // it lasts until the page is closed
    }
  }

  set(value) {
    this.value = value || null;
    try {
      if (this.value) this.storage?.setItem(KEY, this.value);
      else this.storage?.removeItem(KEY);
    } catch {
      // as above
    }
  }
}

/** Return a storage of the browser by name; null where pages may not have it. */
export function storageOf(name) {
  try {
    return window[name] ?? null;
  } catch {
    return null;
  }
}
