// The timeline: what the controller and each worker did in some steps, and who waited for whom.

import { choice, el, inUse, visible } from "./dom.js";
import { duration, linear, ticks } from "./scales.js";
import { isWorker, ownerOf, waitOf, waits } from "./waits.js";

const ROW = 22, HEAD = 42, NAMES = 168, NARROW = 560, SHORT_NAMES = 86;
const KINDS = { generate: 0, draw: 0, update: 1, logprobs: 2, values: 6, advantages: 4, score: 3, publish: 5, construct: 7 };
const SPANS = [["1", "1 step"], ["3", "3 steps"], ["10", "10 steps"]];

/** The color of what is called `name`: the same on every track and in every run. */
function kindOf(name) {
  const plain = name.replace(/^submit (?:.*\.)?/, "");
  const kind = [plain, plain.split("_")[0]].find((one) => one in KINDS);
  if (kind) return KINDS[kind];
  let sum = 0;
  for (const character of plain) sum = (sum * 31 + character.codePointAt(0)) % 9973;
  return sum % 8;
}

export class TimelineView {
  constructor(app) {
    this.app = app;
    this.run = 0;
    this.trace = -1;
    this.span = 3;
    this.names = NAMES;
    this.bar = el("div", { class: "bar" });
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline. Plus and minus zoom, left and right move, 0 shows all, n and p follow the next call and the one before, Tab leaves." });
    this.tip = el("div", { class: "facts tokenfacts", "aria-live": "polite" });
    this.table = el("div", { class: "waits" });
    this.root = el("section", { "aria-label": "Timeline" }, this.bar, el("div", { class: "canvasbox" }, this.canvas), this.tip, this.table);
    this.listen();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaY) > Math.abs(event.deltaX) && !event.altKey) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) / canvas.clientWidth);
      else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { this.dragged = event.offsetX; this.far = 0; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => this.pointed(event));
    canvas.addEventListener("pointerup", (event) => { this.dragged = null; if (this.far < 4) this.choose(this.sliceAt(event)); });
    canvas.addEventListener("pointerleave", () => { this.hovered = null; this.tell(); });
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement ?? canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Open `run/trace/place`: the steps up to place in the trace's list; by default the last whole ones. */
  async load(run, trace, place) {
    this.run = run === undefined ? this.run : Math.min(Number(run) || 0, this.app.runs.length - 1);
    this.index = await this.app.source.get(trace === undefined ? `${this.run}/timeline` : `${this.run}/timeline/${Number(trace)}`);
    this.trace = trace === undefined ? this.index.traces.length - 1 : Number(trace);
    const count = this.index.steps.length, wanted = place === undefined ? Math.max(0, count - 1) : Math.min(count, Number(place) || 0);
    this.last = this.app.source.live ? wanted : this.held(wanted);
    this.first = this.app.source.live ? Math.max(0, this.last - this.span + 1) : this.last;
    const found = await this.app.source.get(`${this.run}/slices/${this.trace}/${this.first}/${this.last}`);
    this.slices = found.slices;
    this.cut = found.cut;
    const ends = found.slices.map((slice) => slice.at + slice.ms);
    this.from = this.first === 0 ? Math.min(...found.slices.map((slice) => slice.at), found.until ?? 0) : found.from;
    this.until = found.until ?? ends.reduce((one, other) => Math.max(one, other), this.from + 1);
    [this.low, this.high] = [this.from, this.until];
    this.chosen = this.hovered = null;
    this.layOut();
    this.drawBar();
    this.tell();
    this.draw();
  }

  /** The place nearest to `wanted` that an exported file holds. */
  held(wanted) {
    const places = this.index.steps.map((_, place) => place).concat(this.index.steps.length);
    const there = places.filter((place) => this.app.source.has(`${this.run}/slices/${this.trace}/${place}/${place}`));
    if (!there.length) throw new Error("This exported file holds no slices of this trace.");
    return there.reduce((best, place) => (Math.abs(place - wanted) < Math.abs(best - wanted) ? place : best));
  }

  async refresh() {
    const before = this.index?.steps.length;
    if (before === undefined) return this.load(this.run);
    const isStill = this.low === this.from && this.high === this.until && !this.chosen && !inUse(this.bar);
    if (isStill && this.last >= before - 1) return this.load(this.run);
    this.index = await this.app.source.get(`${this.run}/timeline/${this.trace}`);
    if (!inUse(this.bar)) this.drawBar();
  }

  layOut() {
    const used = new Set(this.slices.map((slice) => slice.track.join("/"))), roles = new Set(this.slices.map((slice) => slice.track[0]));
    this.rows = this.index.tracks.filter(([pid, tid]) => used.has(`${pid}/${tid}`) || (isWorker([pid, tid]) && roles.has(pid) && tid % 100 === 1));
    this.place = new Map(this.rows.map(([pid, tid], place) => [`${pid}/${tid}`, place]));
    this.marks = this.index.marks.filter((mark) => mark.at >= this.from && mark.at <= this.until);
    this.byRow = this.rows.map(() => []);
    for (const slice of this.slices) this.byRow[this.place.get(slice.track.join("/"))]?.push(slice);
  }

  drawBar() {
    const steps = this.index.steps, name = (place) => (place < steps.length ? String(steps[place][0]) : "after the last");
    const to = (place) => this.app.go(`timeline/${this.run}/${this.trace}/${Math.min(steps.length, Math.max(0, place))}`);
    const slider = el("input", { type: "range", min: 0, max: steps.length, value: this.last, "aria-label": "step", onchange: () => to(Number(slider.value)) });
    const shown = el("output", {}, this.first === this.last ? name(this.last) : `${name(this.first)} – ${name(this.last)}`);
    const hop = this.app.source.live ? 1 : Math.max(1, Math.ceil(steps.length / 9));
    slider.addEventListener("input", () => { shown.textContent = name(Number(slider.value)); });
    const runs = this.app.runs.map((run, index) => [String(index), run.name]);
    const traces = this.index.traces?.map((trace, place) => [String(place), trace]) ?? [];
    this.bar.replaceChildren(
      runs.length > 1 ? choice("run", runs, String(this.run), (run) => this.app.go(`timeline/${run}`)) : "",
      traces.length > 1 ? choice("trace", traces, String(this.trace), (trace) => this.app.go(`timeline/${this.run}/${trace}`)) : "",
      el("span", { class: "stepper" }, el("span", {}, "step"),
        el("button", { onclick: () => to(this.last - hop), disabled: this.last === 0, "aria-label": "earlier" }, "‹"), shown,
        el("button", { onclick: () => to(this.last + hop), disabled: this.last === steps.length, "aria-label": "later" }, "›"), slider),
      this.app.source.live ? choice("at once", SPANS, String(this.span), (span) => { this.span = Number(span); this.load(this.run, this.trace, this.last); }) : "",
      el("span", { class: "stepper" }, ...[["−", 2, "zoom out"], ["+", 0.5, "zoom in"], ["all", 0, "show all"]].map(([text, factor, said]) =>
        el("button", { "aria-label": said, onclick: () => (factor ? this.zoom(factor) : this.all()) }, text))),
      el("span", { class: "hint" }, this.cut ? "Not all slices of these steps are shown: there are too many." : "drag moves, Ctrl + wheel zooms, a click follows a call"));
  }

  // The window

  all() { this.look(this.from, this.until); }
  look(low, high) { [this.low, this.high] = [low, high]; this.draw(); }
  move(share) {
    const by = Math.max(this.from - this.low, Math.min(this.until - this.high, share * (this.high - this.low)));
    this.look(this.low + by, this.high + by);
  }
  zoom(factor, around = (this.low + this.high) / 2) {
    const low = around - (around - this.low) * factor, high = around + (this.high - around) * factor;
    if (high - low > 0.001) this.look(Math.max(this.from, low), Math.min(this.until, high));
  }
  key(event) {
    const width = this.high - this.low;
    const act = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.all(), ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), n: () => this.chooseNext(1), p: () => this.chooseNext(-1) }[event.key];
    if (!act || !width) return;
    event.preventDefault();
    act();
  }
  timeAt(event) { return this.x?.back(event.offsetX) ?? this.low; }
  pointed(event) {
    if (this.dragged !== null && this.dragged !== undefined) {
      this.far += Math.abs(event.offsetX - this.dragged);
      this.move((this.dragged - event.offsetX) / (this.canvas.clientWidth - this.names));
      this.dragged = event.offsetX;
      return;
    }
    const found = this.sliceAt(event);
    if (found !== this.hovered) { this.hovered = found; this.tell(); this.draw(); }
  }
  sliceAt(event) {
    const row = Math.floor((event.offsetY - HEAD) / ROW), at = this.timeAt(event), slack = 2 * (this.x?.back(1) - this.x?.back(0) || 0);
    if (event.offsetX < this.names || !this.byRow?.[row]) return null;
    const hits = this.byRow[row].filter((slice) => slice.at - slack <= at && at <= slice.at + slice.ms + slack);
    return hits.sort((one, other) => one.ms - other.ms)[0] ?? null;
  }
  choose(slice) { this.chosen = slice === this.chosen ? null : slice; this.tell(); this.draw(); }

  /** Follow the slice that begins after the chosen one, or before it, and bring it into the window. */
  chooseNext(by) {
    const order = [...this.slices].sort((one, other) => one.at - other.at);
    const place = this.chosen ? order.indexOf(this.chosen) + by : by > 0 ? 0 : order.length - 1;
    if (!order[place]) return;
    this.chosen = order[place];
    const width = this.high - this.low, off = this.chosen.at < this.low || this.chosen.at > this.high;
    if (off) this.low = Math.max(this.from, Math.min(this.until - width, this.chosen.at - width / 4));
    this.tell();
    this.look(this.low, this.low + width);
  }

  // The picture

  draw() {
    if (!this.rows || !this.canvas.isConnected) return;
    const box = this.canvas.parentElement.clientWidth, height = HEAD + ROW * this.rows.length + 4, ratio = devicePixelRatio || 1;
    this.names = box < NARROW ? SHORT_NAMES : NAMES;
    this.canvas.style.height = `${height}px`;
    [this.canvas.width, this.canvas.height] = [box * ratio, height * ratio];
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    this.theme = (name) => style.getPropertyValue(name).trim();
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    this.x = linear(this.low, this.high, this.names, box - 8);
    this.drawAxis(pen, box, height);
    this.rows.forEach((row, place) => this.drawRow(pen, box, row, place));
    pen.save();
    pen.beginPath();
    pen.rect(this.names, 0, box - this.names, height);
    pen.clip();
    this.byRow.forEach((slices, place) => this.drawSlices(pen, slices, HEAD + place * ROW));
    this.drawMarks(pen, height);
    if (this.chosen ?? this.hovered) this.drawCall(pen, this.chosen ?? this.hovered);
    pen.restore();
    const window = `${this.run}/${this.trace}/${this.last}/${this.low}/${this.high}`;
    if (window !== this.counted) this.drawWaits();
    this.counted = window;
  }

  drawAxis(pen, box, height) {
    pen.textAlign = "center";
    pen.fillStyle = this.theme("--quiet");
    pen.strokeStyle = this.theme("--line");
    for (const ms of ticks(this.low - this.from, this.high - this.from, Math.max(3, Math.floor((box - this.names) / 110)))) {
      const x = Math.round(this.x(ms + this.from)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 20);
      pen.lineTo(x, height);
      pen.stroke();
      if (x > this.names + 24 && x < box - 28) pen.fillText(duration(ms), x, 14);
    }
    pen.textAlign = "left";
    pen.fillText("time", 4, 14);
  }

  drawRow(pen, box, [pid, tid, process, name], place) {
    const y = HEAD + place * ROW;
    if (place && this.rows[place - 1][0] !== pid) {
      pen.fillStyle = this.theme("--line");
      pen.fillRect(0, y, box, 1);
    }
    pen.fillStyle = isWorker([pid, tid]) ? this.theme("--ink") : this.theme("--quiet");
    const text = visible(isWorker([pid, tid]) || this.names < NAMES ? name : `${process} · ${name}`);
    pen.fillText(clipped(pen, text, this.names - 12), 4, y + 15);
  }

  drawSlices(pen, slices, y) {
    let drawnUntil = -1;
    for (const slice of slices) {
      const left = this.x(slice.at), width = Math.max(1, this.x(slice.at + slice.ms) - left);
      if (left + width < this.names || left > this.canvas.clientWidth || (width <= 1 && Math.floor(left) === drawnUntil)) continue;
      drawnUntil = Math.floor(left);
      const waiting = slice.name.startsWith("submit ");
      pen.globalAlpha = waiting ? 0.35 : 1;
      pen.fillStyle = slice.failed ? this.theme("--bad") : this.theme(`--run-${kindOf(slice.name)}`);
      pen.fillRect(left, y + 2, Math.max(1, width - 0.5), ROW - 5);
      pen.globalAlpha = 1;
      if (width > 34) {
        pen.fillStyle = waiting ? this.theme("--ink") : this.theme("--on-run");
        const begin = Math.max(left, this.names);
        pen.fillText(clipped(pen, (slice.failed ? "✗ " : "") + visible(slice.name), left + width - begin - 8), begin + 4, y + 15);
      }
    }
  }

  drawMarks(pen, height) {
    let labeled = this.names;
    pen.textAlign = "right";
    for (const [step, at] of this.index.steps) {
      this.drawLine(pen, height, at, "--quiet", [3, 3]);
      const x = this.x(at), text = `step ${step}`, width = pen.measureText(text).width + 6;
      if (at < this.low || at > this.high || x - width < labeled) continue;
      pen.fillStyle = this.theme("--quiet");
      pen.fillText(text, x - 4, HEAD - 8);
      labeled = x;
    }
    pen.textAlign = "left";
    for (const mark of this.marks) this.drawLine(pen, height, mark.at, /^(lost|stalled)/.test(mark.name) ? "--bad" : "--accent", []);
  }

  drawLine(pen, height, at, color, dash) {
    if (at < this.low || at > this.high) return;
    const x = Math.round(this.x(at)) - 0.5;
    pen.strokeStyle = this.theme(color);
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x, HEAD - 18);
    pen.lineTo(x, height);
    pen.stroke();
    pen.setLineDash([]);
  }

  /** The call of a slice: frames around its slices, and an arrow from its submission to each worker. */
  drawCall(pen, slice) {
    const same = slice.call === undefined ? [slice] : this.slices.filter((one) => one.call === slice.call);
    const submitted = same.find((one) => !isWorker(one.track));
    pen.strokeStyle = this.theme("--ink");
    pen.lineWidth = 1.5;
    for (const one of same) {
      const y = HEAD + ROW * this.place.get(one.track.join("/")), x = this.x(one.at);
      pen.strokeRect(x, y + 1.5, Math.max(2, this.x(one.at + one.ms) - x), ROW - 4);
      if (!submitted || one === submitted) continue;
      const from = this.x(submitted.at), top = HEAD + ROW * this.place.get(submitted.track.join("/")) + ROW - 3;
      pen.beginPath();
      pen.moveTo(from, top);
      pen.bezierCurveTo(from, (top + y) / 2, x, (top + y) / 2, x, y + 2);
      pen.moveTo(x - 3.5, y - 4);
      pen.lineTo(x, y + 2);
      pen.lineTo(x + 3.5, y - 4);
      pen.stroke();
    }
    pen.lineWidth = 1;
  }

  // The words

  tell() {
    const slice = this.chosen ?? this.hovered;
    if (!slice) {
      const marks = this.marks.slice(0, 4).map((mark) => el("span", {}, `${duration(mark.at - this.from)}: `, el("b", {}, visible(mark.name))));
      this.tip.replaceChildren(...(marks.length ? marks : [el("span", { class: "quiet" }, "Point at a slice. A pale slice on calls is a call that waits for its worker.")]));
      return;
    }
    const [, , process, name] = this.rows[this.place.get(slice.track.join("/"))] ?? ["", "", "", ""];
    const wait = isWorker(slice.track) && slice.call !== undefined ? waitOf(slice, this.slices) : null;
    const facts = [["", visible(slice.name)], ["on", isWorker(slice.track) ? name : `${process} · ${name}`], ["took", duration(slice.ms)], ["began at", duration(Math.max(0, slice.at - this.from))]];
    if (wait) facts.push(["waited", `${duration(wait.ms)} from its submission${wait.behind.length ? `, behind ${wait.behind.join(", ")}` : ""}`]);
    if (slice.step !== undefined) facts.push(["step", String(slice.step)]);
    if (slice.failed) facts.push(["ended", "with an error"]);
    this.tip.replaceChildren(...facts.map(([what, said]) => el("span", {}, what && `${what} `, el("b", {}, said))));
  }

  drawWaits() {
    const found = waits(this.slices, this.rows, this.low, this.high), whole = this.high - this.low;
    const names = new Map(this.index.tracks.map(([pid, tid, , name]) => [ownerOf([pid, tid]) + (tid % 100), name]));
    const rows = found.map((worker) => {
      const bar = el("div", { class: "stack" }), busy = sum(worker.busy);
      for (const [name, ms] of sorted(worker.busy)) bar.append(piece(`--run-${kindOf(name)}`, ms / whole, name, `runs ${name}: ${duration(ms)}`, false));
      for (const [who, ms] of sorted(worker.while)) bar.append(piece(who === "controller" ? "--line" : `--run-${kindOf(who.split(": ").at(-1))}`, ms / whole, who === "controller" ? who : who.replace(/^\S+: /, ""), `waits, ${saying(who)}: ${duration(ms)}`, true));
      const [most] = sorted(worker.while);
      return el("tr", {}, el("th", { scope: "row" }, visible(names.get(`${worker.key}1`) ?? worker.key)),
        el("td", { class: "number" }, `${((100 * busy) / whole).toFixed(1)} %`), el("td", { class: "bars" }, bar),
        el("td", {}, most && most[1] > 0.005 * whole ? `${saying(most[0])}: ${duration(most[1])}` : "never"));
    });
    if (!rows.length) return this.table.replaceChildren(el("p", { class: "quiet" }, "No worker ran anything in these steps."));
    this.table.replaceChildren(el("h2", {}, `Who waits for whom, in the ${duration(whole)} above`),
      el("table", {}, el("thead", {}, el("tr", {}, ["worker", "busy", "what it runs, and (striped) what others run while it waits", "waits most"].map((text) => el("th", { scope: "col" }, text)))), el("tbody", {}, rows)));
  }
}

const saying = (who) => (who === "controller" ? "while only the controller works" : `while ${who} runs`);
const sum = (sums) => [...sums.values()].reduce((one, other) => one + other, 0);
const sorted = (sums) => [...sums].sort((one, other) => other[1] - one[1]);

function piece(color, share, name, title, waiting) {
  const made = el("i", { title, class: waiting ? "waiting" : "" }, share > 0.1 ? el("span", {}, visible(name)) : "");
  made.style.width = `${100 * share}%`;
  made.style.setProperty("--own", `var(${color})`);
  return made;
}

function clipped(pen, text, width) {
  if (width < 12) return "";
  if (pen.measureText(text).width <= width) return text;
  let length = Math.floor((text.length * width) / pen.measureText(text).width);
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return length > 1 ? `${text.slice(0, length)}…` : "";
}
