// Completions: the groups of a step, and the completions of one group.

import { choice, el, inUse, visible } from "./dom.js";
import { nearest, short, signed } from "./scales.js";
import { COLORINGS, drawTokens, factsOf, legend, scaleOf } from "./tokens.js";

const FIRST_TOKENS = 1500; // of a completion, until its reader asks for more
const ORDERS = {
  place: ["as drawn", (one, other) => one.group - other.group],
  low: ["lowest reward first", (one, other) => (one.mean ?? 0) - (other.mean ?? 0)],
  high: ["highest reward first", (one, other) => (other.mean ?? 0) - (one.mean ?? 0)],
  spread: ["widest spread first", (one, other) => spread(other) - spread(one)],
  cut: ["most cut off first", (one, other) => other.cut / other.n - one.cut / one.n],
};
const SHOWN = {
  all: ["all", () => true],
  right: ["correct", (row) => row.correct === true],
  wrong: ["not correct", (row) => row.correct === false],
  cut: ["cut off", (row) => row.finish_reason === "length"],
};

const spread = (group) => (group.high ?? 0) - (group.low ?? 0);

export class CompletionsView {
  constructor(app) {
    this.app = app;
    this.coloring = "advantage";
    this.order = "place";
    this.shown = "all";
    this.run = 0;
    this.steps = [];
    this.bar = el("div", { class: "bar" });
    this.list = el("div", { class: "groups", role: "listbox", "aria-label": "Groups: one for each prompt", tabindex: 0, onkeydown: (event) => this.key(event) });
    this.detail = el("div", { class: "detail" });
    this.root = el("section", { "aria-label": "Completions" }, this.bar, el("div", { class: "columns" }, this.list, this.detail));
  }

  /** Open `run/step/group`; what is left out is the first run, the last step and the first group. */
  async load(run, step, group) {
    this.run = run === undefined ? this.run : Math.min(Number(run) || 0, this.app.runs.length - 1);
    this.steps = await this.app.source.get(`${this.run}/steps`);
    if (!this.steps.length) return this.empty();
    const wanted = step === undefined ? this.steps.at(-1) : Number(step);
    this.step = this.steps[nearest(this.steps, wanted)];
    this.groups = await this.app.source.get(`${this.run}/groups/${this.step}`);
    const there = this.groups.groups.map((one) => one.group);
    this.group = there.includes(Number(group)) && group !== undefined ? Number(group) : this.sorted()[0]?.group;
    this.drawBar();
    this.drawList();
    await this.open(this.group);
  }

  async refresh() {
    const before = this.steps.length;
    this.steps = await this.app.source.get(`${this.run}/steps`);
    if (!before && this.steps.length) await this.load(this.run);
    else if (before !== this.steps.length && !inUse(this.bar)) this.drawBar();
  }

  empty() {
    this.bar.replaceChildren(...this.runChoice());
    this.list.replaceChildren();
    this.detail.replaceChildren(el("p", { class: "quiet" }, "This run has no completions: no step has ended yet, or it trains by examples (SFT)."));
  }

  sorted() { return [...this.groups.groups].sort(ORDERS[this.order][1]); }

  runChoice() {
    if (this.app.runs.length < 2) return [];
    return [choice("run", this.app.runs.map((run, index) => [String(index), run.name]), String(this.run), (run) => this.app.go(`completions/${run}`))];
  }

  drawBar() {
    const place = this.steps.indexOf(this.step);
    const to = (index) => this.app.go(`completions/${this.run}/${this.steps[Math.min(this.steps.length - 1, Math.max(0, index))]}`);
    const slider = el("input", { type: "range", min: 0, max: this.steps.length - 1, value: place, "aria-label": "step", onchange: () => to(Number(slider.value)) });
    const number = el("input", { type: "number", min: this.steps[0], max: this.steps.at(-1), value: this.step, "aria-label": "step", onchange: () => to(nearest(this.steps, Number(number.value))) });
    slider.addEventListener("input", () => { number.value = this.steps[Number(slider.value)]; });
    const colors = Object.entries(COLORINGS).map(([name, one]) => [name, one.title]);
    this.bar.replaceChildren(...this.runChoice(),
      el("span", { class: "stepper" }, el("span", {}, "step"),
        el("button", { onclick: () => to(place - 1), disabled: place === 0, "aria-label": "previous step" }, "‹"), number,
        el("button", { onclick: () => to(place + 1), disabled: place === this.steps.length - 1, "aria-label": "next step" }, "›"),
        el("span", { class: "quiet" }, `of ${this.steps.at(-1)}`), this.steps.length > 1 ? slider : ""),
      choice("order", Object.entries(ORDERS).map(([name, [text]]) => [name, text]), this.order, (order) => { this.order = order; this.drawList(); }),
      choice("show", Object.entries(SHOWN).map(([name, [text]]) => [name, text]), this.shown, (shown) => { this.shown = shown; this.drawDetail(); }),
      choice("color by", colors, this.coloring, (coloring) => { this.coloring = coloring; this.drawDetail(); }));
  }

