// Failures: what the run's files say of lost workers, stalls, failed calls, numbers that are not finite, and errors.

import { choice, el, visible } from "./dom.js";
import { duration } from "./scales.js";

const MEANINGS = {
  "lost worker": ["Lost workers", "A worker's process ended although nobody had asked it to."],
  stall: ["Stalls", "A call waited for long; the ranks named had not answered."],
  "failed call": ["Failed calls", "A worker's endpoint raised an error."],
  "not finite": ["Numbers that are not finite", "A metric was NaN or infinite."],
  dropped: ["Dropped prompts", "Prompts that the run took and did not train."],
  traceback: ["Tracebacks in the logs", ""],
  error: ["Errors in the logs", ""],
  warning: ["Warnings in the logs", ""],
};

export class FailuresView {
  constructor(app) {
    this.app = app;
    this.run = 0;
    this.root = el("section", { "aria-label": "Failures" });
  }

  async load(run) {
    this.run = run === undefined ? this.run : Math.min(Number(run) || 0, this.app.runs.length - 1);
    this.found = await this.app.source.get(`${this.run}/failures`);
    this.draw();
  }

  async refresh() {
    const open = [...this.root.querySelectorAll("details[open]")].map((one) => one.dataset.key);
    await this.load(this.run);
    for (const one of this.root.querySelectorAll("details")) one.open = open.includes(one.dataset.key);
  }

  draw() {
    const { found, counts, logs } = this.found, runs = this.app.runs.map((run, index) => [String(index), run.name]);
    const kinds = Object.keys(MEANINGS).filter((kind) => counts[kind]);
    this.root.replaceChildren(
      runs.length > 1 ? el("div", { class: "bar" }, choice("run", runs, String(this.run), (other) => this.app.go(`failures/${other}`))) : "",
      kinds.length ? "" : el("div", { class: "nothing" }, el("b", {}, "Nothing has failed."),
        " Looked at: lost workers, stalls and failed calls in the trace; metrics that are not finite; dropped prompts in the ledger; warnings, errors and tracebacks at the end of each log."),
      ...kinds.map((kind) => this.section(kind, found.filter((one) => one.kind === kind), counts[kind])),
      el("h2", {}, "Logs"), logs.length ? "" : el("p", { class: "quiet" }, "This run has no logs."),
      ...logs.map((log) => el("details", { class: "log", "data-key": log.name }, el("summary", {}, el("code", {}, visible(log.name)), el("span", { class: "quiet" }, log.tail ? ` its end` : " empty")), el("pre", { tabindex: 0 }, visible(log.tail)))));
  }

  section(kind, entries, count) {
    const [title, meaning] = MEANINGS[kind];
    return el("section", { class: `failures ${kind === "warning" || kind === "dropped" ? "mild" : ""}` },
      el("h2", {}, `${title} (${count})`), meaning ? el("p", { class: "hint" }, meaning) : "",
      el("ul", {}, entries.map((entry) => this.entry(entry))),
      count > entries.length ? el("p", { class: "quiet" }, `${count - entries.length} more are in the run's files.`) : "");
  }

  entry(entry) {
    const place = entry.at === undefined ? null : el("a", { href: `#timeline/${this.run}/${entry.trace}/${entry.place}` }, `${duration(entry.at)} into ${entry.name ?? "the trace"}`);
    const step = entry.step === undefined || entry.step === null ? null : el("a", { href: `#completions/${this.run}/${entry.step}` }, `step ${entry.step}`);
    const more = entry.more ? el("details", { "data-key": entry.more.slice(0, 200) }, el("summary", {}, "traceback"), el("pre", { tabindex: 0 }, visible(entry.more))) : "";
    return el("li", {}, el("span", { class: "what" }, entry.where ? el("b", {}, `${visible(entry.where)}  `) : "", visible(entry.says)),
      el("span", { class: "where" }, entry.when ? el("span", {}, entry.when) : "", step, place), more);
  }
}
