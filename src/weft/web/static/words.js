// Figures as people read them.

const PREFIXES = ["", "k", "M", "G", "T", "P"];
const MOST = 1e18; // beyond it no prefix helps

/** 4505600 -> "4.51 M" */
export function short(number, unit = "") {
  if (!Number.isFinite(number)) return "–";
  if (Math.abs(number) >= MOST) return `${number.toExponential(0)}${unit && `\u00a0${unit}`}`;
  let step = 0;
  let rest = Math.abs(number);
  while (rest >= 999.5 && step < PREFIXES.length - 1) {
    rest /= 1000;
    step += 1;
  }
  const places = step === 0 ? (rest < 10 && rest % 1 ? 1 : 0) : rest < 9.995 ? 2 : rest < 99.95 ? 1 : 0;
  const after = PREFIXES[step] + unit;
  return `${number < 0 ? "−" : ""}${rest.toFixed(places)}${after ? `\u00a0${after}` : ""}`;
}

/** The same for a tick of an axis: without zeros that say nothing. */
export function tick(number, unit = "") {
  return short(number, unit).replace(/\.(\d*?)0+(?=\u00a0|$)/, (_, kept) => (kept ? `.${kept}` : ""));
}

export function nbytes(number) {
  return short(number, "B");
}

export function whole(number) {
  return Number.isFinite(number) ? Math.round(number).toLocaleString("en") : "–";
}

/** A number with three digits that count: 0.0123, 26.7, 1,230 */
export function three(number) {
  return Number.isFinite(number) ? number.toLocaleString("en", { maximumSignificantDigits: 3 }) : "–";
}

const MOST_SPELLED = 40; // nats, whose perplexity is a number that says something

/** What a loss is in: "nats per token"; of answers that are drawn, what their rewards lack. */
export function per(of) {
  return of === "answer" ? "below the best reward" : `nats per ${of}`;
}

/** 2.284 -> "2.284 nats per token (perplexity 9.82)" */
export function nats(loss, of = "token") {
  if (of !== "token") return `${loss.toFixed(3)} ${per(of)}`;
  return `${loss.toFixed(3)} nats per token${loss < MOST_SPELLED ? ` (perplexity ${three(Math.exp(loss))})` : ""}`;
}

/** 2.284 -> "2.284 nats per byte (3.295 bits)" */
export function natsPerByte(loss) {
  return `${loss.toFixed(3)} nats per byte (${(loss / Math.LN2).toFixed(3)} bits)`;
}

/** How much of a whole is done, rounded down: 100 % is all of it, and there is no more. */
export function done(share) {
  const places = share >= 0.0995 ? 100 : share >= 0.00995 ? 1_000 : 10_000;
  return percent(Math.min(1, Math.floor(share * places + 1e-9) / places));
}

/** 0.0312 -> "3.1 %" */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const value = share * 100;
  const places = value === 0 || value >= 9.95 ? 0 : value < 0.995 ? 2 : 1;
  return `${value.toFixed(places)}\u00a0%`;
}

/** 3725 -> "1 h 02 min" */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  const two = (number) => String(number).padStart(2, "0");
  if (seconds > 0 && seconds < 9.95) return `${seconds.toFixed(1)}\u00a0s`;
  if (s < 60) return `${s}\u00a0s`;
  if (s < 3600) return `${Math.floor(s / 60)}\u00a0min\u00a0${two(s % 60)}\u00a0s`;
  if (s < 172_800) return `${Math.floor(s / 3600)}\u00a0h\u00a0${two(Math.floor((s % 3600) / 60))}\u00a0min`;
  return `${Math.floor(s / 86_400)}\u00a0d\u00a0${Math.round((s % 86_400) / 3600)}\u00a0h`;
}

/** Seconds since the run began, as a clock: 3725 -> "1:02:05" */
export function since(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const rest = `${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return s < 3600 ? rest : `${Math.floor(s / 3600)}:${rest}`;
}

export function clock(at) {
  const when = new Date(at * 1000);
  return Number.isNaN(when.getTime()) ? "–" : when.toLocaleTimeString("en-GB");
}

export function plural(number, one, many = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

const TURNS = /[\u202a-\u202e\u2066-\u2069]/g; // they would turn the words around them, too

/** Return as much of a text as a page can bear. */
export function bounded(text, most = 4_000) {
  const whole = String(text ?? "");
  const some = whole.length > most ? `${whole.slice(0, most)} …` : whole;
  return some.replace(TURNS, "");
}
