// Who waits for whom, from the slices of a window of the trace.

const CONTROLLER = 1; // the trace's number for the process of the script

/** Whether a track is a worker's, and not the controller's. */
export const isWorker = (track) => track[0] !== CONTROLLER;

/** The first track of a worker whose overlapping calls have tracks of their own. */
export const ownerOf = ([pid, tid]) => `${pid}/${Math.floor((tid - 1) / 100)}`;

/** Sorted intervals [start, end] joined where they touch. */
export function joined(intervals) {
  const found = [];
  for (const [start, end] of [...intervals].sort((one, other) => one[0] - other[0])) {
    const last = found.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else found.push([start, end]);
  }
  return found;
}

/**
 * What each worker did from `from` to `until` (ms).
 *
 * Returns, for each worker in the order of its track: its `key`, the ms that it was `busy` by name of the call, and the ms
 * that it waited `while` other workers ran something, by "role: name", or while none ran ("controller").
 */
export function waits(slices, tracks, from, until) {
  const names = new Map(tracks.map(([pid, tid, process]) => [`${pid}/${tid}`, process]));
  const workers = new Map();
  for (const [pid, tid] of tracks) if (isWorker([pid, tid])) workers.set(ownerOf([pid, tid]), { key: ownerOf([pid, tid]), busy: new Map(), while: new Map() });
  const events = [];
  for (const slice of slices) {
    const worker = isWorker(slice.track) && workers.get(ownerOf(slice.track));
    const start = Math.max(from, slice.at), end = Math.min(until, slice.at + slice.ms);
    if (!worker || end <= start) continue;
    const role = names.get(slice.track.join("/")) || slice.track[0];
    events.push([start, 1, worker.key, slice.name, role], [end, -1, worker.key, slice.name, role]);
  }
  events.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  const running = new Map([...workers.keys()].map((key) => [key, new Map()]));
  let now = from;
  for (const [at, change, key, name, role] of [...events, [until, 0, null, "", ""]]) {
    if (at > now) account(workers, running, at - now);
    now = at;
    if (!change) continue;
    const own = running.get(key), id = `${role}: ${name}`, count = (own.get(id)?.count ?? 0) + change;
    if (count > 0) own.set(id, { count, name });
    else own.delete(id);
  }
  return [...workers.values()];
}

function account(workers, running, ms) {
  const ran = new Set();
  for (const own of running.values()) for (const id of own.keys()) ran.add(id);
  for (const [key, worker] of workers) {
    const own = running.get(key);
    if (own.size) add(worker.busy, own.values().next().value.name, ms);
    else add(worker.while, ran.size ? [...ran].sort().join(" and ") : "controller", ms);
  }
}

function add(sums, name, ms) {
  sums.set(name, (sums.get(name) ?? 0) + ms);
}

/** How long a call's slice waited from its submission, and what its worker ran meanwhile. */
export function waitOf(slice, slices) {
  const submitted = slices.find((one) => !isWorker(one.track) && one.call === slice.call && one.name.startsWith("submit "));
  if (!submitted || slice.at - submitted.at <= 0) return null;
  const others = slices.filter((one) => one !== slice && isWorker(one.track) && ownerOf(one.track) === ownerOf(slice.track)
    && one.at < slice.at && one.at + one.ms > submitted.at);
  return { ms: slice.at - submitted.at, behind: [...new Set(others.map((one) => one.name))] };
}
