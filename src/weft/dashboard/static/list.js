// A list of any length in which only the rows in sight are elements.
//
//   new List(box, {id, make, fill, pick})   box scrolls; make() builds a row, fill(row, i) makes it the i-th
//   list.show(num)                           there are so many rows now
//
// The box has the focus; arrow keys, Page Up and Down, Home and End move the current row, which a screen reader is told
// through aria-activedescendant.

const SPARE = 6; // rows beyond what is in sight, so that scrolling shows no gaps

export class List {
  constructor(box, { id, make, fill, pick = () => {} }) {
    Object.assign(this, { box, id, makeRow: make, fill, pick });
    this.num = 0;
    this.current = -1;
    this.pool = [];
    this.inner = document.createElement("div");
    this.inner.className = "inner";
    this.inner.setAttribute("role", "rowgroup");
    box.append(this.inner);
    box.addEventListener("scroll", () => this._later(), { passive: true });
    box.addEventListener("keydown", (event) => this._key(event));
    box.addEventListener("click", (event) => this._click(event));
    box.addEventListener("focus", () => this.current < 0 && this.num && this._go(this._first, false));
    new ResizeObserver(() => this.measure()).observe(box);
  }

  /** Read the height of a row from the style sheet, which knows how wide the page is. */
  measure() {
    this.height = parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 36;
    this.draw();
  }

  show(num) {
    this.num = num;
    if (this.current >= num) this.current = num - 1;
    this.draw();
  }

  /** Draw the rows in sight; where it only scrolled, those that were there before stay as they are. */
  draw(isScroll = false) {
    if (!this.height) return;
    this.box.style.setProperty("--num", String(this.num));
    this.inner.style.height = `${this.num * this.height}px`;
    const from = Math.max(0, this._first - SPARE);
    const to = Math.min(this.num, this._first + Math.ceil(this.box.clientHeight / this.height) + SPARE);
    while (this.pool.length < to - from) this._grow();
    const size = this.pool.length;
    for (let i = from; i < from + size; i++) this._place(this.pool[i % size], i, i < to, isScroll);
    this._tellCurrent();
  }

  get _first() {
    return Math.floor(this.box.scrollTop / this.height);
  }

  _grow() {
    const row = this.makeRow();
    row.classList.add("row");
    row.setAttribute("role", "row");
    this.pool.push(row);
    this.inner.append(row);
  }

  _place(row, i, isShown, isScroll) {
    const id = `${this.id}-${i}`;
    if (isScroll && row.id === id && row.hidden === !isShown) return;
    row.hidden = !isShown;
    row.id = id;
    if (!isShown) return;
    row.style.transform = `translateY(${i * this.height}px)`;
    row.setAttribute("aria-rowindex", String(i + 2)); // the first is the head
    row.classList.toggle("odd", i % 2 === 1);
    row.setAttribute("aria-selected", String(i === this.current));
    this.fill(row, i);
  }

  _tellCurrent() {
    const row = document.getElementById(`${this.id}-${this.current}`);
    if (row && !row.hidden) this.box.setAttribute("aria-activedescendant", row.id);
    else this.box.removeAttribute("aria-activedescendant");
    this.box.setAttribute("aria-rowcount", String(this.num + 1));
  }

  _later() {
    if (this._isDue) return;
    this._isDue = true;
    requestAnimationFrame(() => {
      this._isDue = false;
      this.draw(true);
    });
  }

  _key(event) {
    if (event.target !== this.box || !this.num) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.height) - 2);
    const to = {
      ArrowDown: this.current + 1,
      ArrowUp: this.current - 1,
      PageDown: this.current + page,
      PageUp: this.current - page,
      Home: 0,
      End: this.num - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this._go(to);
  }

  _click(event) {
    const row = event.target.closest(".row");
    if (row && this.inner.contains(row)) this._go(Number(row.id.slice(this.id.length + 1)));
  }

  /** Make a row the current one and bring it into sight. */
  _go(to, isChosen = true) {
    this.current = Math.min(this.num - 1, Math.max(0, to));
    const top = this.current * this.height;
    const head = this.inner.offsetTop;
    const room = this.box.clientHeight - head - this.height;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top > this.box.scrollTop + room) this.box.scrollTop = top - room;
    this.draw();
    if (isChosen) this.pick(this.current);
  }
}
