// The report: curves of every run, drawn from the data in the page. No library, no network.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const AXES = { epoch: "epoch", samples: "samples", updates: "updates", seconds: "seconds" };
const BOX = { width: 520, height: 340, left: 72, right: 14, top: 12, bottom: 46 };

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  Object.assign(node, attributes);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

// ------------------------------------------------------------------ what is chosen

const state = { model: data.first, metric: "train_loss", axis: "epoch", show: "value", scale: "auto", seeds: "mean" };
// What is unticked, by name; of the optimizers, which each model numbers for itself, at first all but the paper's.
const unticked = data.models.map(({ series, ticked }) => new Set([...series.keys()].filter((i) => i >= ticked).map(String)));
const off = { rate: new Set(), size: new Set(), get series() { return unticked[state.model]; } };

const ofModel = () => data.runs.filter((run) => run.model === state.model);
const sizeOf = (run) => (run.ramp ? `ramp ${run.ramp}` : String(run.size));
const unique = (values) => [...new Set(values)];
const rates = () => unique(ofModel().map((run) => run.rate)).sort((a, b) => a - b);
const rateText = (rate) => (rate < 0.01 ? rate.toExponential() : String(rate));
const labels = () => data.models[state.model].series;
const colours = new Map(data.colours);
const colour = (rate) => `color-mix(in srgb, ${colours.get(rate)}, white var(--lighter))`; // lighter on a dark page

function sizes() {
  const order = (run) => (run.ramp ? Infinity : run.size);
  return unique(ofModel().sort((a, b) => order(a) - order(b)).map(sizeOf));
}

function weight(size) {
  const constant = sizes().filter((name) => !name.startsWith("ramp"));
  const place = constant.indexOf(size) / Math.max(1, constant.length - 1);
  return size.startsWith("ramp")
    ? { opacity: 1, width: 1.8, dash: "6 4" }
    : { opacity: 0.3 + 0.7 * place, width: 5 - 3.4 * place, dash: "none" };
}

// ------------------------------------------------------------------ from runs to curves

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function column(run, name) {
  return name === "updates" ? run.samples.map((n) => n / run.size) : run[name];
}

function curves(series) {
  // One curve for each learning rate and batch size (and seed, if asked): mean over the seeds, at the epochs all have.
  const groups = new Map();
  for (const run of ofModel()) {
    const size = sizeOf(run);
    if (run.series !== series || off.rate.has(String(run.rate)) || off.size.has(size)) continue;
    if (run.ramp && state.axis === "updates") continue; // their updates are not counted in the file
    const key = [run.rate, size, state.seeds === "mean" ? "" : run.seed].join("|");
    if (!groups.has(key)) groups.set(key, { rate: run.rate, size, order: run.ramp ? Infinity : run.size, runs: [] });
    groups.get(key).runs.push(run);
  }
  const found = [];
  for (const { rate, size, order, runs } of groups.values()) {
    const points = [];
    runs[0].epoch.forEach((epoch) => {
      const places = runs.map((run) => run.epoch.indexOf(epoch));
      if (places.includes(-1)) return;
      const take = (name) => runs.map((run, i) => column(run, name)[places[i]]);
      const [x, y] = [take(state.axis), take(state.metric)];
      const whole = ![...x, ...y].includes(null);
      points.push({ epoch, x: whole ? mean(x) : null, y: whole ? mean(y) : null });
    });
    const seed = state.seeds === "mean" ? "" : `, seed ${runs[0].seed}`;
    const name = size.startsWith("ramp") ? size : `B = ${size}`;
    found.push({ rate, size, order, seed: runs[0].seed, label: name + seed, points, diverged: runs.some((r) => r.diverged !== null) });
  }
  found.sort((a, b) => a.rate - b.rate || a.order - b.order || a.seed - b.seed);
  return state.show === "difference" ? found.map((curve) => difference(curve, found)) : found;
}

