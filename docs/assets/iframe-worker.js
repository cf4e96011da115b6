// Search runs in a Worker, which browsers refuse to pages that are opened from disk. There, the worker's script runs in a hidden frame.
// The file's name tells the theme that it need not fetch such a script from a server.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      this.loaded = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement("script")
      script.src = url
      this.inside.document.head.append(script)
      return new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }))
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
