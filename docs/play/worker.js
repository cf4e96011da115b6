// Runs bpipe in Pyodide, beside the page, which stays quick meanwhile. First it gets the files, gzipped and in base64; then a
// question at a time, `{ id, call, given }`, and answers `{ id, answer }`, or `{ id, failure }` if bpipe itself fails.
const TYPES = { wasm: "application/wasm", mjs: "text/javascript", zip: "application/zip" };
let ask = null;

function unpacked(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function start(packed) {
  const files = {};
  await Promise.all(Object.entries(packed).map(async ([name, base64]) => { files[name] = await unpacked(base64); }));
  const typed = (name) => new Blob([files[name]], { type: TYPES[name.split(".").pop()] });
  const module = (name) => import(URL.createObjectURL(typed(name)));
  // Pyodide asks for its files by name, and they are here already; nothing else is ever asked for.
  globalThis.fetch = async (url) => new Response(typed(new URL(url).pathname.split("/").pop()));
  const { loadPyodide } = await module("pyodide.mjs");
  const { default: createPyodideModule } = await module("pyodide.asm.mjs");
  const { info } = JSON.parse(new TextDecoder().decode(files["pyodide-lock.json"]));
  const lockFileContents = { info, packages: {} }; // no package but what is here
  const pyodide = await loadPyodide({ indexURL: "memory:/", createPyodideModule, lockFileContents });
  pyodide.unpackArchive(files["bpipe.zip"], "zip", { extractDir: "/bpipe" });
  pyodide.runPython("import sys; sys.path.insert(0, '/bpipe'); import json, answers");
  ask = pyodide.runPython("lambda call, given: json.dumps(getattr(answers, call)(**json.loads(given)))");
}

addEventListener("message", async ({ data: { files, id, call, given } }) => {
  try {
    if (files) await start(files);
    postMessage({ id, answer: files ? null : JSON.parse(ask(call, JSON.stringify(given))) });
  } catch (error) {
    postMessage({ id, failure: String(error.message ?? error).trim().split("\n").pop() });
  }
});
