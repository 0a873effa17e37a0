// Draws what `_site.py` answers. All that was stored is text: no markup is ever parsed.
"use strict";

// ---- Answers: those of the server, or those that a report has in it.

const embedded = document.getElementById("answers");
const answers = embedded && JSON.parse(embedded.textContent);
const PAUSE = 3000; // At least so many milliseconds between two looks at a run.
const KEYS = "↑ ↓ move · ← → fold · Enter look · / search · Esc back";

async function ask(what, query = {}) {
  const key = `${what}?${new URLSearchParams(query)}`;
  if (answers) return answers[key] ?? null;
  try {
    const response = await fetch(key);
    if (response.ok) return await response.json();
  } catch { /* It is said below. */ }
  return { error: "Nothing answers. `eqx-ckpt view` may have been ended." };
}

// ---- Elements.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((x) => x !== null));
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- Numbers and sizes.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function size(nbytes) {
  let i = 0;
  while (nbytes >= 1023.95 && i < UNITS.length - 1) { nbytes /= 1024; i++; }
  return `${i ? nbytes.toFixed(1) : nbytes} ${UNITS[i]}`;
}

function short(x, digits = 4) {
  if (typeof x !== "number") return String(x ?? "");
  if (x === 0) return "0";
  const magnitude = Math.abs(x);
  if (magnitude >= 1e6 || magnitude < 1e-3) {
    return x.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
  }
  return String(Number(x.toPrecision(digits))).replace("-", "−");
}
const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

// Round numbers, at least three of them where there are so many.
function ticks(lo, hi, wanted, whole = false) {
  const power = 10 ** Math.floor(Math.log10((hi - lo) / wanted));
  let out = [];
  for (const x of [10, 5, 2, 1, 0.5]) {
    const step = whole ? Math.max(1, x * power) : x * power;
    out = [];
    for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; i++) out.push(i * step + 0);
    if (out.length >= Math.max(3, 0.6 * wanted)) break;
  }
  return out;
}

function decades(lo, hi) {
  for (const digits of [[1], [1, 3], [1, 2, 5]]) {
    const out = [];
    for (let e = Math.floor(Math.log10(lo)); 10 ** e <= hi; e++) out.push(...digits.map((x) => Number(`${x}e${e}`)).filter((y) => y >= lo && y <= hi));
    if (out.length >= 3) return out.filter((_, i) => i % Math.ceil(out.length / 8) === 0);
  }
  return ticks(lo, hi, 5);
}

// ---- Charts: as wide as there is room; with a cross that the mouse or the arrows move.

const HEIGHT = 200, LEFT = 58, RIGHT = 14, TOP = 10, BOTTOM = 38;

// A plot, made anew whenever it is drawn, has `x` and `y` (the ends of each), `label`,
// `draw(svg, sx, sy)`, and of `steps` places where the cross may stand `place(i)` (0 to
// 1) and `said(i)`.
function chart(title, make) {
  const readout = h("output"), under = h("p", { class: "legend" });
  const body = h("div", { class: "plot", tabindex: 0, role: "img" });
  let plot = make(), cross = null, at = null, width = 0;
  const draw = () => {
    plot = make() ?? plot;
    const { note = "", names = [], log } = plot, right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const [lo, hi] = log ? plot.y.map(Math.log10) : plot.y;
    const sx = (x) => LEFT + ((x - plot.x[0]) / (plot.x[1] - plot.x[0] || 1)) * (right - LEFT);
    const sy = (y) => bottom - (((log ? Math.log10(Math.max(y, plot.y[0])) : y) - lo) / (hi - lo || 1)) * (bottom - TOP);
    const svg = s("svg", { width, height: HEIGHT, "aria-hidden": "true" });
    for (const y of log ? decades(...plot.y) : ticks(...plot.y, 5)) {
      svg.append(s("line", { class: "grid", x1: LEFT, x2: right, y1: sy(y), y2: sy(y) }),
        s("text", { class: "tick", x: LEFT - 8, y: sy(y) + 4, "text-anchor": "end" }, (plot.shown ?? short)(y)));
    }
    for (const x of ticks(...plot.x, Math.max(3, Math.floor(width / 100)), plot.whole)) {
      svg.append(s("line", { class: "mark", x1: sx(x), x2: sx(x), y1: bottom, y2: bottom + 4 }),
        s("text", { class: "tick", x: sx(x), y: bottom + 17, "text-anchor": "middle" }, short(x)));
    }
    plot.draw(svg, sx, sy);
    svg.append(s("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }),
      s("text", { class: "unit", x: (LEFT + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, plot.label));
    cross = s("line", { class: "cross", y1: TOP, y2: bottom, visibility: "hidden" });
    svg.append(cross);
    body.replaceChildren(svg);
    body.setAttribute("aria-label", `${title}. ${note}`);
    under.replaceChildren(...(names.length > 1 ? names : []).map(([name, colour]) => h("span", {}, h("i", { class: colour }), name)));
    point(at);
  };
  const point = (i) => {
    at = i === null ? null : Math.max(0, Math.min(plot.steps - 1, i));
    readout.textContent = at === null ? plot.note ?? "" : plot.said(at);
    if (!cross) return;
    cross.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) return;
    const x = LEFT + plot.place(at) * (width - RIGHT - LEFT);
    cross.setAttribute("x1", x); cross.setAttribute("x2", x);
  };
  const nearest = (event) => {
    const share = (event.clientX - body.getBoundingClientRect().left - LEFT) / (width - RIGHT - LEFT);
    const gaps = Array.from({ length: plot.steps }, (_, i) => Math.abs(plot.place(i) - share));
    point(gaps.indexOf(Math.min(...gaps)));
  };
  body.addEventListener("pointermove", nearest);
  for (const left of ["pointerleave", "blur"]) body.addEventListener(left, () => point(null));
  body.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(at === null ? (by > 0 ? 0 : plot.steps - 1) : at + by);
  });
  new ResizeObserver(([entry]) => { width = Math.floor(entry.contentRect.width); if (width > 0) draw(); }).observe(body);
  const made = figure(title, readout, body, under);
  made.redraw = () => { if (width > 0) draw(); };
  return made;
}