function difference(curve, all) {
  const same = all.filter((other) => other.rate === curve.rate && (state.seeds === "mean" || other.seed === curve.seed));
  const base = new Map(same[0].points.map((point) => [point.epoch, point.y]));
  const points = curve.points.map((point) => {
    const below = base.get(point.epoch);
    return { ...point, y: point.y === null || !below ? null : 100 * (point.y / below - 1) };
  });
  return { ...curve, points };
}

// ------------------------------------------------------------------ scales

function format(value) {
  if (value === null) return "no number";
  if (state.show === "difference") return `${value > 0 ? "+" : ""}${value.toFixed(3)} %`;
  return value === 0 ? "0" : String(Number(value.toPrecision(5)));
}

function linearTicks(low, high, count = 5) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks.length < 3 ? linearTicks(low, high, 2 * count) : ticks;
}

function logTicks(low, high) {
  // The coarsest that give four ticks; less than a factor of four is divided evenly, as a linear axis is.
  for (const parts of [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      ticks.push(...parts.map((m) => Number((m * 10 ** power).toPrecision(6))).filter((tick) => tick >= low && tick <= high));
    }
    if (ticks.length > 3) return ticks;
  }
  return linearTicks(low, high);
}

function scale(values, log, from, to) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const map = log ? Math.log : (value) => value;
  const [range, size] = [map(high) - map(low), log ? 1 : Math.abs(high) || 1];
  const pad = 0.04 * (range > 1e-9 * size ? range : size); // what is closer differs by rounding, and has no ticks between
  [low, high] = log ? [low * Math.exp(-pad), high * Math.exp(pad)] : [low - pad, high + pad];
  const at = (value) => from + ((map(value) - map(low)) / (map(high) - map(low))) * (to - from);
  return { at, ticks: log ? logTicks(low, high) : linearTicks(low, high) };
}

// ------------------------------------------------------------------ drawing

let panels = []; // { series, curves, x, y, node, marker }

function draw() {
  const visible = [...labels().keys()].filter((series) => !off.series.has(String(series)));
  const all = visible.map((series) => ({ series, curves: curves(series) }));
  const points = all.flatMap((panel) => panel.curves.flatMap((curve) => curve.points)).filter((p) => p.x !== null && p.y !== null);
  const wanted = state.scale === "auto" ? state.metric.endsWith("loss") : state.scale === "log";
  const log = wanted && state.show === "value" && points.every((point) => point.y > 0);
  const holder = $("panels");
  holder.replaceChildren();
  hide();
  panels = [];
  if (!points.length) {
    holder.append(element("p", { textContent: "Nothing to draw: tick a learning rate, a batch size and an optimizer that have this metric." }));
    return;
  }
  const x = scale(points.map((p) => p.x), false, BOX.left, BOX.width - BOX.right);
  const y = scale(points.map((p) => p.y), log, BOX.height - BOX.bottom, BOX.top);
  for (const panel of all) holder.append(drawPanel(panel, x, y));
}

