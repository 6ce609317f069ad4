// Loads a file of web/ outside a browser: a document that keeps elements as plain objects, and ComfyUI's app replaced.

import { register } from "node:module";

const WEB = new URL("../../web/", import.meta.url).href;
const HOOKS = `
  import { readFile } from "node:fs/promises";
  // the scripts of ComfyUI that a file of web/ imports are not here: each exports what the test has put in its place
  export async function resolve(specifier, context, next) {
    const name = specifier.match(/[/]scripts[/](\\w+)[.]js$/)?.[1];
    const source = "export const " + name + " = globalThis." + name + ";";
    return name ? { url: "data:text/javascript," + source, shortCircuit: true } : next(specifier, context);
  }
  // node takes a .js file for an older kind of module, a browser does not
  export async function load(url, context, next) {
    if (!url.startsWith(${JSON.stringify(WEB)})) return next(url, context);
    return { format: "module", source: await readFile(new URL(url)), shortCircuit: true };
  }`;
register(`data:text/javascript,${encodeURIComponent(HOOKS)}`);

/** The exports of a file of web/. */
export function load(name) {
  return import(WEB + name);
}

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], dataset: {}, listeners: {}, className: "", attributes: {} });
  }

  setAttribute(name, value) {
    if (/NaN|undefined|null|Infinity/.test(value)) throw new Error(`${this.tag} got ${name}=${value}`);
    this.attributes[name] = value;
  }

  append(...children) {
    // a browser would show these as words
    if (children.some((child) => child === undefined || child === null)) throw new Error(`${this.tag} got ${children}`);
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

  /** Every element below this one with the class, in order. */
  classed(name) {
    return this.all().filter((element) => (element.attributes.class ?? element.className).split(" ").includes(name));
  }

  /** Every element below this one with the tag, in order. */
  all(tag) {
    const below = this.children.filter((child) => child.tag).flatMap((child) => [child, ...child.all()]);
    return tag ? below.filter((element) => element.tag === tag) : below;
  }
}

globalThis.document = {
  head: new Element("head"),
  createElementNS: (_, tag) => new Element(tag),
  createElement: (tag) => new Element(tag),
  createDocumentFragment: () => new Element("fragment"),
};