const figure = (title, beside, ...parts) =>
  h("figure", {}, h("figcaption", {}, h("b", {}, title), beside), ...parts);
const named = (names) => names.map((name, i) => [name, `s${i}`]);

function histogram(data, names) {
  const { lo, hi, counts, outside } = data;
  const bins = counts[0].length, step = (hi - lo) / bins;
  const most = Math.max(1, ...counts.flat());
  const left = outside.reduce((a, b) => a + b, 0);
  const plot = {
    x: [lo, hi], y: [0, most], label: "value", note: left ? `${count(left, "element")} further out` : "", names: named(names.slice(0, counts.length)), shown: (y) => y.toLocaleString("en"), steps: bins, place: (i) => (i + 0.5) / bins,
    said: (i) => `${short(lo + i * step)} to ${short(lo + (i + 1) * step)}:  ${counts.map((row) => row[i].toLocaleString("en")).join(" | ")}`,
    draw: (svg, sx, sy) => counts.forEach((row, k) => row.forEach((n, i) => {
      if (!n) return;
      const x = sx(lo + i * step), gap = counts.length > 1 ? 0 : 1;
      const y = Math.min(sy(n), sy(0) - 1);
      svg.append(s("rect", { class: `bar s${k}`, x: x + gap / 2, width: Math.max(1, sx(lo + (i + 1) * step) - x - gap), y, height: sy(0) - y }));
    })),
  };
  return chart("Histogram", () => plot);
}

// How curves are drawn: the scale, and how far back a mean looks: a share of the axis.
const settings = { log: false, smooth: 0 };
const SPANS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2];

// The mean of what came before, whose weights fall with the distance.
function smoothed(points, span) {
  let sum = 0, weight = 0, last = points[0]?.[0];
  return points.map(([x, y]) => {
    const kept = Math.exp((last - x) / span);
    last = x; sum = sum * kept + y; weight = weight * kept + 1;
    return [x, sum / weight];
  });
}

// Lines by points [x, y], or [x, mean, least, greatest] of what is near; a null is a gap.
// `series()` gives the `points` of each, its `name`, and its `colour`, if it has one.
function lines(title, series, label, { whole = false, zero = false, note = () => "", scaled = false } = {}) {
  const make = () => {
    let all = series().map((one) => ({ ...one, points: one.points.filter(([, y]) => typeof y === "number") }));
    const positive = all.map((one) => ({ ...one, points: one.points.filter(([, y]) => y > 0) }));
    const log = scaled && settings.log && positive.some((one) => one.points.length > 0);
    const left = log ? all.reduce((sum, one, i) => sum + one.points.length - positive[i].points.length, 0) : 0;
    if (log) all = positive;
    const points = all.flatMap((one) => one.points);
    if (!points.length) return null;
    let x = [Infinity, -Infinity], [lo, hi] = x;
    for (const [at, ...ys] of points) {
      x = [Math.min(x[0], at), Math.max(x[1], at)];
      for (const y of ys) if (!log || y > 0) { lo = Math.min(lo, y); hi = Math.max(hi, y); }
    }
    if (x[0] === x[1]) x = [x[0] - 1, x[0] + 1];
    if (log) { const by = Math.max(1.05, (hi / lo) ** 0.06); lo /= by; hi *= by; }
    else {
      if (zero) lo = Math.min(0, lo);
      const pad = hi > lo ? (hi - lo) * 0.06 : Math.abs(hi) * 0.1 || 1;
      if (!(zero && lo === 0)) lo -= pad;
      hi += pad;
    }
    const span = scaled ? SPANS[settings.smooth] * (x[1] - x[0]) : 0;
    for (const one of all) one.drawn = span ? smoothed(one.points, span) : one.points;
    const coloured = all.filter((one) => one.colour), xs = [...new Set(coloured.flatMap((one) => one.points.map(([at]) => at)))].sort((a, b) => a - b);
    const value = ({ drawn }, at) => (at > drawn.at(-1)?.[0] ? "" : short(drawn.findLast((p) => p[0] <= at)?.[1], 5));
    const path = (some, k, sx, sy) => some.map((p, i) => `${i ? "L" : "M"}${sx(p[0]).toFixed(1)},${sy(p[k]).toFixed(1)}`).join("");
    return {
      x, y: [lo, hi], log, label, whole, note: [note(), left ? `${left} not above 0` : ""].filter(Boolean).join(" · "),
      names: coloured.filter((one) => one.name).map(({ name, colour }) => [name, colour]),
      steps: xs.length, place: (i) => (xs[i] - x[0]) / (x[1] - x[0]),
      said: (i) => `${label} ${short(xs[i], 6)}:  ${coloured.map((one) => value(one, xs[i])).join(" | ")}`,
      draw: (svg, sx, sy) => [...all].sort((a, b) => Boolean(a.colour) - Boolean(b.colour)).forEach(({ points: some, drawn, colour = "rest" }) => {
        if (colour !== "rest" && some[0]?.length === 4) {
          svg.append(s("path", { class: `band ${colour}`, d: `${path(some, 3, sx, sy)}${path([...some].reverse(), 2, sx, sy).replace("M", "L")}Z` }));
        } else if (colour !== "rest" && span) svg.append(s("path", { class: `line raw ${colour}`, d: path(some, 1, sx, sy) }));
        svg.append(s("path", { class: `line ${colour}`, d: path(drawn, 1, sx, sy) }));
        if (some.length < 2 || (colour !== "rest" && !span && some.length * coloured.length <= 120)) for (const p of some) svg.append(s("circle", { class: `dot ${colour}`, cx: sx(p[0]), cy: sy(p[1]), r: 2.5 }));
      }),
    };
  };
  return make() && chart(title, make);
}

