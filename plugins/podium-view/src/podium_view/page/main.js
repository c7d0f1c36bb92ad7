// The page: its head, its tabs, and what is polled.

import { CompletionsView } from "./completions.js";
import { CurvesView } from "./curves.js";
import { el, runColor, visible } from "./dom.js";
import { EvaluationsView } from "./evaluations.js";
import { FailuresView } from "./failures.js";
import { duration } from "./scales.js";
import { SettingsView } from "./settings.js";
import { openSource } from "./source.js";
import { TimelineView } from "./timeline.js";

const POLL_MS = 2000;
const TABS = { curves: "Curves", completions: "Completions", evaluations: "Evaluations", timeline: "Timeline", failures: "Failures", settings: "Settings" };
const THEMES = { auto: "◐", light: "☀", dark: "☾" };

class App {
  constructor(source, runs) {
    this.source = source;
    this.runs = runs;
    this.hidden = new Set();
    this.views = { curves: new CurvesView(this), completions: new CompletionsView(this), evaluations: new EvaluationsView(this), timeline: new TimelineView(this), failures: new FailuresView(this), settings: new SettingsView(this) };
    this.outlet = document.getElementById("view");
    this.header = document.getElementById("header");
    this.theme = "auto";
    this.complaint = "";
  }

  /** The runs whose curves are drawn. */
  shown() { return this.runs.map((_, index) => index).filter((index) => !this.hidden.has(index)); }

  go(address) { location.hash = address; }

  async start() {
    this.drawHeader();
    const root = document.documentElement;
    new ResizeObserver(() => root.style.setProperty("--head", `${this.header.offsetHeight}px`)).observe(this.header);
    addEventListener("hashchange", () => this.route());
    await this.route();
    if (this.source.live) this.poll();
  }

  async route() {
    const [name, ...rest] = location.hash.slice(1).split("/"), tab = name in TABS ? name : "curves";
    const view = this.views[tab], same = this.tab === tab;
    this.tab = tab;
    this.drawTabs();
    try {
      if (same && tab === "completions" && rest.length === 3 && Number(rest[0]) === view.run && Number(rest[1]) === view.step) await view.open(Number(rest[2]));
      else await view.load(...rest);
      if (this.outlet.firstChild !== view.root) this.outlet.replaceChildren(view.root);
      if (tab === "timeline") view.draw();
    } catch (error) {
      this.outlet.replaceChildren(el("p", { class: "problem", role: "alert" }, visible(error.message)));
    }
    document.body.dataset.ready = tab;
  }

  // What is polled

  async poll() {
    let before = "";
    for (;;) {
      await new Promise((done) => setTimeout(done, POLL_MS));
      if (document.hidden) continue;
      try {
        const now = JSON.stringify(await this.source.get("state"));
        const again = this.complaint;
        this.complaint = "";
        if (now !== before || again) {
          this.runs = await this.source.get("runs");
          if (before || again) await this.views[this.tab].refresh();
        }
        before = now;
        this.drawHeader();
      } catch (error) {
        this.complaint = error.message;
        this.drawHeader();
      }
    }
  }

  // The head

  drawHeader() {
    if (!this.runsBox) {
      this.runsBox = el("div", { class: "runs" });
      this.tabs = el("nav", { "aria-label": "views" });
      this.notice = el("p", { class: "notice", role: "status" });
      const theme = el("button", { class: "theme", "aria-label": "colors: as the system, light or dark", onclick: () => this.nextTheme(theme) }, THEMES.auto);
      this.header.append(el("div", { class: "top" }, el("h1", {}, "podium ", el("span", {}, "view")), this.tabs, theme), this.runsBox, this.notice);
    }
    const focused = document.activeElement?.dataset?.run;
    this.runsBox.replaceChildren(...this.runs.map((run, index) => this.card(run, index)));
    if (focused !== undefined) this.runsBox.querySelector(`[data-run="${focused}"]`)?.focus();
    this.notice.textContent = this.complaint || this.source.note;
    this.notice.className = this.complaint ? "notice problem" : "notice";
    this.drawTabs();
  }

  drawTabs() {
    const links = Object.entries(TABS).map(([name, text]) => el("a", { href: `#${name}`, "aria-current": name === this.tab ? "page" : null }, text));
    const focused = [...this.tabs.children].indexOf(document.activeElement);
    this.tabs.replaceChildren(...links);
    links[focused]?.focus();
  }

  card(run, index) {
    const swatch = el("i", { class: "swatch" }), several = this.runs.length > 1;
    swatch.style.background = runColor(index);
    const gain = run.before === null ? "" : el("span", {}, `held-out ${visible(run.metric)} `, el("b", {}, run.before === run.after ? run.after : `${run.before} → ${run.after}`));
    const facts = [
      el("span", { class: `state ${run.state}` }, this.stateOf(run)),
      el("span", {}, "step ", el("b", {}, run.step), run.steps ? ` of ${run.steps}` : ""), gain,
      el("span", { class: "quiet" }, [run.phase, run.schedule, run.data].filter(Boolean).map(visible).join(" · ")),
      ...run.complaints.map((complaint) => el("span", { class: "problem" }, visible(complaint))),
    ];
    const name = several
      ? el("button", { class: "name", "data-run": index, "aria-pressed": String(!this.hidden.has(index)), title: `${visible(run.path)}: show or hide its curves`, onclick: () => this.toggle(index) }, swatch, visible(run.name))
      : el("span", { class: "name", title: visible(run.path) }, swatch, visible(run.name));
    return el("div", { class: "run" }, name, ...facts);
  }

  /** The state of a run, and of one that is running, how long ago it took a step. */
  stateOf(run) {
    if (run.state !== "running") return run.state;
    if (!this.source.live) return "running when exported";
    if (run.quiet_s === null) return "running";
    return `running, last step ${run.quiet_s < 2 ? "just now" : `${duration(run.quiet_s * 1000)} ago`}`;
  }

  toggle(index) {
    if (!this.hidden.delete(index)) this.hidden.add(index);
    this.drawHeader();
    if (this.tab === "curves") this.views.curves.draw();
  }

  nextTheme(button) {
    const names = Object.keys(THEMES);
    this.theme = names[(names.indexOf(this.theme) + 1) % names.length];
    button.textContent = THEMES[this.theme];
    if (this.theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.theme;
    if (this.tab === "timeline") this.views.timeline.draw();
  }
}

try {
  const source = await openSource();
  await new App(source, await source.get("runs")).start();
} catch (error) {
  document.getElementById("view").replaceChildren(el("p", { class: "problem", role: "alert" }, error.message));
}
