/* Elements without markup in strings: nothing that a model says can become markup. */

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** A drawing of `height` units that is as wide as its place. */
export function canvas(element, height, ...children) {
  const width = Math.max(element.clientWidth, 120);
  element.setAttribute("viewBox", `0 0 ${width} ${height}`);
  element.setAttribute("height", height);
  element.replaceChildren(...children.flat());
  return width;
}

const formats = new Map();

/** A number for people; nothing for what is not known. */
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (!formats.has(digits)) {
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    formats.set(digits, new Intl.NumberFormat("en", options));
  }
  return formats.get(digits).format(value);
}

export const percent = (value) => (Number.isFinite(value) ? `${number(100 * value)}%` : "–");

/** A probability with the digits that matter next to 0 and 1. */
export function probability(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.001) return "< 0.1%";
  return `${number(100 * value, value > 0.9995 ? 0 : 1)}%`;
}
