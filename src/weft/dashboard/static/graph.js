// The peers as points, and the links between them. Few stand on a ring, many like the seeds of a sunflower.

import { colour, surface } from "./chart.js";
import { AWAY } from "./store.js";

const RING = 40;
const MOST_LINKS = 6000;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));

// Where each of `count` points lies, within a circle of radius 1.
export function places(count) {
  return Array.from({ length: count }, (_, i) => {
    const angle = count <= RING ? (2 * Math.PI * i) / count - Math.PI / 2 : i * GOLDEN;
    const radius = count <= RING ? (count === 1 ? 0 : 1) : Math.sqrt((i + 0.5) / count);
    return [radius * Math.cos(angle), radius * Math.sin(angle)];
  });
}

export function drawGraph(canvas, store, states, links, at) {
  const { pen, width, height } = surface(canvas);
  const shown = states.map((state, number) => [state, number]).filter(([state]) => state !== undefined);
  const spots = places(shown.length);
  const wide = Math.min(width / 2 - 70, height / 2 - 30);
  const where = new Map(shown.map(([, number], i) => [number, [width / 2 + wide * spots[i][0], height / 2 + wide * spots[i][1]]]));
  const busy = recent(store, at);
  const few = shown.length <= RING;
  const size = few ? 7 : Math.max(2, 60 / Math.sqrt(shown.length));
  for (const [one, other] of links.slice(-MOST_LINKS)) {
    const [a, b] = [where.get(one), where.get(other)];
    if (!a || !b) continue;
    const isBusy = busy.has(one) && busy.has(other);
    pen.strokeStyle = colour(isBusy ? "--accent" : "--dim");
    pen.globalAlpha = few ? (isBusy ? 0.6 : 0.35) : Math.min(0.3, 300 / links.length);
    pen.lineWidth = isBusy && few ? 2 : 1;
    pen.beginPath();
    pen.moveTo(...a);
    pen.lineTo(...b);
    pen.stroke();
  }
  pen.globalAlpha = 1;
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (const [state, number] of shown) {
    const [x, y] = where.get(number);
    pen.fillStyle = colour(shade(state[2]));
    pen.beginPath();
    pen.arc(x, y, size, 0, 7);
    pen.fill();
    if (few) {
      pen.fillStyle = colour("--text");
      pen.textAlign = x > width / 2 + 1 ? "left" : x < width / 2 - 1 ? "right" : "center";
      const away = pen.textAlign === "center" ? 0 : pen.textAlign === "left" ? 12 : -12;
      pen.fillText(store.name(number).slice(0, 18), x + away, pen.textAlign === "center" ? y + (y < height / 2 ? -16 : 16) : y);
    }
  }
}

export function shade(state) {
  if (AWAY.has(state)) return state === "finished" ? "--good" : "--bad";
  if (state === "training") return "--work";
  return state.includes("left") || state.includes("missed") ? "--warn" : "--dim";
}

// Who has ended a round in the last ten seconds.
function recent(store, at) {
  const found = new Set();
  for (let i = store.until(store.turns, at) - 1; i >= 0 && store.turns[i][0] > at - 10; i -= 1) found.add(store.turns[i][1]);
  return found;
}
