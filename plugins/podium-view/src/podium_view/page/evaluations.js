// Evaluations: the held-out prompts with their completions in two evaluations.

import { choice, el, inUse, visible } from "./dom.js";
import { percent, short } from "./scales.js";

const CHANGES = { all: "all", worse: "worse", better: "better", same: "as good" };

const worth = (row) => (row.loss === null ? row.reward : -row.loss);

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** A verdict, or the share of several completions that is correct. */
const verdictOf = (share, n) => (share === 1 ? "✓" : share === 0 ? "✗" : n > 1 ? percent(share) : short(share));

/** Whether a prompt is better than before: by the verdict, or by the score where both or one of them have none. One that has no score in one of them is as good. */
function changeOf(before, after) {
  if (!before || !after) return "same";
  const judged = before.correct !== null && after.correct !== null && before.correct !== after.correct;
  const [old, now] = judged ? [Number(before.correct), Number(after.correct)] : [worth(before), worth(after)];
  if (old === null || now === null) return "same";
  return now > old ? "better" : now < old ? "worse" : "same";
}

export class EvaluationsView {
  constructor(app) {
    this.app = app;
    this.kind = "all";
    this.run = 0;
    this.bar = el("div", { class: "bar" });
    this.list = el("div", { class: "groups", role: "listbox", "aria-label": "Held-out prompts", tabindex: 0, onkeydown: (event) => this.key(event) });
    this.detail = el("div", { class: "detail" });
    this.root = el("section", { "aria-label": "Evaluations" }, this.bar, el("div", { class: "columns" }, this.list, this.detail));
  }

  /** Open `run/set/before/after`; what is left out is the first run and set, and the first and the last evaluation. */
  async load(run, set, before, after) {
    this.run = run === undefined ? this.run : Math.min(Number(run) || 0, this.app.runs.length - 1);
    this.sets = await this.app.source.get(`${this.run}/evaluations`);
    for (const [place, one] of this.sets.entries()) one.steps = one.steps.filter((step) => this.app.source.has(`${this.run}/evaluation/${place}/${step}`));
    if (!this.sets.some((one) => one.steps.length)) return this.empty();
    this.set = Math.min(Number(set) || 0, this.sets.length - 1);
    const { steps } = this.sets[this.set], at = (step, usual) => (steps.includes(Number(step)) && step !== undefined ? Number(step) : usual);
    this.steps = [at(before, steps[0]), at(after, steps.at(-1))];
    const [old, now] = await Promise.all(this.steps.map((step) => this.app.source.get(`${this.run}/evaluation/${this.set}/${step}`)));
    const places = new Map(old.rows.map((row, place) => [row.key, place]));
    this.pairs = now.rows.map((row, place) => ({ places: [places.get(row.key), place], before: old.rows[places.get(row.key)], after: row }));
    for (const pair of this.pairs) pair.kind = changeOf(pair.before, pair.after);
    this.rates = [old, now].map(({ rows, accuracy }) => accuracy ?? mean(rows.map((row) => row.correct).filter((share) => share !== null)));
    this.drawBar();
    this.drawList();
    await this.open(this.shown()[0]);
  }

  async refresh() {
    const known = JSON.stringify(this.sets), sets = await this.app.source.get(`${this.run}/evaluations`);
    if (JSON.stringify(sets) !== known && !inUse(this.bar)) await this.load(this.run);
  }

  empty() {
    this.sets = this.pairs = [];
    this.bar.replaceChildren(this.runChoice());
    this.list.replaceChildren();
    this.detail.replaceChildren(el("p", { class: "quiet" }, "This run has no evaluations yet, or none of completions (eval.items, eval.every)."));
  }

  shown() {
    const order = ["worse", "better", "same"];
    return this.pairs.filter((pair) => this.kind === "all" || pair.kind === this.kind).sort((one, other) => order.indexOf(one.kind) - order.indexOf(other.kind));
  }

  runChoice() {
    const runs = this.app.runs.map((run, index) => [String(index), run.name]);
    return runs.length > 1 ? choice("run", runs, String(this.run), (run) => this.app.go(`evaluations/${run}`)) : "";
  }

