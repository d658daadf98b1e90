// Makes and changes elements. Text is only ever set as text, so that no name of a node or model can become markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child is an element or a text. */
export function h(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) put(element, name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets an attribute, if that changes anything; null takes it away. */
export function put(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

/** Sets the text, if that changes anything: screen readers and selections are not disturbed for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A bar of some share, from 0 to 1. The text beside it says the same, so that it is hidden from screen readers. */
export function bar() {
  const fill = h("span", { class: "fill" });
  const element = h("span", { class: "bar", "aria-hidden": "true" }, fill);
  return {
    element,
    show(share, tone = "") {
      fill.style.width = `${Math.round(Math.min(1, Math.max(0, share)) * 1000) / 10}%`;
      put(element, "data-tone", tone);
    },
  };
}
