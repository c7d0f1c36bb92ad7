// A completion's tokens, colored by what is known of each.

import { el, visible } from "./dom.js";
import { short, signed } from "./scales.js";

const USUAL_MISMATCH = 0.05; // nats; a mean above it brings a note in the run, so that less is drawn pale

/** What tokens can be colored by. `of(row, step)` gives a value for each token, or null where the file has none. */
export const COLORINGS = {
  none: { title: "nothing", of: () => null },
  advantage: { title: "advantage", unit: "advantage", of: (row) => each(row, row.advantages ?? (row.advantage === null ? null : row.advantage)), scale: diverging(() => 0) },
  mismatch: { title: "mismatch", unit: "nats, generator − trainer", of: (row) => each(row, row.mismatch), scale: diverging(() => USUAL_MISMATCH) },
  version: {
    title: "version",
    unit: "updates behind",
    of: (row, step) => each(row, row.versions ?? row.version)?.map((version) => (version === null ? null : step - 1 - version)) ?? null,
    scale: ages,
  },
  kept: { title: "kept set", unit: "ids left by top-k and top-p", of: (row) => each(row, row.kept), scale: counts },
};

function each(row, values) {
  if (values === null || values === undefined) return null;
  return Array.isArray(values) ? values : row.tokens.map(() => values);
}

/** Positive values in one hue, negative ones in another, as strong as they are far from 0. */
function diverging(least) {
  return (values) => {
    const largest = values.reduce((one, other) => Math.max(one, Math.abs(other)), 0), most = Math.max(largest, least()) || 1;
    const color = (value) => `rgb(var(${value < 0 ? "--below" : "--above"}) / ${(0.62 * Math.min(1, Math.abs(value) / most)).toFixed(3)})`;
    return { color, legend: [-most, -most / 2, 0, most / 2, most].map((value) => [color(value), signed(value)]), note: largest < most ? `; here ${short(largest)} at most` : "" };
  };
}

function ages(values) {
  const oldest = Math.max(1, ...new Set(values));
  const color = (value) => `rgb(var(--aged) / ${(value <= 0 ? 0.06 : 0.18 + 0.44 * (value / oldest)).toFixed(3)})`;
  const found = [...new Set(values)].sort((one, other) => one - other);
  return { color, legend: found.slice(0, 8).map((value) => [color(value), value === 0 ? "0 (newest)" : short(value)]) };
}

function counts(values) {
  const most = values.reduce((one, other) => Math.max(one, other), 2);
  const color = (value) => `rgb(var(--kept) / ${(value <= 1 ? 0.05 : 0.12 + 0.5 * (Math.log(value) / Math.log(most))).toFixed(3)})`;
  const marks = [...new Set([1, 2, Math.round(Math.sqrt(most)), most])].sort((one, other) => one - other);
  return { color, legend: marks.map((value) => [color(value), value === 1 ? "1 (no choice)" : short(value)]) };
}

/** The scale of a coloring over all `rows` of a group; null where no token has a value. */
export function scaleOf(name, rows, step) {
  const coloring = COLORINGS[name];
  const values = rows.flatMap((row) => coloring.of(row, step) ?? []).filter((value) => value !== null);
  return values.length && coloring.scale ? coloring.scale(values) : null;
}

/** The legend of a scale. */
export function legend(name, scale) {
  if (!scale) return el("span", { class: "legend quiet" }, name === "none" ? "" : missing(name));
  const steps = scale.legend.map(([color, text]) => {
    const box = el("span", { class: "step" }, text);
    box.style.background = color;
    return box;
  });
  return el("span", { class: "legend" }, steps, el("span", { class: "unit" }, COLORINGS[name].unit, scale.note ?? ""));
}

function missing(name) {
  if (name === "kept") return "No set was kept: top_p is 1 and top_k is 0, so every id could be drawn.";
  return `This file has no ${COLORINGS[name].title} of its tokens.`;
}

/** The tokens' own text, or null where the file does not say which characters are whose. */
export function pieces(row) {
  if (!row.chars) return null;
  const characters = Array.from(row.text), found = [];
  let start = 0;
  for (const length of row.chars) {
    found.push(characters.slice(start, start + length).join(""));
    start += length;
  }
  return found;
}

/** The text of a row as tokens, at most `most`; `scale` colors them. Between turns stands what the model read. */
export function drawTokens(row, coloring, scale, step, most) {
  const own = pieces(row), values = scale ? COLORINGS[coloring].of(row, step) : null;
  const text = own ? null : Array.from(row.text), drawn = [];
  let token = 0, character = 0;
  for (const [number, turn] of (row.turns ?? [{ read: "", characters: text?.length, tokens: row.tokens.length, reward: 0 }]).entries()) {
    if (token >= most && number > 0) break;
    const end = Math.min(token + turn.tokens, most);
    if (turn.read) drawn.push(readBefore(turn.read, number));
    if (own) drawn.push(...own.slice(token, end).map((text, place) => tokenSpan(text, token + place, values, scale)));
    else drawn.push(whole(text.slice(character, character + turn.characters).join(""), values?.slice(token, token + turn.tokens).filter(known), scale));
    if (turn.reward && end === token + turn.tokens) drawn.push(el("span", { class: turn.reward < 0 ? "pill bad" : "pill good" }, `turn's reward ${signed(turn.reward)}`));
    token += turn.tokens;
    character += turn.characters;
  }
  return drawn;
}

/** What the model read before a turn. Before the first that is the prompt as the chat template wrote it: it stays folded. */
function readBefore(text, number) {
  const shown = visible(text);
  if (number > 0) return el("span", { class: "read" }, shown);
  return el("details", { class: "read" }, el("summary", {}, `what the model read first (${Array.from(text).length} characters)`), shown);
}

function tokenSpan(text, place, values, scale) {
  const span = el("span", { class: text ? "token" : "token blank", "data-place": place }, text ? visible(text).replaceAll("\n", "↵\n") : "▪");
  const value = values?.[place];
  if (value !== null && value !== undefined) span.style.backgroundColor = scale.color(value);
  return span;
}

/** A text in one piece, colored by the mean of its tokens. */
function whole(text, values, scale) {
  const made = el("span", { class: "token" }, visible(text).replaceAll("\n", "↵\n"));
  if (values?.length) made.style.backgroundColor = scale.color(values.reduce((one, other) => one + other, 0) / values.length);
  return made;
}

/** What is known of one token, as pairs of a name and a value. */
export function factsOf(row, place, step) {
  const value = (name) => COLORINGS[name].of(row, step)?.[place];
  const own = pieces(row)?.[place];
  const facts = [
    ["token", `${place + 1} of ${row.tokens.length}`],
    ["id", String(row.tokens[place])],
    ["text", own ? JSON.stringify(own) : own === "" ? "none of its own" : "not known"],
  ];
  const [advantage, mismatch, behind, kept] = ["advantage", "mismatch", "version", "kept"].map(value);
  if (known(advantage)) facts.push(["advantage", signed(advantage)]);
  if (known(mismatch)) facts.push(["mismatch", `${signed(mismatch)} nats`]);
  if (known(behind)) facts.push(["version", `${step - 1 - behind} (${behind === 0 ? "newest" : `${behind} behind`})`]);
  if (known(kept)) facts.push(["kept set", `${short(kept)} id${kept === 1 ? "" : "s"}`]);
  return facts;
}

const known = (value) => value !== null && value !== undefined;
