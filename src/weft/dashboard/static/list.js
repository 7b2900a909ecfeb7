// A list of any length in a box that scrolls: only the rows that are seen are there. Cells are text, never markup.

const HEIGHT = 28; // of a row, the head's too

export class List {
  // columns: [{title, sort}]; cells: row => [[text, class]...]; open: whether a row shows all of its text when asked
  constructor(box, { columns, cells, label, onSort = null }) {
    this.box = box;
    this.columns = columns;
    this.cells = cells;
    this.rows = [];
    this.pool = [];
    box.setAttribute("role", "table");
    box.setAttribute("aria-label", label);
    box.tabIndex = 0;
    this.space = document.createElement("div");
    this.head = this.makeHead(onSort);
    box.append(this.head, this.space);
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  makeHead(onSort) {
    const head = document.createElement("div");
    head.className = "row top";
    head.setAttribute("role", "row");
    for (const column of this.columns) {
      const cell = document.createElement("span");
      cell.setAttribute("role", "columnheader");
      if (onSort) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = column.title;
        button.addEventListener("click", () => onSort(column));
        cell.append(button);
      } else {
        cell.textContent = column.title;
      }
      head.append(cell);
    }
    return head;
  }

  sorted(column, isDown) {
    [...this.head.children].forEach((cell, i) => {
      if (this.columns[i] === column) cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  show(rows) {
    this.rows = rows;
    this.space.style.height = `${rows.length * HEIGHT}px`;
    this.box.style.height = `min(${(rows.length + 1) * HEIGHT + 2}px, var(--most, 340px))`;
    this.box.setAttribute("aria-rowcount", String(rows.length + 1));
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / HEIGHT) - 2);
    const count = Math.min(this.rows.length - first, Math.ceil(this.box.clientHeight / HEIGHT) + 4);
    while (this.pool.length < count) this.pool.push(this.makeRow());
    this.pool.forEach((element, i) => {
      element.hidden = i >= count;
      if (i < count) this.fill(element, first + i);
    });
  }

  makeRow() {
    const row = document.createElement("div");
    row.className = "row";
    row.setAttribute("role", "row");
    row.append(...this.columns.map(() => {
      const cell = document.createElement("span");
      cell.setAttribute("role", "cell");
      return cell;
    }));
    this.box.append(row);
    return row;
  }

  fill(element, number) {
    element.style.transform = `translateY(${(number + 1) * HEIGHT}px)`;
    element.setAttribute("aria-rowindex", String(number + 2));
    this.cells(this.rows[number]).forEach(([text, kind], i) => {
      const cell = element.children[i];
      if (cell.textContent !== text) {
        cell.textContent = text;
        cell.title = text;
      }
      if (cell.className !== kind) cell.className = kind;
    });
  }
}