// ---- Pictures of slices.

const dark = matchMedia("(prefers-color-scheme: dark)");
const mix = (a, b, t) => a.map((x, i) => Math.round(x + (b[i] - x) * t));

// From orange by the page's own colour, which is zero, to teal; or from it to teal.
function colours(signed) {
  const [low, middle, high] = dark.matches
    ? [[245, 158, 66], [28, 32, 38], [64, 208, 190]] : [[196, 88, 10], [247, 248, 248], [0, 106, 94]];
  const bend = (t) => t ** 0.9;
  return Array.from({ length: 255 }, (_, i) => {
    const t = i / 254;
    if (!signed) return mix(middle, high, t);
    return t < 0.5 ? mix(middle, low, bend(1 - 2 * t)) : mix(middle, high, bend(2 * t - 1));
  });
}

function paint(canvas, width, height, levels, signed) {
  const table = colours(signed), context = canvas.getContext("2d");
  canvas.width = width; canvas.height = height;
  const image = context.createImageData(width, height);
  levels.forEach((level, i) => image.data.set([...(level === 255 ? [214, 40, 96] : table[level]), 255], 4 * i));
  context.putImageData(image, 0, 0);
}

// `zoom` is asked to draw what is around an element, where a dot stands for many.
function grid(data, zoom) {
  const [rows, columns] = data.shape, [height, width] = data.size, [down, right] = data.steps;
  const levels = Uint8Array.from(atob(data.grid), (x) => x.charCodeAt(0));
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `A picture of ${rows} by ${columns} elements` });
  const scale = h("canvas", { class: "scale", "aria-hidden": "true" });
  const closer = down * right > 1 ? zoom : null;
  const note = down * right > 1 ? `each dot: the largest of ${down} × ${right}${closer ? "; click or Enter: closer" : ""}` : `${rows} × ${columns}`;
  const readout = h("output", {}, note);
  const draw = () => {
    paint(canvas, width, height, levels, data.is_signed);
    paint(scale, 255, 1, Uint8Array.from({ length: 255 }, (_, i) => i), data.is_signed);
  };
  draw();
  dark.addEventListener("change", draw);
  // Small ones are drawn large, in whole dots; long ones get a shape that can be seen.
  const wide = Math.max(width * Math.max(1, Math.floor(600 / width)), 128);
  canvas.style.width = `${wide}px`;
  canvas.style.aspectRatio = String(Math.min(5, Math.max(0.6, columns / rows)));
  let at = null;
  const point = (y, x) => {
    at = [Math.max(0, Math.min(height - 1, y)), Math.max(0, Math.min(width - 1, x))];
    const level = levels[at[0] * width + at[1]];
    const value = level === 255 ? "not finite" : `about ${short(data.lo + (level / 254) * (data.hi - data.lo), 3)}`;
    const place = (i, step, n) => (step > 1 ? `${i * step}:${Math.min(n, (i + 1) * step)}` : i);
    readout.textContent = `[${place(at[0], down, rows)}, ${place(at[1], right, columns)}]  ${value}`;
  };
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    point(Math.floor((event.offsetY / box.height) * height), Math.floor((event.offsetX / box.width) * width));
  };
  for (const name of ["pointermove", "pointerdown"]) canvas.addEventListener(name, under);
  canvas.addEventListener("click", () => closer?.(at[0] * down, at[1] * right));
  canvas.addEventListener("pointerleave", () => { readout.textContent = note; });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter" && at) closer?.(at[0] * down, at[1] * right);
    if (!by) return;
    event.preventDefault();
    if (at) point(at[0] + by[0], at[1] + by[1]); else point(0, 0);
  });
  const ends = h("p", { class: "ends" }, h("span", {}, short(data.lo, 3)), scale, h("span", {}, short(data.hi, 3)));
  return [readout, canvas, ends];
}

async function picture(query) {
  const holder = h("div", { class: "holder" });
  const beside = h("span", { class: "beside" });
  let difference = false;
  const draw = async (index) => {
    const data = await ask("picture", index === null ? query : { ...query, index });
    if (!data) return false;
    if (data.error) { beside.textContent = ""; holder.replaceChildren(h("p", { class: "quiet" }, data.error)); return true; }
    if (box.value === "") box.value = data.index;
    difference = data.is_difference;
    if (data.curve) {
      const points = data.curve.map((row) => row.map((y, i) => [i * data.step, y]));
      const names = ["least", "greatest"];
      const made = lines("", () => points.map((x, i) => ({ name: names[i], colour: `s${i}`, points: x })), "index", { whole: true });
      holder.replaceChildren(made ?? ""); beside.textContent = "";
      return true;
    }
    const [readout, canvas, ends] = grid(data, answers ? null : zoom);
    beside.replaceChildren(readout);
    holder.replaceChildren(canvas, ends);
    return true;
  };
  // 256 by 256 elements, each a dot, around one of the slice that is drawn.
  const zoom = (...at) => {
    const parts = box.value.split(",").map((x) => x.trim());
    const places = parts.flatMap((x, i) => (/^\d*:\d*$/.test(x) ? [i] : []));
    if (places.length !== 2 || parts.some((x, i) => x.includes(":") && !places.includes(i))) return;
    places.forEach((i, k) => {
      const start = Math.max(0, Number(parts[i].split(":")[0]) + at[k] - 128);
      parts[i] = `${start}:${start + 256}`;
    });
    box.value = parts.join(", ");
    draw(box.value);
  };
  const box = h("input", { type: "text", spellcheck: "false", "aria-label": "The slice, as in NumPy", placeholder: "0, :, :256" });
  const form = h("form", { class: "slice", onsubmit: (event) => { event.preventDefault(); draw(box.value); } },
    h("label", {}, "slice [", box, "]"), h("button", {}, "Draw"));
  if (!(await draw(null))) return null;
  return figure(difference ? "Difference" : "Picture", beside, answers ? null : form, holder);
}

// ---- The tree: only the rows that are in sight are elements.

