// Curves of one or several runs over steps, minutes or tokens.

import { choice, el, runColor, svg } from "./dom.js";
import { duration, linear, nearest, percent, short, smoothed, ticks } from "./scales.js";

// Name: what it is, its unit. Those that come first are first on the page.
const KNOWN = {
  "reward/mean": ["Mean reward", "reward"],
  "reward/accuracy": ["Correct completions", "share"],
  "reward/std": ["Spread of the rewards", "standard deviation"],
  "reward/abstained": ["Completions that no reward scored", "completions"],
  "reward/flat_groups": ["Flat groups: all rewards equal", "share of prompts"],
  loss: ["Loss", "nats"],
  perplexity: ["Perplexity of held-out answers", ""],
  token_accuracy: ["Tokens of held-out answers predicted", "share"],
  "policy/entropy": ["Entropy", "nats a token"],
  "policy/kl": ["KL to the reference", "nats a token"],
  "policy/approx_kl": ["KL of one update", "nats a token"],
  "policy/ratio_mean": ["Ratio new to old, mean", "ratio"],
  "policy/ratio_max": ["Ratio new to old, largest", "ratio"],
  "policy/clip_fraction": ["Clipped tokens", "share"],
  "policy/grad_norm": ["Gradient before clipping", "norm"],
  "policy/learning_rate": ["Learning rate", ""],
  "policy/skipped_steps": ["Optimizer steps left out", "steps so far"],
  "mismatch/mean": ["Generator against trainer, mean", "nats a token"],
  "mismatch/max": ["Generator against trainer, largest", "nats"],
  "mismatch/weight_mean": ["Importance weight, mean", "weight"],
  "mismatch/weight_capped": ["Importance weights at their cap", "share of tokens"],
  "mismatch/left_out": ["Tokens that corrections leave out", "share of tokens"],
  "mismatch/effective_size": ["Effective sample size under corrections", "share of tokens"],
  "mismatch/kl": ["Generator against trainer, KL", "nats a token"],
  "completion/length_mean": ["Completion length, mean", "tokens"],
  "completion/length_max": ["Completion length, longest", "tokens"],
  "completion/sampled": ["Tokens that were sampled, trained or not", "tokens"],
  "completion/truncated": ["Completions cut off", "share"],
  "sessions/prompt_tokens": ["Prompt tokens of the sessions", "tokens"],
  "sessions/prompt_tokens_reused": ["Prompt tokens that were not computed again", "tokens"],
  "sessions/prompt_tokens_evicted": ["Tokens forgotten for want of memory", "tokens"],
  "sessions/waited": ["Sessions that waited for memory", "sessions"],
  "sessions/wait_s_mean": ["Wait for memory, mean", "s"],
  "sessions/wait_s_max": ["Wait for memory, longest", "s"],
  "value/loss": ["Loss of the critic", ""],
  "value/explained_variance": ["Variance that the critic explains", "share"],
  tokens: ["Tokens of a step", "tokens"],
};
const SECTIONS = [
  ["reward", "Reward"], ["policy", "Policy"], ["mismatch", "Mismatch of generator and trainer"],
  ["completion", "Completions"], ["value", "Critic"], ["tokens_per_s", "Speed"], ["time", "Time"],
];
const AXES = { step: "step", minutes: "minutes since the start", tokens: "tokens so far" };
const MANY_STEPS = 400; // from here on curves begin smoothed, with the steps themselves pale behind
const WIDTH = 310, HEIGHT = 176, LEFT = 42, RIGHT = 10, TOP = 8, BOTTOM = 34;

