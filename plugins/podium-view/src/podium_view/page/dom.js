// Elements, and text as people read it. Nothing from a run ever becomes markup: it is set as text.

/** An element. `props` are attributes; functions among them listen ("onclick"), and null leaves one out. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An element of SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(made, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** A labeled choice. `options` are [value, text]. */
export function choice(label, options, value, onchange) {
  const select = el("select", { onchange: () => onchange(select.value) });
  for (const [name, text] of options) select.append(el("option", { value: name, selected: name === value }, text));
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

/** Whether somebody is at one of the controls in `bar`, which must then not be drawn anew. */
export const inUse = (bar) => bar.contains(document.activeElement);

// As Podium's own terminal has it: controls, marks that reorder or hide text, and lone surrogates; not the two joiners.
const INVISIBLE = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;

/** `text` with control characters and characters without a shape spelled out, so that it hides nothing. */
export function visible(text) {
  return text.replace(INVISIBLE, (found) => {
    const code = found.codePointAt(0);
    return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/** A run's color. */
export const runColor = (index) => `var(--run-${index % 8})`;