const ROW = 30;

class Tree {
  constructor(choose) {
    this.choose = choose;
    this.nodes = []; this.shown = []; this.cursor = 0; this.chosen = null;
    this.space = h("div", { class: "space", role: "presentation" });
    this.list = h("div", { class: "list", role: "tree", tabindex: 0, "aria-label": "Leaves" }, this.space);
    this.list.addEventListener("scroll", () => this.draw());
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) { this.cursor = Number(row.dataset.at); this.press(); }
    });
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  // Nodes have `label`, `what`, `size`, `share`, `leaf` (a number, or null), `below`.
  set(nodes, room = 40) {
    this.nodes = nodes;
    // Those near the top are open, as many as there is room for.
    const queue = [...nodes];
    room -= queue.length;
    for (const node of queue) {
      node.open ??= node.below.length > 0 && node.below.length <= room;
      if (node.open) { room -= node.below.length; queue.push(...node.below); }
    }
    this.cursor = 0; this.list.scrollTop = 0;
    this.flatten();
  }

  // Opens what a leaf is in, and brings it into sight.
  reveal(leaf) {
    const open = (nodes) => nodes.some((node) => {
      if (node.leaf === leaf) return true;
      const has = open(node.below);
      node.open ||= has;
      return has;
    });
    this.chosen = leaf;
    if (leaf !== null && this.shown[this.cursor]?.leaf !== leaf && open(this.nodes)) {
      this.flatten();
      this.move(this.shown.findIndex((node) => node.leaf === leaf));
    }
    this.draw();
  }

  move(to) {
    this.cursor = Math.max(0, Math.min(this.shown.length - 1, to));
    const top = this.cursor * ROW, { scrollTop, clientHeight } = this.list;
    if (top < scrollTop) this.list.scrollTop = top;
    if (top + ROW > scrollTop + clientHeight) this.list.scrollTop = top + ROW - clientHeight;
    this.draw();
  }

  flatten() {
    this.shown = [];
    const walk = (nodes, depth) => {
      for (const node of nodes) {
        node.depth = depth;
        this.shown.push(node);
        if (node.open) walk(node.below, depth + 1);
      }
    };
    walk(this.nodes, 0);
    this.space.style.height = `${this.shown.length * ROW}px`;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 10);
    const last = Math.min(this.shown.length, first + Math.ceil(this.list.clientHeight / ROW) + 20);
    this.space.replaceChildren(...this.shown.slice(first, last).map((node, i) => this.row(node, first + i)));
    this.list.setAttribute("aria-activedescendant", this.shown.length ? `row${this.cursor}` : "");
  }

  row(node, at) {
    const folds = node.below.length > 0;
    const is = (on, name) => (on ? ` ${name}` : "");
    const made = h("div", {
      class: `row${is(at === this.cursor, "cursor")}${is(node.leaf !== null && node.leaf === this.chosen, "chosen")}${is(folds, "node")}${is(isSmall(node), "small")}`,
      id: `row${at}`, role: "treeitem", "data-at": at, "aria-level": node.depth + 1,
      "aria-expanded": folds ? String(node.open) : null, "aria-selected": String(node.leaf !== null && node.leaf === this.chosen),
    }, h("span", { class: "twist", "aria-hidden": "true" }, folds ? (node.open ? "▾" : "▸") : ""),
    h("span", { class: "part", title: node.label }, node.label, node.of ? h("span", { class: "quiet" }, `  ${node.of}`) : null), h("span", { class: "what" }, node.what), h("span", { class: "size" }, node.size));
    made.style.top = `${at * ROW}px`;
    made.style.setProperty("--depth", node.depth);
    made.style.setProperty("--share", node.share ?? 0);
    return made;
  }

  press() {
    const node = this.shown[this.cursor];
    if (!node) return;
    if (node.leaf !== null) { this.chosen = node.leaf; this.draw(); this.choose(node.leaf); } else { node.open = !node.open; this.flatten(); }
  }

  key(event) {
    const node = this.shown[this.cursor], page = Math.floor(this.list.clientHeight / ROW) - 1;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !node) return;
    let to = this.cursor + (by ?? 0);
    if (by) event.preventDefault();
    else if (event.key === "Enter" || event.key === " ") this.press();
    else if (event.key === "ArrowRight" && node.below.length && !node.open) { node.open = true; this.flatten(); }
    else if (event.key === "ArrowRight" && node.open) to++;
    else if (event.key === "ArrowLeft" && node.open) { node.open = false; this.flatten(); }
    else if (event.key === "ArrowLeft") while (to > 0 && this.shown[to].depth >= node.depth && node.depth > 0) to--;
    else return;
    event.preventDefault();
    this.move(to);
  }
}

