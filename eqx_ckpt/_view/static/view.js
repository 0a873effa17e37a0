// Draws what `_site.py` answers. All that was stored is text: no markup is ever parsed.
"use strict";

// ---- Answers: those of the server, or those that a report has in it.

const embedded = document.getElementById("answers");
const answers = embedded && JSON.parse(embedded.textContent);
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

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (nbytes >= 1023.95 && i < units.length - 1) { nbytes /= 1024; i++; }
  return `${i ? nbytes.toFixed(1) : nbytes} ${units[i]}`;
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

function ticks(lo, hi, wanted) {
  const raw = (hi - lo) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((x) => x * power >= raw * 0.999) * power;
  const out = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; i++) out.push(i * step + 0);
  return out;
}

// ---- Charts: as wide as there is room; with a cross that the mouse or the arrows move.

const HEIGHT = 200, LEFT = 58, RIGHT = 14, TOP = 10, BOTTOM = 38;

// `plot` has `x` and `y` (the ends of each), `label`, `unit`, `draw(svg, at)`, and of
// `steps` places where the cross may stand `place(i)` (0 to 1) and `said(i)`.
function chart(title, plot, note = "", names = []) {
  const readout = h("output", {}, note);
  const body = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title}. ${note}` });
  let cross = null, at = null, width = 0;
  const draw = () => {
    const right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const sx = (x) => LEFT + ((x - plot.x[0]) / (plot.x[1] - plot.x[0] || 1)) * (right - LEFT);
    const sy = (y) => bottom - ((y - plot.y[0]) / (plot.y[1] - plot.y[0] || 1)) * (bottom - TOP);
    const svg = s("svg", { width, height: HEIGHT, "aria-hidden": "true" });
    for (const y of ticks(...plot.y, 5)) {
      svg.append(s("line", { class: "grid", x1: LEFT, x2: right, y1: sy(y), y2: sy(y) }),
        s("text", { class: "tick", x: LEFT - 8, y: sy(y) + 4, "text-anchor": "end" }, (plot.shown ?? short)(y)));
    }
    for (const x of ticks(...plot.x, Math.max(3, Math.floor(width / 100)))) {
      if (plot.whole && !Number.isInteger(x)) continue;
      svg.append(s("line", { class: "mark", x1: sx(x), x2: sx(x), y1: bottom, y2: bottom + 4 }),
        s("text", { class: "tick", x: sx(x), y: bottom + 17, "text-anchor": "middle" }, short(x)));
    }
    plot.draw(svg, sx, sy);
    svg.append(s("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom }),
      s("text", { class: "unit", x: (LEFT + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, plot.label));
    cross = s("line", { class: "cross", y1: TOP, y2: bottom, visibility: "hidden" });
    svg.append(cross);
    body.replaceChildren(svg);
  };
  const point = (i) => {
    at = i === null ? null : Math.max(0, Math.min(plot.steps - 1, i));
    readout.textContent = at === null ? note : plot.said(at);
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
  return figure(title, readout, body, names.length > 1 ? legend(names) : null);
}

const figure = (title, beside, ...parts) =>
  h("figure", {}, h("figcaption", {}, h("b", {}, title), beside), ...parts);

function legend(names) {
  return h("p", { class: "legend" }, names.map((name, i) => h("span", {}, h("i", { class: `s${i}` }), name)));
}

function histogram(data, names) {
  const { lo, hi, counts, outside } = data;
  const bins = counts[0].length, step = (hi - lo) / bins;
  const most = Math.max(1, ...counts.flat());
  const left = outside.reduce((a, b) => a + b, 0);
  const note = left ? `${count(left, "element")} further out` : "";
  const plot = {
    x: [lo, hi], y: [0, most], label: "value", shown: (y) => y.toLocaleString("en"), steps: bins, place: (i) => (i + 0.5) / bins,
    said: (i) => `${short(lo + i * step)} to ${short(lo + (i + 1) * step)}:  ${counts.map((row) => row[i].toLocaleString("en")).join(" | ")}`,
    draw: (svg, sx, sy) => counts.forEach((row, k) => row.forEach((n, i) => {
      if (!n) return;
      const x = sx(lo + i * step), gap = counts.length > 1 ? 0 : 1;
      const y = Math.min(sy(n), sy(0) - 1);
      svg.append(s("rect", { class: `bar s${k}`, x: x + gap / 2, width: Math.max(1, sx(lo + (i + 1) * step) - x - gap), y, height: sy(0) - y }));
    })),
  };
  return chart("Histogram", plot, note, names.slice(0, counts.length));
}

// Lines by points [x, y]; a null is a gap.
function lines(title, series, label, { whole = false, zero = false, note = "" } = {}) {
  const points = series.flatMap((x) => x.points).filter(([, y]) => typeof y === "number");
  if (!points.length) return null;
  const xs = [...new Set(points.map(([x]) => x))].sort((a, b) => a - b);
  const ys = points.map(([, y]) => y);
  let lo = Math.min(...ys), hi = Math.max(...ys);
  if (zero) lo = Math.min(0, lo);
  const pad = hi > lo ? (hi - lo) * 0.06 : Math.abs(hi) * 0.1 || 1;
  if (!(zero && lo === 0)) lo -= pad;
  hi += pad;
  const ends = xs.length > 1 ? [xs[0], xs.at(-1)] : [xs[0] - 1, xs[0] + 1];
  const found = series.map((x) => new Map(x.points));
  const plot = {
    x: ends, y: [lo, hi], label, whole, steps: xs.length, place: (i) => (xs[i] - ends[0]) / (ends[1] - ends[0]),
    said: (i) => `${label} ${short(xs[i], 6)}:  ${found.map((x) => short(x.get(xs[i]), 5)).join(" | ")}`,
    draw: (svg, sx, sy) => series.forEach((one, k) => {
      const good = one.points.filter(([, y]) => typeof y === "number");
      const path = good.map(([x, y], i) => `${i ? "L" : "M"}${sx(x).toFixed(1)},${sy(y).toFixed(1)}`).join("");
      svg.append(s("path", { class: `line s${k}`, d: path }));
      if (good.length <= 60) for (const [x, y] of good) svg.append(s("circle", { class: `dot s${k}`, cx: sx(x), cy: sy(y), r: 2.5 }));
    }),
  };
  return chart(title, plot, note, series.map((x) => x.name));
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
      const made = lines("", points.map((x, i) => ({ name: names[i], points: x })), "index", { whole: true });
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
      class: `row${is(at === this.cursor, "cursor")}${is(node.leaf !== null && node.leaf === this.chosen, "chosen")}${is(folds, "node")}`,
      id: `row${at}`, role: "treeitem", "data-at": at, "aria-level": node.depth + 1,
      "aria-expanded": folds ? String(node.open) : null, "aria-selected": String(node.leaf !== null && node.leaf === this.chosen),
    }, h("span", { class: "twist", "aria-hidden": "true" }, folds ? (node.open ? "▾" : "▸") : ""),
    h("span", { class: "part", title: node.label }, node.label), h("span", { class: "what" }, node.what), h("span", { class: "size" }, node.size));
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

// The tree that the page has: a leaf is its number, a node its name, text, bytes and what is below.
function nodes({ rows, tree }) {
  const whole = rows.reduce((sum, row) => sum + row[2], 0) || 1;
  const sized = (nbytes) => ({ bytes: nbytes, size: size(nbytes), share: nbytes / whole });
  const grow = (x) => (typeof x === "number"
    ? { label: rows[x][0].slice(rows[x][0].lastIndexOf(".") + 1), what: rows[x][1], ...sized(rows[x][2]), leaf: x, below: [] }
    : { label: x[0], what: x[1], ...sized(x[2]), leaf: null, below: x[3].map(grow) });
  return tree.map(grow);
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
  return out;
}

function bar(label, text, share, to = null) {
  const name = to === null ? label : h("a", { href: link({ ...state(), n: to }) }, label);
  const made = h("li", {}, h("span", { class: "part", title: label }, name), h("span", { class: "track" }, h("i")), h("span", { class: "size" }, text));
  made.style.setProperty("--share", share);
  return made;
}

function spectra(found, names) {
  if (!found?.spectra?.length) return null;
  const series = found.spectra.map((x, i) => ({ name: names[i], points: x.values.map((y, k) => [x.at[k] + 1, y]) }));
  const [one] = found.spectra;
  const note = `${one.count}, the largest ${short(one.largest)}, effective rank ${short(one.effective, 3)}`;
  return lines("Singular values", series, "number", { zero: true, whole: true, note });
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

// ---- A run.

function stepTable({ steps, table }) {
  const chosen = new Set(), compare = h("button", { disabled: "", onclick: () => go({ at: [...chosen].sort((a, b) => a - b).join(",") }) }, "Compare the two that are ticked");
  const tick = (step) => (event) => {
    if (event.target.checked) chosen.add(step); else chosen.delete(step);
    compare.disabled = chosen.size !== 2;
  };
  const [columns, rows] = table;
  // The first cell has the step; it leads there, and is ticked.
  const first = ([step, is], text) => (!is || answers ? text : h("label", {},
    h("input", { type: "checkbox", "aria-label": `Compare step ${step}`, onchange: tick(step) }), " ", h("a", { href: link({ at: step }) }, text)));
  const body = rows.map((cells, i) => h("tr", {}, cells.map(([text, style], k) => h("td", { class: style }, k ? text : first(steps[i], text)))));
  const made = h("table", {}, h("thead", {}, h("tr", {}, columns.map(([title, , style]) => h("th", { scope: "col", class: style }, title)))), h("tbody", {}, body));
  return figure("Steps", answers ? null : compare, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Steps" }, made));
}

function runOverview(page) {
  const curves = Object.entries(page.curves).slice(0, 40).map(([name, points]) =>
    lines(name, [{ name, points }], "step", { whole: true, note: points.length ? `last ${short(points.at(-1)[1], 5)}` : "" }));
  return [h("div", { class: "curves" }, curves.filter(Boolean)), stepTable(page), facts(page.facts)];
}

class View {
  constructor() {
    this.norms = new Map();
    this.asked = 0;
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
      const { n, ...rest } = state();
      if (this.search.value && (typing || n === undefined)) { this.search.value = ""; this.list(); }
      else if (n !== undefined) go(rest);
      else if (rest.at) go({});
      this.tree.list.focus({ preventScroll: true });
    });
  }

  async show() {
    const { at = "", n } = state(), mine = ++this.asked;
    if (!this.page || at !== this.at) {
      const page = await ask("page", at ? { at } : {});
      if (mine !== this.asked) return;
      this.at = at; this.page = page;
      if (page.error) { this.title.textContent = "eqx_ckpt"; this.detail.replaceChildren(h("p", { class: "bad" }, page.error)); return; }
      const tell = () => { if (this.page === page) { this.list(true); if (!("n" in state())) this.put(this.overview()); } };
      this.norms = new Map();
      this.changes = page.kind === "pair" ? new Changes(page, at ? { at } : {}, tell) : null;
      this.head(); this.list();
    }
    document.body.classList.toggle("has-leaf", n !== undefined);
    if (n === undefined) { this.tree.reveal(null); this.put(this.overview()); return; }
    this.tree.reveal(Number(n));
    await this.leaf(Number(n), () => mine === this.asked);
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
    if (this.at) this.title.prepend(h("a", { href: "#" }, "‹ run"), "  ");
    this.quiet.textContent = page.quiet;
  }

  list(stays = false) {
    const { cursor } = this.tree, { scrollTop } = this.tree.list;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.page.rows;
    const is = ([name, what]) => words.every((word) => `${name} ${what}`.toLowerCase().includes(word));
    this.found.textContent = words.length ? `${rows.filter(is).length.toLocaleString("en")} of ${count(rows.length, "leaf", "leaves")}` : "";
    this.tree.set(words.length ? flat(rows, Math.max(...rows.map((x) => x[2]), 1), is) : this.nodes());
    if (stays) { this.tree.list.scrollTop = scrollTop; this.tree.move(cursor); }
  }

  nodes() { return this.page.kind === "pair" ? this.changes.nodes() : nodes(this.page); }

  overview() {
    if (this.page.kind === "run") return runOverview(this.page);
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
      const found = lines("Norm over steps", [...this.norms.values()].reverse(), "step", { whole: true, note: `${points.length} of ${count(wanted.length, "step")}` });
      const forget = h("button", { onclick: () => { this.norms = new Map([[n, this.norms.get(n)]]); draw(); } }, "This leaf alone");
      put(3, [found, this.norms.size > 1 && !answers ? h("p", {}, forget) : null].filter(Boolean));
    };
    for (const step of wanted.slice(points.length)) {
      const found = await ask("norm", { name: this.page.rows[n][0], step });
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
    const query = { ...(this.at ? { at: this.at } : {}), n };
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

new View().show();
