// Where answers come from: the server that delivered this page, or the page itself when it was exported.

/** Open the source. It has `get(path)`, `has(path)`, whether it is `live`, and the `note` of an exported page. */
export async function openSource() {
  const { answers, note } = JSON.parse(document.getElementById("data").textContent);
  if (!answers) return { live: true, note, has: () => true, get: ask };
  const found = await unpack(answers);
  return {
    live: false,
    note,
    has: (path) => path in found,
    get: async (path) => {
      if (found[path]?.error) throw new Error(found[path].error);
      if (path in found) return found[path];
      throw new Error("This exported file does not hold it; the run's directory does.");
    },
  };
}

async function ask(path) {
  let response;
  try {
    response = await fetch(path, { redirect: "error", cache: "no-store" });
  } catch {
    throw new Error("podium view does not answer any more. Start it again to go on.");
  }
  const found = await response.json().catch(() => ({ error: `the answer cannot be read (${response.status})` }));
  if (!response.ok) throw new Error(found.error);
  return found;
}

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return Object.assign(Object.create(null), await new Response(stream).json());
}
