// Runs a page's script against a page that only records: node page_test.js page.html checks.js prints what the checks return.
const { readFileSync } = require("node:fs");
const { createContext, runInContext } = require("node:vm");
const [html, checks] = process.argv.slice(2).map((path) => readFileSync(path, "utf8"));
const [json, script] = [/<script id="data"[^>]*>([^]*?)<\/script>/, /<script>\n([^]*?)<\/script>/].map((pattern) => html.match(pattern)[1]);

const WIDTH = 1200, HEIGHT = 700;
const drawn = []; // every rectangle: x, y, width, height, colour, alpha
const pen = new Proxy({ fillRect(...box) { drawn.push([...box, pen.fillStyle, pen.globalAlpha]); }, measureText: (text) => ({ width: 7 * text.length }) }, {
  get: (target, name) => target[name] ?? (() => {}),
});

const elements = {};
function element(id) {
  elements[id] ??= {
    id, style: {}, listeners: {}, children: [], clientWidth: WIDTH, clientHeight: HEIGHT, offsetWidth: 0, offsetHeight: 0, scrollTop: 0,
    textContent: id === "data" ? json : "",
    addEventListener(name, listener) { this.listeners[name] = listener; },
    setAttribute(name, value) { this[name] = value; },
    append(...parts) { this.children.push(...parts); },
    replaceChildren(...parts) { this.children = parts; },
    getContext: () => pen,
    getBoundingClientRect: () => ({ left: 0, top: 0 }),
    setPointerCapture() {},
  };
  return elements[id];
}

const context = createContext({
  drawn, elements, console,
  document: { getElementById: element, createElement: () => ({ ...element("made"), style: {}, children: [] }), documentElement: {} },
  window: { devicePixelRatio: 1, innerWidth: WIDTH, innerHeight: HEIGHT, addEventListener() {}, matchMedia: () => ({ addEventListener() {} }) },
  getComputedStyle: () => ({ getPropertyValue: (name) => name }),
  requestAnimationFrame: (frame) => frame(),
});
runInContext(script, context);
console.log(JSON.stringify(runInContext(`"use strict"; (() => { ${checks} })()`, context)));
