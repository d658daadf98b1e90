// Two small charts, drawn as SVG: five minutes of times to the first token, and of tokens.

import { h, put, say, svg } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const LINES = 3;

class Chart {
  /** `series`: [{ key, name, tone }]; `write` makes a text of a figure. */
  constructor(title, series, write) {
    this.series = series;
    this.write = write;
    this.title = title;
    this.at = null; // the step that is pointed at
    this.drawing = svg("svg", { role: "img", height: HEIGHT });
    this.readout = h("span", { class: "note" });
    const legend = series.map(({ name, tone }) => h("span", { class: "key", "data-tone": tone }, name));
    this.element = h(
      "figure",
      { class: "panel chart" },
      h("figcaption", {}, h("h3", {}, title), h("span", { class: "legend" }, ...legend), this.readout),
      this.drawing,
    );
    new ResizeObserver(() => this.data && this.draw()).observe(this.element);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.point(null));
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  get length() {
    return this.data[this.series[0].key].length;
  }

  draw() {
    this.width = Math.max(200, this.drawing.clientWidth);
    const inner = this.width - LEFT - RIGHT;
    this.step = inner / this.length;
    this.top = nice(this.highest());
    this.y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.top);
    put(this.drawing, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    put(this.drawing, "aria-label", this.summary());
    this.drawing.replaceChildren(...this.grid(), ...this.marks(), ...this.pointed());
    this.tell();
  }

  grid() {
    const elements = [];
    for (let line = 0; line <= LINES; line += 1) {
      const value = (this.top * line) / LINES;
      const y = Math.round(this.y(value)) + 0.5;
      elements.push(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      elements.push(svg("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, this.label(value)));
    }
    for (const [text, place, anchor] of [
      ["5 min ago", LEFT, "start"],
      ["now", this.width - RIGHT, "end"],
    ]) {
      elements.push(svg("text", { x: place, y: HEIGHT - 4, "text-anchor": anchor }, text));
    }
    return elements;
  }

  label(value) {
    return this.write(value);
  }

  point(event) {
    const place = event ? Math.floor((event.offsetX - LEFT) / this.step) : -1;
    const at = place >= 0 && place < this.length ? place : null;
    if (at === this.at) return;
    this.at = at;
    this.draw();
  }

  pointed() {
    if (this.at === null) return [];
    const x = LEFT + (this.at + 0.5) * this.step;
    return [svg("line", { class: "pointer", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM })];
  }

  tell() {
    if (this.at === null) return say(this.readout, "");
    const ends = this.data.until - (this.length - 1 - this.at) * this.data.step_seconds * 1000;
    const figures = this.series.map(({ key, name }) => `${name} ${this.figure(this.data[key][this.at])}`);
    return say(this.readout, `${format.clock(ends)} · ${figures.join(" · ")}`);
  }

  figure(value) {
    return value === null ? format.NONE : this.write(value);
  }

  summary() {
    const last = this.series.map(({ key, name }) => {
      const known = this.data[key].filter((value) => value !== null);
      return `${name} at most ${this.figure(known.length ? Math.max(...known) : null)}`;
    });
    return `${this.title} over the last five minutes: ${last.join(", ")}`;
  }
}

/** Lines of milliseconds. Where nothing is known they have a gap. */
export class Lines extends Chart {
  label(ms) {
    return ms < 1000 ? `${Math.round(ms)} ms` : `${Number((ms / 1000).toFixed(1))} s`;
  }

  highest() {
    return Math.max(30, ...this.series.flatMap(({ key }) => this.data[key]).filter((value) => value !== null));
  }

  marks() {
    return this.series.flatMap(({ key, tone }) => {
      const points = this.data[key].map((value, place) =>
        value === null ? null : [LEFT + (place + 0.5) * this.step, this.y(value)],
      );
      const dots = points
        .filter((point, place) => point && !points[place - 1] && !points[place + 1])
        .map(([cx, cy]) => svg("circle", { cx, cy, r: 2, "data-tone": tone }));
      return [svg("path", { d: path(points), "data-tone": tone }), ...dots];
    });
  }
}

/** Bars on top of each other. The last one is still growing. */
export class Bars extends Chart {
  highest() {
    const sums = this.data[this.series[0].key].map((_, place) =>
      this.series.reduce((sum, { key }) => sum + this.data[key][place], 0),
    );
    return Math.max(3, ...sums);
  }

  marks() {
    const width = Math.max(1, this.step - 1.5);
    const floors = new Array(this.length).fill(0);
    return this.series.flatMap(({ key, tone }) =>
      this.data[key].flatMap((value, place) => {
        if (!value) return [];
        const [low, high] = [this.y(floors[place]), this.y(floors[place] + value)];
        floors[place] += value;
        const x = LEFT + place * this.step + (this.step - width) / 2;
        return [svg("rect", { x, y: high, width, height: Math.max(0.5, low - high), "data-tone": tone })];
      }),
    );
  }
}

function path(points) {
  let pen = "M";
  return points
    .map((point) => {
      if (!point) {
        pen = "M";
        return "";
      }
      const part = `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}

/** The next round figure, of those that have round thirds. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1.5, 3, 4.5, 6, 9, 15].find((step) => value <= step * power) ?? 15);
}
