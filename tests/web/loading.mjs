// Loads a file of web/ outside a browser: a document that keeps elements as plain objects, and ComfyUI's app replaced.

import { readFileSync } from "node:fs";

const WEB = new URL("../../web/", import.meta.url);
const APP = asUrl("export const app = globalThis.app;");

/** The exports of a file of web/. Each file is inlined in the one that imports it, so no server is needed. */
export function load(name) {
  return import(inlined(name));
}

function inlined(name) {
  const source = readFileSync(new URL(name, WEB), "utf8")
    .replaceAll("import.meta.url", JSON.stringify(`http://localhost/extensions/pack/${name}`))
    .replace(/(?<=from ")[^"]+/g, (path) => (path === "../../scripts/app.js" ? APP : inlined(path.slice(2))));
  return asUrl(source);
}

function asUrl(source) {
  return `data:text/javascript,${encodeURIComponent(source)}`;
}

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, listeners: {}, className: "" });
  }

  append(...children) {
    this.children.push(...children.flatMap((child) => (child.tag === "fragment" ? child.children : [child])));
  }

  replaceChildren(...children) {
    this.children = [];
    this.append(...children);
  }

  addEventListener(type, listener) {
    this.listeners[type] = listener;
  }

  get textContent() {
    return this.children.map((child) => child.textContent ?? child).join("");
  }

  set textContent(text) {
    this.children = [text];
  }

  // What a page would read as markup must never be given any.
  set innerHTML(_) {
    throw new Error("innerHTML was set");
  }

  /** Every element below this one with the tag, in order. */
  all(tag) {
    const below = this.children.filter((child) => child.tag).flatMap((child) => [child, ...child.all()]);
    return tag ? below.filter((element) => element.tag === tag) : below;
  }
}

globalThis.document = {
  head: new Element("head"),
  createElement: (tag) => new Element(tag),
  createDocumentFragment: () => new Element("fragment"),
};
