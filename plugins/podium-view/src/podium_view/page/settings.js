// Settings: the keys of config.yaml, those in which runs differ first.

import { el, inUse, visible } from "./dom.js";

export class SettingsView {
  constructor(app) {
    this.app = app;
    this.wanted = "";
    this.bar = el("div", { class: "bar" });
    this.table = el("div", { class: "settings" });
    this.root = el("section", { "aria-label": "Settings" }, this.bar, this.table);
  }

  async load() {
    this.found = await Promise.all(this.app.runs.map((_, index) => this.app.source.get(`${index}/settings`)));
    this.keys = [...new Set(this.found.flatMap((run) => Object.keys(run.values)))];
    const uncompared = new Set(this.found[0].uncompared);
    this.differing = new Set(this.keys.filter((key) => !uncompared.has(key) && new Set(this.found.map((run) => run.values[key])).size > 1));
    this.drawBar();
    this.draw();
  }

  refresh() { return inUse(this.bar) ? undefined : this.load(); }

  drawBar() {
    const search = el("input", { type: "search", value: this.wanted, placeholder: "key or value", "aria-label": "show settings with", oninput: () => { this.wanted = search.value; this.draw(); } });
    const several = this.found.length > 1;
    this.bar.replaceChildren(search, el("span", { class: "hint" }, several
      ? `${this.differing.size} settings differ, beside names and places of the runs.`
      : `${this.keys.length} settings, as resolved. podium view RUN RUN shows in which settings runs differ.`));
  }

  draw() {
    const fits = (key) => [key, ...this.found.map((run) => run.values[key] ?? "")].some((text) => text.toLowerCase().includes(this.wanted.toLowerCase()));
    const keys = this.keys.filter(fits), differing = keys.filter((key) => this.differing.has(key));
    const groups = Map.groupBy(keys.filter((key) => !this.differing.has(key)), (key) => key.split(".")[0]);
    this.table.replaceChildren(
      differing.length ? this.section("Differences", differing, true) : "",
      ...[...groups].map(([name, entries]) => this.section(name, entries, false)),
      keys.length ? "" : el("p", { class: "quiet" }, this.keys.length ? "No setting has this text." : "This run has no config.yaml."));
  }

  /** A table of keys; with the value of each run, or of the first where none differs. */
  section(title, keys, apart) {
    const runs = this.found.map((_, index) => index), alike = (key) => new Set(runs.map((run) => this.found[run].values[key])).size === 1;
    const each = apart || !keys.every(alike);
    const head = each && runs.length > 1 ? el("thead", {}, el("tr", {}, ["key", ...runs.map((run) => visible(this.app.runs[run].name))].map((text) => el("th", { scope: "col" }, text)))) : "";
    return el("section", {}, el("h2", {}, visible(title)), el("table", { class: apart ? "differences" : "" }, head, el("tbody", {}, keys.map((key) => el("tr", {},
      el("th", { scope: "row" }, el("code", {}, visible(key))), (each ? runs : [0]).map((run) => el("td", {}, el("code", {}, visible(this.found[run].values[key] ?? "–")))))))));
  }
}