  drawList() {
    const all = this.groups.groups, lows = all.map((one) => one.low).filter(Number.isFinite), highs = all.map((one) => one.high).filter(Number.isFinite);
    const low = Math.min(0, ...lows), high = Math.max(...highs, low + 1e-9);
    const completions = all.reduce((sum, one) => sum + one.n, 0);
    this.list.replaceChildren(
      el("p", { class: "hint" }, `${all.length} prompts, ${completions} completions. A bar spans a prompt's rewards from ${short(low)} to ${short(high)}; its line is their mean.`),
      ...this.sorted().map((one) => this.item(one, low, high)));
  }

  item(one, low, high) {
    const share = (value) => `${(100 * (value - low)) / (high - low)}%`;
    const range = el("i", { class: "range" }), mean = el("i", { class: "mean" });
    if (one.mean !== null) {
      range.style.left = share(one.low);
      range.style.width = `max(2px, ${(100 * (one.high - one.low)) / (high - low)}%)`;
      mean.style.left = share(one.mean);
    }
    const flat = one.mean !== null && one.low === one.high && one.n > 1;
    const said = this.groups.graded ? `${one.correct} of ${one.judged} correct` : `mean ${short(one.mean)}`;
    return el("button", {
      class: one.group === this.group ? "group chosen" : "group", role: "option", "aria-selected": String(one.group === this.group),
      "data-group": one.group, id: `group-${one.group}`, tabindex: -1, onclick: () => this.app.go(`completions/${this.run}/${this.step}/${one.group}`),
    },
      el("span", { class: "prompt" }, visible(one.prompt || `prompt ${one.group}`).replaceAll("\n", " ")),
      el("span", { class: "rewards" }, range, mean),
      el("span", { class: "facts" }, el("b", {}, short(one.mean)), ` ${said}`, flat ? " · flat" : "", one.cut ? ` · ${one.cut} cut off` : ""));
  }