  drawBar() {
    const go = (set, before, after) => this.app.go(["evaluations", this.run, set, before, after].filter((one) => one !== undefined).join("/"));
    const [before, after] = this.steps, steps = this.sets[this.set].steps.map((step) => [String(step), `step ${step}`]);
    const sets = this.sets.map((one, place) => [String(place), one.name || "held-out"]), count = (kind) => this.pairs.filter((pair) => pair.kind === kind).length;
    const kinds = Object.entries(CHANGES).map(([kind, text]) => [kind, kind === "all" ? `all ${this.pairs.length}` : `${text} (${count(kind)})`]);
    this.bar.replaceChildren(this.runChoice(),
      sets.length > 1 ? choice("set", sets, String(this.set), (set) => go(set)) : "",
      choice("before", steps, String(before), (step) => go(this.set, step, after)), choice("after", steps, String(after), (step) => go(this.set, before, step)),
      choice("show", kinds, this.kind, (kind) => { this.kind = kind; this.drawList(); this.open(this.shown()[0]); }),
      this.rates.includes(null) ? "" : el("span", {}, "correct ", el("b", {}, `${percent(this.rates[0])} → ${percent(this.rates[1])}`)));
  }

  drawList() {
    this.list.replaceChildren(...this.shown().map((pair) => this.item(pair)));
  }

  item(pair) {
    const { before, after } = pair, how = (row) => (!row ? "–" : row.correct === null ? short(row.loss ?? row.reward) : verdictOf(row.correct, row.n));
    const [name, value] = after.loss === null ? ["reward", (row) => row?.reward] : ["loss", (row) => row?.loss];
    const style = { better: "pill good", worse: "pill bad", same: "quiet" }[pair.kind];
    return el("button", { class: "group", role: "option", "aria-selected": "false", tabindex: -1, "data-key": after.key, id: `held-${after.key}`, onclick: () => this.open(pair) },
      el("span", { class: "prompt" }, visible(after.prompt).replaceAll("\n", " ")),
      el("span", { class: "facts" }, el("span", { class: style }, `${how(before)} → ${how(after)}`), after.loss !== null && after.correct === null ? " loss" : ` ${name} ${short(value(before))} → ${short(value(after))}`));
  }

  key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key], order = this.shown();
    if (!move || !order.length) return;
    event.preventDefault();
    this.open(order[Math.min(order.length - 1, Math.max(0, order.indexOf(this.pair) + move))]);
  }

  async open(pair) {
    this.pair = pair;
    if (!pair) return this.detail.replaceChildren(el("p", { class: "quiet" }, "No prompt is shown by this choice."));
    this.list.setAttribute("aria-activedescendant", `held-${pair.after.key}`);
    for (const item of this.list.children) {
      const chosen = item.dataset.key === pair.after.key;
      item.classList.toggle("chosen", chosen);
      item.setAttribute("aria-selected", String(chosen));
      if (chosen) item.scrollIntoView({ block: "nearest" });
    }
    const get = (place, step) => (place === undefined ? null : this.app.source.get(`${this.run}/evaluated/${this.set}/${step}/${place}`));
    const [before, after] = await Promise.all(pair.places.map((place, one) => get(place, this.steps[one])));
    if (pair !== this.pair) return;
    this.detail.replaceChildren(
      el("div", { class: "prompttext" }, el("h2", {}, "Prompt"), el("pre", {}, visible(after.prompt)),
        after.expected === null ? "" : el("p", { class: "expected" }, "expected ", el("code", {}, visible(after.expected)))),
      el("div", { class: "beside" }, this.cards(before, this.steps[0]), this.cards(after, this.steps[1])));
  }

  cards(row, step) {
    if (!row) return el("article", { class: "card quiet" }, `Step ${step} did not evaluate this prompt.`);
    return row.answers.length === 1 ? this.card(row.answers[0], step) : el("div", {}, ...row.answers.map((answer) => this.card(answer, step)));
  }

  card(row, step) {
    const [kind, words] = row.correct === 1 ? ["pill good", "✓ correct"] : row.correct === 0 ? ["pill bad", "✗ not correct"] : ["pill", "undecided"];
    const verdict = row.correct === null ? "" : el("span", { class: kind }, words);
    return el("article", { class: "card" }, el("div", { class: "facts" }, el("b", {}, `step ${step}`), verdict,
      row.finish_reason === "length" ? el("span", { class: "pill warn" }, "cut off") : "", el("span", {}, row.loss === null ? "reward " : "loss ", el("b", {}, short(row.loss ?? row.reward)))),
    el("div", { class: "text" }, visible(row.completion) || el("span", { class: "quiet" }, row.loss === null ? "(nothing)" : "The loss of the expected answer was computed, and no completion was drawn.")));
  }
}
