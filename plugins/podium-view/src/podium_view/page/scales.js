// Numbers, ticks and scales.

/** A number in few characters: 0.3127 -> "0.313", 0.00042 -> "4.2e-4", 12345 -> "12.3k". */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.01) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  if (size < 9.9995) return trimmed(value.toFixed(3));
  if (size < 999.5) return trimmed(value.toPrecision(3));
  for (const [scale, unit] of [[1e3, "k"], [1e6, "M"], [1e9, "G"]]) {
    if (size < 999.5 * scale || unit === "G") return trimmed((value / scale).toPrecision(3)) + unit;
  }
}

const trimmed = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);

export const signed = (value) => (value > 0 ? "+" : "") + short(value).replace("-", "−");

export const percent = (share) => (share === null || share === undefined ? "–" : `${trimmed((100 * share).toFixed(1))} %`);

/** Milliseconds: 0.084 -> "84 µs", 1536 -> "1.54 s", 72000 -> "1 min 12 s". */
export function duration(ms) {
  if (ms < 0.9995) return `${Math.round(ms * 1000)} µs`;
  if (ms < 999.5) return `${short(ms)} ms`;
  if (ms < 59950) return `${short(ms / 1000)} s`;
  const minutes = Math.floor(ms / 60000 + 1e-9), hours = Math.floor(minutes / 60);
  if (hours) return `${hours} h ${minutes % 60} min`;
  return `${minutes} min ${Math.round(ms / 1000) % 60} s`;
}

/** Round numbers from `low` to `high`, about `count` of them. */
export function ticks(low, high, count, whole = false) {
  const span = high - low || Math.abs(high) || 1;
  let unit = 10 ** Math.floor(Math.log10(span / count));
  unit *= [1, 2, 2.5, 5, 10].find((factor) => span / (unit * factor) <= count) ?? 10;
  if (whole) unit = Math.max(1, Math.round(unit));
  const found = [];
  for (let place = Math.ceil(low / unit - 1e-9); place * unit <= high + unit * 1e-9 && found.length < 50; place++) {
    found.push(Number((place * unit).toPrecision(12)));
  }
  return found;
}

/** The function that maps [low, high] to [from, to]. */
export function linear(low, high, from, to) {
  const slope = (to - from) / (high - low || 1);
  const scale = (value) => from + (value - low) * slope;
  scale.back = (place) => low + (place - from) / slope;
  return scale;
}

/** The index of the entry of the rising list `values` that is nearest to `wanted`. */
export function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - values[low - 1] <= values[low] - wanted ? low - 1 : low;
}

/** The running mean with weight `share` on the past, corrected for its start. Gaps stay. */
export function smoothed(values, share) {
  if (!share) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}