  key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key], order = this.sorted();
    if (!move || !order.length) return;
    event.preventDefault();
    const now = order.findIndex((one) => one.group === this.group);
    const next = order[Math.min(order.length - 1, Math.max(0, now + move))];
    this.app.go(`completions/${this.run}/${this.step}/${next.group}`);
  }

  /** Show another group of the same step. */
  async open(group) {
    this.group = group;
    this.list.setAttribute("aria-activedescendant", `group-${group}`);
    for (const item of this.list.querySelectorAll(".group")) {
      const chosen = Number(item.dataset.group) === group;
      item.classList.toggle("chosen", chosen);
      item.setAttribute("aria-selected", String(chosen));
      if (chosen) item.scrollIntoView({ block: "nearest" });
    }
    this.found = group === undefined ? null : await this.app.source.get(`${this.run}/group/${this.step}/${group}/0`);
    this.drawDetail();
  }

  drawDetail() {
    const found = this.found;
    if (!found) return this.detail.replaceChildren(el("p", { class: "quiet" }, "This step has no completions."));
    const rows = found.rows.filter(SHOWN[this.shown][1]);
    const scale = scaleOf(this.coloring, found.rows, this.step);
    this.readout = el("div", { class: "facts tokenfacts", "aria-live": "polite" });
    this.tell(null);
    this.detail.replaceChildren(
      el("div", { class: "prompttext" }, el("h2", {}, "Prompt"), el("pre", {}, visible(found.prompt)),
        found.expected === null ? "" : el("p", { class: "expected" }, "expected ", el("code", {}, visible(found.expected)))),
      el("div", { class: "legendbar" }, legend(this.coloring, scale)),
      ...rows.map((row) => this.card(row, found.rows.indexOf(row) + found.first, scale)),
      rows.length ? "" : el("p", { class: "quiet" }, "No completion of this prompt is shown by this choice."),
      found.first + found.rows.length < found.n ? this.more(found) : "",
      this.readout);
  }

  more(found) {
    const start = found.first + found.rows.length;
    if (!this.app.source.has(`${this.run}/group/${this.step}/${this.group}/${start}`)) {
      return el("p", { class: "quiet" }, `${found.n - start} more completions are in the run's directory.`);
    }
    return el("button", { class: "wide", onclick: async () => {
      const next = await this.app.source.get(`${this.run}/group/${this.step}/${this.group}/${start}`);
      this.found = { ...found, rows: [...found.rows, ...next.rows] };
      this.drawDetail();
    } }, `Show ${found.n - start} more`);
  }

  card(row, number, scale) {
    const text = el("div", { class: "text", tabindex: 0, role: "group", "aria-label": `Completion ${number + 1}. Left and right go through its tokens.` });
    const draw = (most) => text.replaceChildren(...drawTokens(row, this.coloring, scale, this.step, most));
    draw(FIRST_TOKENS);
    const tell = (place) => this.tell(row, place, text);
    text.addEventListener("pointerover", (event) => { if (event.target.dataset.place) tell(Number(event.target.dataset.place)); });
    text.addEventListener("pointerleave", () => this.tell(null));
    text.addEventListener("blur", () => this.tell(null));
    text.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || !row.tokens.length) return;
      event.preventDefault();
      tell(Math.min(row.tokens.length - 1, Math.max(0, (this.pointed ?? (move > 0 ? -1 : 1)) + move)));
    });
    const longer = row.chars && row.tokens.length > FIRST_TOKENS;
    const rest = el("button", { class: "wide", onclick: () => { draw(Infinity); rest.remove(); } }, `Show all ${row.tokens.length} tokens`);
    return el("article", { class: "card" }, this.facts(row, number), text, longer ? rest : "");
  }

  facts(row, number) {
    const verdict = row.correct === null ? "" : el("span", { class: row.correct ? "pill good" : "pill bad" }, row.correct ? "✓ correct" : "✗ not correct");
    const parts = Object.entries(row.parts).filter(([, value]) => value !== null).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, short(value))));
    const logged = Object.entries(row.logged ?? {}).filter(([, text]) => text !== null).map(([name, text]) => el("span", {}, `${visible(name)} `, el("b", { title: text }, visible(text.slice(0, 80)))));
    const cut = row.finish_reason === "length" ? el("span", { class: "pill warn" }, "cut off") : "";
    const who = row.turns ? el("span", {}, `session ${row.session ?? ""}`, row.agent ? `, agent ${visible(row.agent)}` : "", `, ${row.turns.length} ${row.turns.length === 1 ? "turn" : "turns"}`) : "";
    return el("div", { class: "facts" }, el("span", { class: "quiet" }, `#${number + 1}`), verdict, cut, who,
      el("span", {}, "reward ", el("b", {}, short(row.reward))), parts, logged,
      row.advantage === null ? "" : el("span", {}, "advantage ", el("b", {}, signed(row.advantage))),
      el("span", {}, el("b", {}, row.tokens.length), row.tokens.length === 1 ? " token" : " tokens"),
      row.version === null ? "" : el("span", {}, "version ", el("b", {}, row.version)));
  }

  /** Say what is known of a token; null for none. */
  tell(row, place, text) {
    this.detail.querySelector(".pointed")?.classList.remove("pointed");
    this.pointed = row ? place : null;
    if (!row) {
      this.readout.replaceChildren(el("span", { class: "quiet" }, "Point at a token, or choose a completion by Tab and go through its tokens by ← and →."));
      return;
    }
    const span = text.querySelector(`[data-place="${place}"]`);
    span?.classList.add("pointed");
    this.readout.replaceChildren(...factsOf(row, place, this.step).map(([name, value]) => el("span", {}, `${name} `, el("b", {}, visible(value)))));
  }
}

