/* Browsers start no workers from a file, and the search is one. On a page that was opened as a file the worker's
   script therefore runs in a hidden frame. Material's script looks for the name IFrameWorker in its parent, and for
   its own address in the frame's script element. */
"use strict";

class IFrameWorker extends EventTarget {
  constructor(address) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inside = frame.contentWindow;
    const load = source =>
      new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${source}`));
        script.src = source;
        inside.document.body.append(script);
      });
    inside.importScripts = (...sources) =>
      sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
    inside.postMessage = data => {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    };
    this.frame = frame;
    this.started = load(new URL(address, document.baseURI).href);
  }

  postMessage(data) {
    this.started.then(() => {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    });
  }

  terminate() {
    this.frame.remove();
  }
}

window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