/** The view of curves. `app` has the runs, the source, and `go(address)`. */
export class CurvesView {
  constructor(app) {
    this.app = app;
    this.axis = "step";
    this.smoothing = null; // until the curves tell whether they are long
    this.filter = "";
    this.data = [];
    this.charts = [];
    this.body = el("div", { class: "sections" });
    const search = el("input", { type: "search", placeholder: "metric", oninput: () => { this.filter = search.value; this.draw(); } });
    const smooth = this.slider = el("input", { type: "range", min: 0, max: 95, step: 5, value: 0, oninput: () => {
      this.smoothing = Number(smooth.value) / 100;
      this.draw();
    } });
    this.root = el("section", { "aria-label": "Curves" },
      el("div", { class: "bar" },
        choice("over", Object.entries(AXES), this.axis, (axis) => { this.axis = axis; this.draw(); }),
        el("label", { class: "choice" }, el("span", {}, "smooth"), smooth),
        el("label", { class: "choice" }, el("span", {}, "find"), search),
        el("span", { class: "hint" }, "← → read a curve, Enter opens the completions of that step")),
      this.body);
  }

  async load() {
    this.data = await Promise.all(this.app.runs.map((_, index) => this.app.source.get(`${index}/curves`)));
    if (this.smoothing === null) {
      this.smoothing = this.data.some((one) => one.steps.step.length > MANY_STEPS) ? 0.9 : 0;
      this.slider.value = 100 * this.smoothing;
    }
    this.draw();
  }

  refresh() { return this.load(); }

  draw() {
    const shown = this.app.shown();
    const names = new Set(shown.flatMap((index) => Object.keys(this.data[index].steps.series)));
    for (const index of shown) for (const name of Object.keys(this.data[index].held_out)) names.add(name);
    const wanted = [...names].filter((name) => `${name} ${KNOWN[name]?.[0] ?? ""}`.toLowerCase().includes(this.filter.toLowerCase()));
    const constant = wanted.filter((name) => this.isConstant(name, shown));
    const focused = document.activeElement?.dataset?.metric;
    this.charts = [];
    this.body.replaceChildren();
    for (const [prefix, title] of [...SECTIONS, ...this.others(wanted)]) {
      const own = ordered(wanted.filter((name) => sectionOf(name) === prefix && !constant.includes(name)));
      if (!own.length) continue;
      const made = own.map((name) => new Chart(this, name, shown));
      this.charts.push(...made);
      this.body.append(el("h2", {}, title), el("div", { class: "charts" }, made.map((chart) => chart.root)));
    }
    if (constant.length) this.body.append(el("h2", {}, "Constant"), this.constants(ordered(constant), shown));
    if (!wanted.length) this.body.append(el("p", { class: "quiet" }, this.filter ? "No metric has this name." : "No step has ended yet."));
    if (focused) this.charts.find((chart) => chart.name === focused)?.plot.focus();
  }

  others(names) {
    const known = new Set(SECTIONS.map(([prefix]) => prefix));
    const found = new Set(names.map(sectionOf).filter((prefix) => !known.has(prefix)));
    return [...found].sort().map((prefix) => [prefix, prefix]);
  }

  isConstant(name, shown) {
    const values = new Set(shown.flatMap((index) => this.data[index].steps.series[name] ?? []).filter((value) => value !== null));
    const evaluated = shown.some((index) => name in this.data[index].held_out);
    return values.size <= 1 && !evaluated && shown.some((index) => this.data[index].steps.step.length > 1);
  }

  constants(names, shown) {
    const rows = names.map((name) => {
      const value = shown.flatMap((index) => this.data[index].steps.series[name] ?? []).find((one) => one !== null);
      return el("tr", {}, el("td", {}, KNOWN[name]?.[0] ?? name), el("td", { class: "number" }, short(value)), el("td", { class: "quiet" }, el("code", {}, name)));
    });
    return el("table", { class: "constants" }, el("tbody", {}, rows));
  }

  /** Move the cursor of all charts to `x`. */
  point(x) { for (const chart of this.charts) chart.point(x); }
}

const sectionOf = (name) => ({ loss: "policy", perplexity: "policy", token_accuracy: "policy", tokens: "completion" })[name] ?? name.split("/")[0];

function ordered(names) {
  const places = Object.keys(KNOWN);
  const place = (name) => (places.includes(name) ? places.indexOf(name) : places.length);
  return names.sort((one, other) => place(one) - place(other) || one.localeCompare(other));
}

