// node perfetto.js DIST REQUESTS REPLIES: give requests to Perfetto's engine, the WebAssembly build that its page runs in
// a worker, and write down its replies. What the worker would find around it is put in place; nothing of the engine is changed.
const fs = require('fs'), path = require('path'), vm = require('vm'), node = process;
const [dist, requests, replies] = node.argv.slice(2);
const file = (name) => fs.readFileSync(path.join(dist, path.basename(String(name))));

node.on('uncaughtException', (error) => {
  fs.writeSync(2, String(error.stack).slice(-1000));  // the stack begins with the engine's one line of 150 kB
  node.exit(1);
});
console.log = console.warn = console.info = () => {};
Object.assign(globalThis, {
  self: globalThis,
  location: {href: 'http://localhost/engine_bundle.js', search: ''},
  WorkerGlobalScope: function () {},
  XMLHttpRequest: class {
    open(method, url) { this.url = url; }
    send() { this.response = new Uint8Array(file(this.url)).buffer; }
  },
});
delete globalThis.process;
vm.runInThisContext(file('engine_bundle.js').toString());

const out = [];
const port = {postMessage(data) { out.push(Buffer.from(data)); }};
onmessage({data: port});
setTimeout(() => {
  port.onmessage({data: new Uint8Array(fs.readFileSync(requests))});
  fs.writeFileSync(replies, Buffer.concat(out));
  node.exit(0);
}, 0);