function drawPanel(panel, x, y) {
  const title = labels()[panel.series];
  const what = state.show === "value" ? data.metrics[state.metric] : `${data.metrics[state.metric]}, % from the smallest B`;
  const node = svg("svg", {
    viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "application", tabindex: 0,
    "aria-label": `${title}: ${what} over ${AXES[state.axis]}, ${panel.curves.length} curves. Arrow keys read the values.`,
  });
  for (const tick of y.ticks) {
    node.append(svg("line", { class: "rule", x1: BOX.left, x2: BOX.width - BOX.right, y1: y.at(tick), y2: y.at(tick) }));
    node.append(svg("text", { x: BOX.left - 7, y: y.at(tick) + 5, "text-anchor": "end" }, String(tick)));
  }
  for (const tick of x.ticks) {
    if (state.axis === "epoch" && tick % 1) continue;
    node.append(svg("line", { class: "rule", x1: x.at(tick), x2: x.at(tick), y1: BOX.top, y2: BOX.height - BOX.bottom }));
    node.append(svg("text", { x: x.at(tick), y: BOX.height - BOX.bottom + 19, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  node.append(svg("text", { x: (BOX.left + BOX.width) / 2, y: BOX.height - 5, "text-anchor": "middle" }, AXES[state.axis]));
  const middle = (BOX.height - BOX.bottom + BOX.top) / 2;
  node.append(svg("text", { x: 13, y: middle, transform: `rotate(-90 13 ${middle})`, "text-anchor": "middle" }, what));
  for (const curve of panel.curves) {
    const look = weight(curve.size);
    const points = curve.points.filter((p) => p.x !== null && p.y !== null);
    const style = { stroke: colour(curve.rate), "stroke-opacity": look.opacity };
    const d = points.map((p, i) => `${i ? "L" : "M"}${x.at(p.x).toFixed(2)} ${y.at(p.y).toFixed(2)}`).join("");
    const path = svg("path", { ...style, d, "stroke-width": look.width, "stroke-dasharray": look.dash });
    path.dataset.rate = curve.rate;
    path.dataset.size = curve.size;
    node.append(path);
    const last = points[points.length - 1];
    if (points.length === 1) node.append(svg("circle", { cx: x.at(last.x), cy: y.at(last.y), r: 4, fill: style.stroke }));
    if (last && curve.diverged) {
      const [u, v] = [x.at(last.x), y.at(last.y)];
      node.append(svg("path", { ...style, class: "diverged", "stroke-width": 3, d: `M${u - 5} ${v - 5}l10 10m0 -10l-10 10` }));
    }
  }
  const marker = svg("circle", { class: "chosen", r: 5, visibility: "hidden" });
  node.append(marker);
  const entry = { ...panel, x, y, node, marker };
  panels.push(entry);
  node.addEventListener("pointermove", (event) => hover(entry, event));
  node.addEventListener("pointerleave", hide);
  node.addEventListener("keydown", (event) => step(entry, event));
  node.addEventListener("blur", hide);
  return element("figure", {}, element("figcaption", { textContent: title }), node);
}

// ------------------------------------------------------------------ reading values

let chosen = null; // { panel, curve, point }

function hover(panel, event) {
  const box = panel.node.getBoundingClientRect();
  const [u, v] = [((event.clientX - box.left) / box.width) * BOX.width, ((event.clientY - box.top) / box.height) * BOX.height];
  let nearest = null;
  for (const curve of panel.curves) {
    for (const point of curve.points) {
      if (point.x === null || point.y === null) continue;
      const distance = Math.hypot(panel.x.at(point.x) - u, panel.y.at(point.y) - v);
      if (!nearest || distance <= nearest.distance) nearest = { panel, curve, point, distance };
    }
  }
  if (nearest) read(nearest, event.clientX, event.clientY);
}

function step(panel, event) {
  const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  if (event.key === "Escape") return hide();
  if (!(event.key in moves)) return undefined;
  event.preventDefault();
  const drawn = panel.curves
    .map((curve) => ({ curve, points: curve.points.filter((p) => p.x !== null && p.y !== null) }))
    .filter(({ points }) => points.length);
  if (!drawn.length) return undefined;
  const [along, across] = moves[event.key];
  const here = chosen && chosen.panel === panel;
  const i = here ? drawn.findIndex(({ curve }) => curve === chosen.curve) : 0;
  const row = drawn[Math.min(Math.max(i + (here ? across : 0), 0), drawn.length - 1)];
  const j = here ? row.points.findIndex((p) => p.epoch >= chosen.point.epoch) : 0;
  const place = (j < 0 ? row.points.length - 1 : j) + (here ? along : 0);
  const point = row.points[Math.min(Math.max(place, 0), row.points.length - 1)];
  const box = panel.node.getBoundingClientRect();
  const zoom = box.width / BOX.width;
  read({ panel, curve: row.curve, point }, box.left + zoom * panel.x.at(point.x), box.top + zoom * panel.y.at(point.y));
  return undefined;
}

function read(next, left, top) {
  hide();
  chosen = next;
  const { panel, curve, point } = next;
  const attributes = { cx: panel.x.at(point.x), cy: panel.y.at(point.y), fill: colour(curve.rate), visibility: "visible" };
  for (const [key, value] of Object.entries(attributes)) panel.marker.setAttribute(key, value);
  const head = `η₀ = ${rateText(curve.rate)}, epoch ${point.epoch}`;
  // All batch sizes at this learning rate and epoch: what the comparison is about.
  const rows = panel.curves
    .filter((other) => other.rate === curve.rate)
    .map((other) => {
      const there = other.points.find((p) => p.epoch === point.epoch);
      const cells = [other.label, there ? format(there.y) : "not run"].map((textContent) => element("td", { textContent }));
      return element("tr", { className: other === curve ? "this" : "" }, ...cells);
    });
  const tip = $("tip");
  tip.replaceChildren(element("div", { textContent: head }), element("table", {}, element("tbody", {}, ...rows)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${left + 18 + width > innerWidth ? Math.max(4, left - 18 - width) : left + 18}px`;
  tip.style.top = `${Math.min(Math.max(4, top - height / 2), innerHeight - height - 4)}px`;
  $("spoken").textContent = `${labels()[panel.series]}, ${head}, ${curve.label}: ${format(point.y)}`;
}

function hide() {
  if (chosen) chosen.panel.marker.setAttribute("visibility", "hidden");
  chosen = null;
  $("tip").hidden = true;
}

// ------------------------------------------------------------------ controls

function options(select, entries, key) {
  select.replaceChildren(...entries.map(([value, textContent]) => element("option", { value, textContent })));
  select.value = state[key];
  select.onchange = () => {
    state[key] = key === "model" ? Number(select.value) : select.value;
    if (key === "model") boxes();
    draw();
  };
}

function ticks(fieldset, entries, kind, swatch) {
  const labels = entries.map(([value, text]) => {
    const box = element("input", { type: "checkbox", value, checked: !off[kind].has(String(value)) });
    box.onchange = () => {
      off[kind][box.checked ? "delete" : "add"](String(value));
      draw();
    };
    const label = element("label", {}, box);
    if (swatch) {
      const mark = element("span", { className: "swatch" });
      Object.assign(mark.style, swatch(value));
      label.append(mark);
    }
    label.append(text);
    return label;
  });
  fieldset.replaceChildren(fieldset.querySelector("legend"), ...labels);
}

function boxes() {
  ticks($("rates"), rates().map((rate) => [rate, rateText(rate)]), "rate", (rate) => ({ background: colour(rate), height: "4px" }));
  ticks($("sizes"), sizes().map((size) => [size, size]), "size", (size) => {
    const look = weight(size);
    return { borderTop: `${look.width}px ${look.dash === "none" ? "solid" : "dashed"} currentColor`, opacity: look.opacity };
  });
  ticks($("series"), labels().map((label, i) => [i, label]), "series");
}

for (const button of document.querySelectorAll("button[data-rate]")) {
  button.onclick = () => {
    state.model = Number(button.dataset.model);
    $("model").value = state.model;
    off.rate = new Set(rates().map(String).filter((rate) => Number(rate) !== Number(button.dataset.rate)));
    off.series.delete(button.dataset.series);
    boxes();
    draw();
    $("panels").scrollIntoView();
  };
}

$("theme").onclick = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};

const has = (name) => data.runs.some((run) => run[name].some((value) => value !== null));
options($("model"), data.models.map(({ name }, i) => [i, name]), "model");
options($("metric"), Object.entries(data.metrics).filter(([name]) => has(name)), "metric");
options($("axis"), Object.entries(AXES).filter(([name]) => name === "updates" || has(name)), "axis");
options($("show"), [["value", "the value"], ["difference", "difference from the smallest B"]], "show");
options($("scale"), [["auto", "as fits"], ["log", "logarithmic"], ["linear", "linear"]], "scale");
options($("seeds"), [["mean", "mean over seeds"], ["each", "each seed"]], "seeds");
boxes();
draw();