function meaning(name) {
  if (KNOWN[name]) return KNOWN[name];
  const [prefix, ...rest] = name.split("/"), stage = rest.join("/").replaceAll("_", " ");
  if (prefix === "time") return [stage === "step" ? "Whole step" : `Stage: ${stage}`, "seconds"];
  if (prefix === "tokens_per_s") return [stage === "step" ? "Whole step" : `Stage: ${stage}`, "tokens a second"];
  return [name, ""];
}

class Chart {
  constructor(view, name, shown) {
    this.view = view;
    this.name = name;
    const [title, unit] = meaning(name);
    this.unit = unit;
    this.lines = shown.map((index) => this.line(index)).filter((line) => line !== null);
    this.plot = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", tabindex: 0, role: "img", "data-metric": name,
      "aria-label": `${title}, ${unit}: ${this.lines.map((line) => `${line.label} ${short(line.last ?? line.held.at(-1)?.[1])}`).join("; ")}`,
      onpointermove: (event) => view.point(this.at(event)),
      onpointerleave: () => view.point(null),
      onclick: (event) => this.open(this.at(event)),
      onkeydown: (event) => this.key(event),
      onblur: () => view.point(null),
    });
    this.readout = el("div", { class: "readout" });
    this.draw();
    this.root = el("figure", { class: "chart" },
      el("figcaption", {}, el("span", { class: "title" }, title), el("span", { class: "unit" }, unit, " ", el("code", {}, name === title ? "" : name))),
      this.plot, this.readout);
    this.point(null);
  }

  line(index) {
    const { steps, evaluations, held_out } = this.view.data[index], run = this.view.app.runs[index];
    const raw = steps.series[this.name] ?? steps.step.map(() => null);
    const held = evaluations.series[held_out[this.name]] ?? [];
    if (!held.length && !raw.some((value) => value !== null)) return null;
    const x = steps[this.view.axis], values = smoothed(raw, this.view.smoothing);
    const heldX = this.view.axis === "tokens" ? evaluations.step.map((step) => tokensAt(steps, step)) : evaluations[this.view.axis];
    return {
      index, label: run.name, x, raw, values, step: steps.step,
      held: held.map((value, place) => [heldX[place], value]).filter(([, value]) => value !== null),
      last: raw.findLast((value) => value !== null) ?? null,
    };
  }

  draw() {
    const xs = this.lines.flatMap((line) => [line.x[0], line.x.at(-1), ...line.held.map(([x]) => x)]).filter((x) => x !== undefined);
    const [low, high] = this.range();
    this.x = linear(Math.min(...xs), Math.max(...xs), LEFT, WIDTH - RIGHT);
    this.y = linear(low, high, HEIGHT - BOTTOM, TOP);
    this.plot.append(...this.grid(low, high));
    for (const line of this.lines) {
      if (this.view.smoothing) this.plot.append(this.path(line, line.raw, "raw"));
      this.plot.append(this.path(line, line.values, "line"));
      for (const [x, y] of line.held) {
        this.plot.append(svg("circle", { cx: this.x(x), cy: this.y(y), r: 3.2, class: "held", stroke: runColor(line.index) }));
      }
    }
    this.cursor = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" });
    this.plot.append(this.cursor);
  }

  range() {
    const found = this.lines.flatMap((line) => [...line.values, ...(this.view.smoothing ? [] : line.raw), ...line.held.map(([, value]) => value)]);
    const values = found.filter((value) => value !== null);
    let low = values.reduce((one, other) => Math.min(one, other), Infinity);
    let high = values.reduce((one, other) => Math.max(one, other), -Infinity);
    if (low > 0 && low < 0.4 * high) low = 0;
    if (high <= low) [low, high] = [low - (Math.abs(low) / 10 || 0.5), high + (Math.abs(high) / 10 || 0.5)];
    const room = (high - low) * 0.06;
    return [low === 0 ? 0 : low - room, high + room];
  }

  grid(low, high) {
    const made = [];
    for (const value of ticks(low, high, 4)) {
      const y = this.y(value);
      made.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }),
        svg("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, short(value)));
    }
    const from = this.x.back(LEFT), until = this.x.back(WIDTH - RIGHT);
    for (const value of ticks(from, until, 5, this.view.axis === "step")) {
      made.push(svg("line", { x1: this.x(value), x2: this.x(value), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4, class: "tick" }),
        svg("text", { x: this.x(value), y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, short(value)));
    }
    made.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }),
      svg("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle", class: "label" }, AXES[this.view.axis]));
    return made;
  }

  /** The path of a line. Of points that share a pixel column only the lowest and the highest are drawn. */
  path(line, values, kind) {
    const points = [];
    let column = null, low = null, high = null;
    const flush = () => {
      if (low) points.push(...(low === high ? [low] : low.place < high.place ? [low, high] : [high, low]));
    };
    values.forEach((value, place) => {
      if (value === null) return;
      const y = Math.min(HEIGHT - BOTTOM, Math.max(TOP, this.y(value))); // steps may leave the range of their means
      const point = { x: this.x(line.x[place]), y, place };
      if (Math.floor(point.x * 2) !== column) {
        flush();
        [column, low, high] = [Math.floor(point.x * 2), point, point];
      } else {
        if (point.y < low.y) low = point;
        if (point.y > high.y) high = point;
      }
    });
    flush();
    if (points.length === 1) return svg("circle", { cx: points[0].x, cy: points[0].y, r: 2.5, class: "dot", fill: runColor(line.index) });
    const d = points.map((point, place) => `${place ? "L" : "M"}${point.x.toFixed(1)} ${point.y.toFixed(1)}`).join("");
    return svg("path", { d, class: kind, stroke: runColor(line.index) });
  }

  at(event) {
    const box = this.plot.getBoundingClientRect();
    return this.x.back(((event.clientX - box.left) / box.width) * WIDTH);
  }

  key(event) {
    const line = this.lines.find((one) => one.x.length);
    if (!line) return;
    if (event.key === "Enter") return this.open(this.place === null ? line.x.at(-1) : this.place);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move) return;
    event.preventDefault();
    const now = this.place === null ? line.x.length - (move < 0 ? 0 : 1) : nearest(line.x, this.place);
    this.view.point(line.x[Math.min(line.x.length - 1, Math.max(0, now + move))]);
  }

  open(x) {
    const line = this.lines.find((one) => one.x.length);
    if (line) this.view.app.go(`completions/${line.index}/${line.step[nearest(line.x, x)]}`);
  }

  point(x) {
    this.place = x;
    const show = x !== null && this.lines.some((line) => line.x.length);
    this.cursor.setAttribute("visibility", show ? "visible" : "hidden");
    if (show) {
      const at = Math.min(WIDTH - RIGHT, Math.max(LEFT, this.x(x)));
      this.cursor.setAttribute("x1", at);
      this.cursor.setAttribute("x2", at);
    }
    this.readout.replaceChildren(...this.lines.map((line) => this.reading(line, show ? x : null)));
  }

  reading(line, x) {
    const place = x === null || !line.x.length ? -1 : nearest(line.x, x);
    const value = place < 0 ? line.last : line.raw[place];
    const mean = this.view.smoothing && place >= 0 ? line.values[place] : null;
    const held = place < 0 ? line.held.at(-1)?.[1] : line.held.find(([at]) => at === line.x[place])?.[1];
    const where = place < 0 ? "" : this.view.axis === "minutes" ? ` at ${duration(line.x[place] * 60000)}` : ` at ${this.view.axis} ${short(line.x[place])}`;
    const write = this.unit.startsWith("share") ? percent : short;
    const own = value === null && held !== undefined ? "" : el("b", {}, write(value));
    return el("span", {}, swatch(line.index), this.lines.length > 1 ? `${line.label} ` : "", own, where,
      mean === null ? "" : el("span", { class: "quiet" }, ` smoothed ${write(mean)}`),
      held === undefined ? "" : el("span", { class: "quiet" }, ` ○ held-out ${write(held)}`));
  }
}

function swatch(index) {
  const made = el("i", { class: "swatch" });
  made.style.background = runColor(index);
  return made;
}

function tokensAt(steps, step) {
  if (!steps.step.length || step < steps.step[0]) return 0;
  return steps.tokens[nearest(steps.step, step)];
}