// Counts, keys and other scalars, which stand behind what is beside them.
const isSmall = ({ leaf, what }) => leaf !== null && !/\[\d/.test(what);
const ordered = (some) => [...some.filter((x) => !isSmall(x)), ...some.filter(isSmall)];

// The tree that the page has: a leaf is its number, a node its name, text, bytes and what is below.
function nodes({ rows, tree, labels }) {
  const whole = rows.reduce((sum, row) => sum + row[2], 0) || 1;
  const of = new Map(Object.entries(labels));
  const grown = (name, label, what, nbytes, leaf, below) => ({
    label, of: of.get(name), what, bytes: nbytes, size: size(nbytes), share: nbytes / whole, leaf, below });
  const grow = (start) => (x) => {
    if (typeof x === "number") return grown(rows[x][0], rows[x][0].slice(rows[x][0].lastIndexOf(".") + 1), rows[x][1], rows[x][2], x, []);
    const name = start ? `${start}.${x[0]}` : x[0];
    return grown(name, x[0], x[1], x[2], null, ordered(x[3].map(grow(name))));
  };
  return ordered(tree.map(grow("")));
}

const flat = (rows, most, keep = () => true) => rows
  .map(([name, what, nbytes], i) => ({ label: name, what, size: size(nbytes), share: nbytes / most, leaf: i, below: [] }))
  .filter((_, i) => keep(rows[i]));

// ---- Pages.

const state = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const link = (to) => `#${new URLSearchParams(to)}`;
const go = (to) => { location.hash = new URLSearchParams(to); };

function facts(rows) {
  return h("dl", { class: "facts" }, rows.map(([title, text]) => h("div", {}, h("dt", {}, title), h("dd", {}, text))));
}

const fields = ({ static: rows }) => (rows.length ? [figure("Static fields", null, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Static fields" }, facts(rows)))] : []);

function figures(sides, names) {
  const titles = [...new Set(sides.flatMap((x) => Object.keys(x ?? {})))];
  if (!titles.length) return null;
  const cells = titles.map((title) => h("div", { class: title === "NaN" || title === "infinite" ? sides.some((x) => x && x[title] !== "0") ? "bad" : "" : "" },
    h("dt", {}, title), sides.map((x, i) => h("dd", {}, sides.length > 1 ? h("i", { class: `s${i}`, title: names[i] }) : null, x?.[title] ?? "–"))));
  return h("dl", { class: "figures" }, cells);
}

function overview(page) {
  const out = [facts(page.facts)];
  let below = nodes(page);
  while (below.length === 1 && below[0].below.length) below = below[0].below;
  const most = [...below].sort((a, b) => b.bytes - a.bytes).slice(0, 12);
  if (most.length > 1) {
    out.push(figure("Where the bytes are", h("output", {}, below.length > 12 ? `the largest 12 of ${below.length}` : ""),
      h("ul", { class: "bars" }, most.map((x) => bar(x.label, x.size, x.bytes / (most[0].bytes || 1))))));
  }
  if (page.metadata) out.push(figure("Metadata", null, h("pre", {}, page.metadata)));
  return [...out, ...fields(page)];
}

function bar(label, text, share, to = null) {
  const name = to === null ? label : h("a", { href: link({ ...state(), n: to }) }, label);
  const made = h("li", {}, h("span", { class: "part", title: label }, name), h("span", { class: "track" }, h("i")), h("span", { class: "size" }, text));
  made.style.setProperty("--share", share);
  return made;
}

function spectra(found, names) {
  if (!found?.spectra?.length) return null;
  const series = found.spectra.map((x, i) => ({ name: names[i], colour: `s${i}`, points: x.values.map((y, k) => [x.at[k] + 1, y]) }));
  const [one] = found.spectra;
  const note = `${one.count}, the largest ${short(one.largest)}, effective rank ${short(one.effective, 3)}`;
  return lines("Singular values", () => series, "number", { zero: true, whole: true, note: () => note });
}

// ---- Two checkpoints.

const STATES = [["changed", "Changed"], ["unknown", "Must be read to know"], ["a", "Only in the first"], ["b", "Only in the second"], ["same", "The same"]];
const tail = (path) => path.split("/").filter((x) => x && x !== "default").slice(-2).join("/");

// What was measured of each leaf, by its number: the largest and the relative difference.
class Changes {
  constructor(page, at, tell) {
    this.page = page; this.at = at; this.tell = tell; this.found = new Map(); this.left = null;
    this.wanted = page.rows.flatMap(([, , , is], i) => (is === "changed" || is === "unknown" ? [i] : []));
    this.bytes = 2 * this.wanted.reduce((sum, i) => sum + page.rows[i][2], 0);
    if (answers) this.measure();
  }

  async measure() {
    const todo = [...this.wanted];
    this.left = todo.length;
    const work = async () => {
      for (let n = todo.shift(); n !== undefined; n = todo.shift()) {
        this.found.set(n, (await ask("change", { ...this.at, n })) ?? {});
        this.left--;
        if (this.left % 8 === 0) this.tell();
      }
    };
    await Promise.all([work(), work()]);
  }

  relative(n) { const x = this.found.get(n)?.relative; return typeof x === "number" ? x : x === undefined || x === null ? -1 : Infinity; }

  text(n) {
    const x = this.found.get(n);
    if (!x) return "";
    return x.error ? "not read" : x.relative === undefined || x.relative === null ? "other kind" : short(x.relative, 3);
  }

  most() { return Math.max(0, ...[...this.found.keys()].map((n) => this.relative(n)).filter(Number.isFinite)); }

  nodes() {
    const { rows } = this.page, most = this.most() || 1;
    const leaf = (i) => {
      const is = this.found.has(i);
      return { label: rows[i][0], what: rows[i][1].includes("→") ? rows[i][1] : "", size: is ? this.text(i) : size(rows[i][2]), share: is ? Math.max(0, Math.min(1, this.relative(i) / most)) : 0, leaf: i, below: [] };
    };
    const of = (i) => (rows[i][3] === "unknown" && this.found.has(i) ? (this.relative(i) === 0 ? "same" : "changed") : rows[i][3]);
    return STATES.map(([is, label]) => {
      const below = rows.map((_, i) => i).filter((i) => of(i) === is).sort((a, b) => this.relative(b) - this.relative(a) || a - b).map(leaf);
      return { label, what: "", size: below.length.toLocaleString("en"), share: 0, leaf: null, below, open: is !== "same" || undefined };
    }).filter((node) => node.below.length);
  }

  overview() {
    const { page } = this, counts = Object.fromEntries(STATES.map(([is]) => [is, page.rows.filter((row) => row[3] === is).length]));
    const out = [h("dl", { class: "facts two" }, [[0, page.title, page.quiet], [1, page.other, page.other_quiet]].map(([i, path, quiet]) =>
      h("div", {}, h("dt", {}, h("i", { class: `s${i}` }), i ? "second" : "first"), h("dd", {}, path, h("p", { class: "quiet" }, quiet)))))];
    out.push(h("p", { class: "counts" }, STATES.filter(([is]) => counts[is]).map(([is, label]) => h("span", {}, h("b", {}, counts[is].toLocaleString("en")), ` ${label.toLowerCase()}`)),
      page.metadata_differ ? h("span", {}, "other metadata") : null));
    if (!this.wanted.length) return out;
    // What is known without reading is there at once: which leaves, the largest first.
    const is = this.left !== null, nbytes = (n) => page.rows[n][2], { length } = this.wanted;
    const order = this.wanted.filter((n) => !this.found.has(n) || this.relative(n))
      .sort((a, b) => this.relative(b) - this.relative(a) || nbytes(b) - nbytes(a));
    const most = (is ? this.most() : Math.max(...order.map(nbytes))) || 1;
    const share = (n) => Math.max(0, Math.min(1, (is ? this.relative(n) : nbytes(n)) / most));
    const press = () => { this.measure(); this.tell(); };
    const beside = is ? h("output", {}, this.left ? `${this.left} left` : order.length > 100 ? `the first 100 of ${order.length}` : "")
      : h("button", { onclick: press }, `Measure ${count(length, "leaf", "leaves")}`);
    const said = is ? "The L2 norm of the difference, over that of the first."
      : `Here by size. How far each has moved must be read: up to ${size(this.bytes)}.`;
    out.push(figure(is ? "Difference of each leaf" : counts.unknown ? "Leaves to compare" : "Changed leaves", beside, h("p", { class: "quiet" }, said),
      h("ul", { class: "bars" }, order.slice(0, 100).map((n) => bar(page.rows[n][0], this.text(n) || size(nbytes(n)), share(n), n)))));
    return out;
  }
}

// ---- Runs: one, with its steps, or many.

// A table sorts by the column that was pressed last. Rows have a key, and cells with a
// text, a style, and what makes an element, if that is not the text. `begin` is told
// the keys in their order.
const orders = {};
const number = (text) => {
  const found = /^([\d.,e+−-]+)(?: (\w+))?$/.exec(text);
  return found ? Number(found[1].replaceAll("−", "-").replaceAll(",", "")) * 1024 ** Math.max(0, UNITS.indexOf(found[2])) : NaN;
};

function table(title, beside, columns, rows, redraw, begin = () => {}) {
  const by = orders[title], at = by ? columns.findIndex(([text]) => text === by.text) : -1;
  const compare = ([, a], [, b]) => {
    const [x, y] = [a[at][0], b[at][0]], [m, n] = [number(x), number(y)];
    if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) ? 1 : -1;
    return (Number.isNaN(m) ? x.localeCompare(y) : m - n) * (by.falls ? -1 : 1);
  };
  const press = (text) => () => { orders[title] = { text, falls: by?.text === text && !by.falls }; redraw(); };
  const head = columns.map(([text, style], i) => h("th", { scope: "col", class: style, "aria-sort": i === at ? (by.falls ? "descending" : "ascending") : null },
    text ? h("button", { "data-key": `by ${text}`, onclick: press(text) }, text, i === at ? (by.falls ? " ↓" : " ↑") : "") : ""));
  const sorted = at < 0 ? rows : [...rows].sort(compare);
  begin(sorted.map(([key]) => key));
  const body = sorted.map(([, cells]) => h("tr", {}, cells.map(([text, style, make]) => h("td", { class: style }, make?.() ?? text))));
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
    h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
  return figure(title, beside, scroll);
}

// The curves and the table of a run, or of many. They stay, and what changes is put in.
class Board {
  constructor(base) {
    this.base = base; this.charts = new Map(); this.chosen = new Map(); this.of = "last";
    const log = h("input", { type: "checkbox", onchange: () => { settings.log = log.checked; this.redraw(); } });
    const smooth = h("input", { type: "range", min: 0, max: SPANS.length - 1, oninput: () => { settings.smooth = Number(smooth.value); this.redraw(); } });
    log.checked = settings.log; smooth.value = settings.smooth;
    this.tools = h("p", { class: "tools" }, h("label", {}, log, " log scale"), h("label", {}, "smoothing ", smooth));
    this.curves = h("div", { class: "curves" });
    [this.rows, this.rest] = [h("div"), h("div")];
    this.compare = h("button", { "data-key": "compare", onclick: () => go({ ...base, at: [...this.chosen.keys()].sort((a, b) => a - b).join(",") }) }, "Compare the two that are ticked");
    const which = h("select", { onchange: () => { this.of = which.value; this.tabulate(); } }, ["last", "least", "greatest"].map((x) => h("option", {}, x)));
    this.which = h("label", {}, "metrics: ", which);
  }

  redraw() { this.charts.forEach((one) => one.redraw()); }

  show(page) {
    const { kind, curves } = page;
    this.parts = kind === "runs" ? [this.rows, this.tools, this.curves] : [this.tools, this.curves, this.rows, this.rest];
    this.page = page;
    const colour = (i, name) => (kind === "runs" ? this.chosen.get(name) : i < 6 ? `s${i}` : undefined);
    for (const [name] of curves) {
      const own = () => this.page.curves.find((x) => x[0] === name);
      const points = () => (own()?.[2] ?? []).map(([i, some]) => ({ name: this.page.series[i], colour: colour(i, this.page.series[i]), points: some }));
      if (this.charts.has(name)) this.charts.get(name).redraw();
      else {
        const made = lines(name, points, "step", { whole: true, scaled: true, note: () => own()?.[1] });
        if (made) { this.charts.set(name, made); this.curves.append(made); }
      }
    }
    this.tools.hidden = !this.charts.size;
    this.rest.replaceChildren(...(kind === "run" ? [facts(page.facts), ...fields(page)] : []));
    this.tabulate();
  }

  // The place in it stays, and so does what the keys are on.
  tabulate() {
    const top = this.rows.querySelector(".scroll")?.scrollTop, key = this.rows.contains(document.activeElement) && document.activeElement.dataset.key;
    this.rows.replaceChildren(this.page.kind === "runs" ? this.runs() : this.steps());
    if (top) this.rows.querySelector(".scroll").scrollTop = top;
    if (key) [...this.rows.querySelectorAll("[data-key]")].find((x) => x.dataset.key === key)?.focus({ preventScroll: true });
  }

  tick(key, label, press) {
    const box = h("input", { type: "checkbox", "data-key": key, "aria-label": label, onchange: () => press(box.checked) });
    box.checked = this.chosen.has(key);
    return box;
  }

  steps() {
    const { steps, table: [columns, rows] } = this.page;
    const press = (step) => (on) => { if (on) this.chosen.set(step, ""); else this.chosen.delete(step); this.compare.disabled = this.chosen.size !== 2; };
    this.compare.disabled = this.chosen.size !== 2;
    // The first cell has the step; it leads there, and is ticked.
    const first = ([step, is], text, style) => [text, style, () => !is || answers ? null : h("label", {},
      this.tick(`${step}`, `Compare step ${step}`, press(`${step}`)), " ", h("a", { href: link({ ...this.base, at: step }), "data-key": `to ${step}` }, text))];
    return table("Steps", answers ? null : this.compare, columns.map(([text, , style]) => [text, style]),
      rows.map((cells, i) => [`${steps[i][0]}`, cells.map(([text, style], k) => (k ? [text, style] : first(steps[i], text, style)))]), () => this.tabulate());
  }

  runs() {
    const { runs, metrics } = this.page;
    const free = () => [0, 1, 2, 3, 4, 5].map((i) => `s${i}`).find((x) => ![...this.chosen.values()].includes(x));
    // Those at the top have colours, until somebody ticks others.
    const begin = (names) => { if (!this.isTicked) { this.chosen = new Map(names.slice(0, 6).map((name, i) => [name, `s${i}`])); this.redraw(); } };
    const press = (name) => (on) => {
      this.isTicked = true;
      if (!on) this.chosen.delete(name);
      else { if (!free()) this.chosen.delete(this.chosen.keys().next().value); this.chosen.set(name, free()); }
      this.redraw();
      this.tabulate();
    };
    const first = (name) => [name, "name", () => h("label", {}, this.tick(name, `Colour ${name}`, press(name)), h("i", { class: this.chosen.get(name) ?? "none" }), answers ? name : h("a", { href: link({ run: name }), "data-key": `to ${name}` }, name))];
    const k = ["last", "least", "greatest"].indexOf(this.of);
    return table("Runs", this.which, [["run", "name"], ["step", ""], ...metrics.map((x) => [x, ""]), ["steps", ""], ["size", ""], ["time", "quiet"]],
      runs.map(({ name, step, saved, nbytes, time, values }) => [name, [first(name), [step ?? "", ""], ...values.map((x) => [short(x?.[k], 5), ""]), [saved, ""], [size(nbytes), ""], [time ?? "", "quiet"]]]), () => this.tabulate(), begin);
  }
}

class View {
  constructor() {
    this.norms = new Map();
    this.asked = 0;
    this.query = {};
    this.tree = new Tree((leaf) => go({ ...state(), n: leaf }));
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search leaves", spellcheck: "false" });
    this.search.addEventListener("input", () => this.list());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); this.tree.list.focus(); }
    });
    this.found = h("p", { class: "found", role: "status" });
    this.title = h("h1");
    this.quiet = h("p", { class: "quiet" });
    this.detail = h("section", { class: "detail", tabindex: -1, "aria-live": "polite" });
    this.side = h("nav", { "aria-label": "Leaves" }, h("div", { class: "seek" }, this.search, this.found), this.tree.list, h("p", { class: "keys" }, KEYS));
    document.body.replaceChildren(h("header", {}, h("div", {}, this.title, this.quiet)), h("main", {}, this.side, this.detail));
    addEventListener("hashchange", () => this.show());
    addEventListener("keydown", (event) => {
      const typing = event.target.matches("input");
      if (event.key === "/" && !typing) { event.preventDefault(); this.search.focus(); }
      if (event.key !== "Escape") return;
      // Back, a step at a time: from a leaf, a search, a step of a run.
      const { n, ...rest } = state(), { at, ...above } = rest;
      if (this.search.value && (typing || n === undefined)) { this.search.value = ""; this.list(); }
      else if (n !== undefined) go(rest);
      else go(at ? above : {});
      this.tree.list.focus({ preventScroll: true });
    });
  }

  async show() {
    const { n, ...query } = state(), mine = ++this.asked;
    if (!this.page || JSON.stringify(query) !== JSON.stringify(this.query)) {
      const page = await ask("page", query);
      if (mine !== this.asked) return;
      this.query = query; this.page = page;
      if (page.error) { this.title.textContent = "eqx_ckpt"; this.detail.replaceChildren(h("p", { class: "bad" }, page.error)); return; }
      document.body.classList.remove("run", "runs", "pair", "checkpoint");
      document.body.classList.add(page.kind);
      this.board = new Board(query);
      const tell = () => { if (this.page === page) { this.list(true); if (!("n" in state())) this.put(this.overview()); } };
      this.norms = new Map();
      this.changes = page.kind === "pair" ? new Changes(page, query, tell) : null;
      this.head(); this.list();
    }
    document.body.classList.toggle("has-leaf", n !== undefined);
    if (n === undefined) { this.tree.reveal(null); this.put(this.overview()); return; }
    this.tree.reveal(Number(n));
    await this.leaf(Number(n), () => mine === this.asked);
  }

  // Looks again while a run goes on, and takes a twentieth of the time for it.
  async watch() {
    const start = performance.now(), { page, query } = this;
    if (page?.mark && !document.hidden) {
      const found = await ask("page", { ...query, known: page.mark });
      if (this.page === page && found.error) this.quiet.textContent = `${page.quiet} · ${found.error}`;
      if (this.page === page && found.kind) {
        this.page = found; this.head();
        if (JSON.stringify(page.rows) !== JSON.stringify(found.rows)) this.list(true);
        if (!("n" in state())) this.overview();
      }
    }
    setTimeout(() => this.watch(), Math.max(PAUSE, 20 * (performance.now() - start)));
  }

  // The keys go on to work where what was pressed is not there any more.
  put(parts) {
    const had = this.detail.contains(document.activeElement);
    this.detail.replaceChildren(...parts);
    if (had) this.tree.list.focus({ preventScroll: true });
  }

  head() {
    const page = this.page;
    document.title = `${page.title.split("/").filter(Boolean).at(-1)} · eqx_ckpt`;
    this.title.replaceChildren(page.kind === "pair" ? `${page.title} → ${page.other}` : page.title);
    const { at, run } = this.query;
    if (at) this.title.prepend(h("a", { href: link(run ? { run } : {}) }, "‹ run"), "  ");
    else if (run) this.title.prepend(h("a", { href: "#" }, "‹ runs"), "  ");
    this.quiet.textContent = page.quiet;
  }

  list(stays = false) {
    const { cursor } = this.tree, { scrollTop } = this.tree.list;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.page.rows;
    const labels = Object.entries(this.page.labels ?? {});
    const of = (name) => labels.find(([x]) => name === x || name.startsWith(`${x}.`))?.[1] ?? "";
    const is = ([name, what]) => words.every((word) => `${name} ${what} ${of(name)}`.toLowerCase().includes(word));
    this.found.textContent = words.length ? `${rows.filter(is).length.toLocaleString("en")} of ${count(rows.length, "leaf", "leaves")}` : "";
    this.tree.set(words.length ? flat(rows, Math.max(...rows.map((x) => x[2]), 1), is) : this.nodes());
    if (stays) { this.tree.list.scrollTop = scrollTop; this.tree.move(cursor); }
  }

  nodes() { return this.page.kind === "pair" ? this.changes.nodes() : nodes(this.page); }

  overview() {
    if (this.board && ["run", "runs"].includes(this.page.kind)) { this.board.show(this.page); return this.board.parts; }
    return this.page.kind === "pair" ? this.changes.overview() : overview(this.page);
  }

  names(row) {
    if (this.page.kind !== "pair") return [""];
    const both = [tail(this.page.title), tail(this.page.other)];
    return row[3] === "a" ? both.slice(0, 1) : row[3] === "b" ? both.slice(1) : both;
  }

  // The norms of the leaves that were chosen last, at steps that are spread over the run.
  async draw_norms(n, put, current) {
    const wanted = this.page.norm_steps;
    const points = this.norms.get(n)?.points ?? [];
    this.norms.delete(n);
    this.norms.set(n, { name: this.page.rows[n][0], points });
    while (this.norms.size > 6) this.norms.delete(this.norms.keys().next().value);
    const draw = () => {
      const series = [...this.norms.values()].reverse().map((x, i) => ({ ...x, colour: `s${i}` }));
      const found = lines("Norm over steps", () => series, "step", { whole: true, note: () => `${points.length} of ${count(wanted.length, "step")}` });
      const forget = h("button", { onclick: () => { this.norms = new Map([[n, this.norms.get(n)]]); draw(); } }, "This leaf alone");
      put(3, [found, this.norms.size > 1 && !answers ? h("p", {}, forget) : null].filter(Boolean));
    };
    for (const step of wanted.slice(points.length)) {
      const found = await ask("norm", { ...this.query, name: this.page.rows[n][0], step });
      if (found) points.push([step, found.norm ?? null]);
      if (!current()) return;
      if (points.length % 5 === 0) draw();
    }
    draw();
  }

  async leaf(n, current) {
    const row = this.page.rows[n];
    if (!row) { this.detail.replaceChildren(h("p", { class: "quiet" }, "There is no such leaf.")); return; }
    const back = h("button", { class: "back", onclick: () => { const { n: _, ...rest } = state(); go(rest); } }, "‹ all leaves");
    const head = h("div", { class: "head" }, back, h("h2", {}, row[0]), h("p", { class: "quiet" }, `${row[1]} · ${size(row[2])}`));
    if (this.page.kind === "run") head.append(h("p", { class: "quiet" }, `Of step ${this.page.newest}, the newest one.`));
    // Of a run that goes on, the step that the page is of.
    const query = { ...this.query, ...(this.page.kind === "run" && !answers ? { at: this.page.newest } : {}), n };
    const waiting = h("p", { class: "quiet waiting" }, "Reading …");
    this.put([head, waiting]);
    this.detail.scrollTop = 0;
    const slots = [0, 1, 2, 3].map((i) => h("div", { class: `slot${i}` }));
    const put = (slot, made) => { if (current() && made) slots[slot].replaceChildren(...[made].flat()); };
    const found = await ask("leaf", query);
    if (!current()) return;
    waiting.remove();
    if (!found) { this.detail.append(h("p", { class: "quiet" }, "This report has nothing more of this leaf.")); return; }
    if (found.error) { this.detail.append(h("p", { class: "bad" }, found.error)); return; }
    this.detail.append(h("div", { class: "slots" }, slots));
    const names = this.names(row);
    if (this.changes && names.length > 1) {
      const change = await ask("change", query);
      if (change) this.changes.found.set(n, change);
      if (typeof change?.relative === "number") head.append(h("p", { class: "quiet" }, `Difference: ${short(change.relative, 3)} of the norm, at most ${short(change.largest, 3)}.`));
    }
    put(0, [found.said ? h("p", { class: "said" }, found.said) : null, figures(found.figures, names),
      ...found.words.map((text) => h("pre", {}, text)), found.histogram ? histogram(found.histogram, names) : null].filter(Boolean));
    if (found.histogram && found.shape.length) {
      const [drawn, spectrum] = [picture(query), ask("spectrum", query)];
      put(1, await drawn);
      put(2, spectra(await spectrum, names));
    }
    if (this.page.kind === "run" && found.histogram) await this.draw_norms(n, put, current);
  }
}

const view = new View();
view.show();
if (!answers) view.watch();
