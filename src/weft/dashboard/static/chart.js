// Curves on a canvas: axes with round numbers, a line for each, and a reading where the pointer is.

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Fit a canvas to the pixels that it has, and return what draws in units of the page.
export function surface(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// Round numbers from at most `low` to at least `high`.
export function ticks(low, high, wanted = 5) {
  if (!(high > low)) {
    const half = Math.max(Math.abs(low), 1) / 2;
    [low, high] = [low - half, high + half];
  }
  const rough = (high - low) / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * unit).find((each) => each >= rough);
  const found = [];
  for (let i = Math.floor(low / step); i <= Math.ceil(high / step - 1e-9); i += 1) found.push(i * step);
  return found;
}

export class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.pointer = null;
    this.last = null;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
      if (step) {
        event.preventDefault();
        this.point(Math.min(Math.max((this.pointer ?? canvas.clientWidth) + step * canvas.clientWidth, 0), canvas.clientWidth));
      }
    });
  }

  point(x) {
    this.pointer = x;
    if (this.last) this.draw(this.last);
  }

  // what: {curves: [{name, colour, points: [[x, y]]}], across: x => text, up: y => text}
  draw(what) {
    this.last = what;
    const { pen, width, height } = surface(this.canvas);
    const curves = what.curves.map((curve) => ({ ...curve, points: thinned(curve.points, width) })).filter((curve) => curve.points.length);
    pen.font = "12px system-ui, sans-serif";
    if (!curves.length) {
      pen.fillStyle = colour("--dim");
      pen.fillText("nothing yet", 12, 24);
      return;
    }
    const all = curves.flatMap((curve) => curve.points);
    const xs = span(all, 0);
    const ys = ticks(...span(all, 1), height > 200 ? 5 : 3);
    const box = { left: 56, right: width - 12, top: 10, bottom: height - 26 };
    const right = xs[1] > xs[0] ? xs[1] : xs[0] + 1;
    const x = (value) => box.left + ((box.right - box.left) * (value - xs[0])) / (right - xs[0]);
    const y = (value) => box.bottom - ((box.bottom - box.top) * (value - ys[0])) / (ys[ys.length - 1] - ys[0]);
    pen.fillStyle = colour("--dim");
    pen.strokeStyle = colour("--line");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const value of ys) {
      pen.beginPath();
      pen.moveTo(box.left, y(value));
      pen.lineTo(box.right, y(value));
      pen.stroke();
      pen.fillText(what.up(value), box.left - 8, y(value) + 4);
    }
    pen.textAlign = "center";
    for (const value of ticks(xs[0], right, width > 500 ? 6 : 3)) {
      if (value >= xs[0] && value <= right) pen.fillText(what.across(value), Math.min(Math.max(x(value), box.left + 8), box.right - 16), height - 8);
    }
    pen.lineWidth = 1.8;
    pen.lineJoin = "round";
    for (const curve of curves) {
      pen.strokeStyle = curve.colour;
      pen.fillStyle = curve.colour;
      pen.beginPath();
      curve.points.forEach(([a, b], i) => (i ? pen.lineTo(x(a), y(b)) : pen.moveTo(x(a), y(b))));
      pen.stroke();
      if (curve.points.length < 40) {
        for (const [a, b] of curve.points) {
          pen.beginPath();
          pen.arc(x(a), y(b), 2.4, 0, 7);
          pen.fill();
        }
      }
    }
    this.names(pen, curves, box);
    if (this.pointer !== null) this.read(pen, curves, what, box, x, y);
  }

  names(pen, curves, box) {
    pen.textAlign = "right";
    curves.forEach((curve, i) => {
      pen.fillStyle = curve.colour;
      pen.fillText(curve.name, box.right - 4, box.top + 14 + 16 * i);
    });
  }

  read(pen, curves, what, box, x, y) {
    const at = Math.min(Math.max(this.pointer, box.left), box.right);
    const near = curves.map((curve) => curve.points.reduce((a, b) => (Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a)));
    pen.strokeStyle = colour("--dim");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(at, box.top);
    pen.lineTo(at, box.bottom);
    pen.stroke();
    near.forEach(([a, b], i) => {
      pen.fillStyle = curves[i].colour;
      pen.beginPath();
      pen.arc(x(a), y(b), 4, 0, 7);
      pen.fill();
    });
    const text = [what.across(near[0][0]), ...near.map(([, b], i) => `${curves[i].name} ${what.up(b)}`)].join("   ");
    const wide = pen.measureText(text).width + 16;
    const left = Math.min(Math.max(at - wide / 2, box.left), box.right - wide);
    pen.fillStyle = colour("--card");
    pen.fillRect(left, box.bottom - 26, wide, 22);
    pen.fillStyle = colour("--text");
    pen.textAlign = "left";
    pen.fillText(text, left + 8, box.bottom - 11);
  }
}

function span(points, place) {
  let low = Infinity;
  let high = -Infinity;
  for (const point of points) {
    if (point[place] < low) low = point[place];
    if (point[place] > high) high = point[place];
  }
  return [low, high];
}

// As many points as there are columns, the last among them.
function thinned(points, width) {
  const every = Math.ceil(points.length / Math.max(width, 1));
  return every <= 1 ? points : points.filter((_, i) => (points.length - 1 - i) % every === 0);
}
