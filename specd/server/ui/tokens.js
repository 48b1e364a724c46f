/* One answer as tokens in the colours of their origins, and the tip that tells how a token came about. */

import { $, html, probability } from "./dom.js";

export const ORIGINS = {
  d: ["drafter", "proposed by the drafter, kept by the target"],
  n: ["n-gram", "found earlier in the text, kept by the target"],
  p: ["prediction", "from the predicted answer, kept by the target"],
  c: ["corpus", "from one of the server's texts, kept by the target"],
  g: ["grammar", "the only token that the format allows here"],
  b: ["bonus", "the target's own, after every draft of the step was kept"],
  t: ["target", "the target's own"],
};

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(no text)";

/** Which tokens of a chunk make which text: the bytes of several may be one character. */
class Characters {
  constructor() {
    this.decoder = new TextDecoder();
  }

  push(bytes, fallback) {
    return bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : fallback;
  }
}

export class TokenView {
  constructor(output) {
    this.output = output;
    this.tokens = []; // {element, text, row, logprob}
    this.counts = {};
    this.text = ""; // what the server says the answer is
    this.here = -1;
    this.characters = new Characters();
    output.addEventListener("pointerover", (event) => this.#point(event));
    output.addEventListener("pointerleave", () => this.leave());
    output.addEventListener("keydown", (event) => this.#walk(event));
    output.addEventListener("blur", () => this.leave());
  }

  /** One chunk: `rows` are [id, origin, step, position, draft probability, rejected draft], `logprobs` one for each. */
  add(text, rows, logprobs) {
    this.text += text;
    rows.forEach((row, i) => {
      const found = logprobs[i];
      const shown = this.characters.push(found?.bytes, found?.token ?? "");
      const previous = this.tokens.at(-1);
      const first = !previous || previous.row[2] !== row[2];
      const element = html("span", { class: `tok o-${row[1]} shut${first ? " open" : ""}` }, shown);
      element.dataset.index = this.tokens.length;
      if (!first) previous.element.classList.remove("shut");
      this.tokens.push({ element, text: shown, row, logprob: found });
      this.counts[row[1]] = (this.counts[row[1]] ?? 0) + 1;
      this.output.append(element);
    });
  }

  /** A stop token, or what stands behind a stop string, is no part of the answer. */
  trim() {
    const shown = this.tokens.map((token) => token.text).join("");
    const start = [this.text, ` ${this.text}`].find((text) => shown.startsWith(text)); // some vocabularies begin so
    if (start === undefined) return;
    let surplus = shown.length - start.length;
    for (const token of this.tokens.toReversed()) {
      if (surplus <= 0) break;
      const cut = Math.min(surplus, token.text.length);
      token.element.textContent = token.text.slice(0, token.text.length - cut);
      surplus -= cut;
    }
  }

  /** Marks the token in which character `at` of the text stands. */
  mark(at) {
    let end = 0;
    const found = this.tokens.find((token) => (end += token.text.length) > at);
    found?.element.classList.add("differs");
  }

  #point(event) {
    const index = event.target.dataset?.index;
    if (index === undefined) this.leave();
    else this.#show(Number(index));
  }

  #walk(event) {
    const last = this.tokens.length - 1;
    const moves = { ArrowRight: this.here + 1, ArrowLeft: this.here - 1, Home: 0, End: last };
    if (event.key === "Escape") this.leave();
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.#show(Math.min(Math.max(moves[event.key], 0), last));
  }

  leave() {
    this.here = -1;
    this.output.querySelectorAll(".step, .here").forEach((element) => element.classList.remove("step", "here"));
    $("tip").hidden = true;
  }

  #show(index) {
    if (index === this.here) return;
    this.leave();
    this.here = index;
    const token = this.tokens[index];
    for (const other of this.tokens) other.element.classList.toggle("step", other.row[2] === token.row[2]);
    token.element.classList.add("here");
    const tip = $("tip");
    tip.replaceChildren(...told(token));
    tip.hidden = false;
    place(tip, token.element.getClientRects()[0] ?? this.output.getBoundingClientRect());
  }
}

/** What the tip says of a token. */
function told({ text, row, logprob }) {
  const [, origin, step, position, sure, rejected] = row;
  const [name, meaning] = ORIGINS[origin] ?? [origin, "proposed, and kept by the target"];
  const line = (label, value) => html("tr", {}, html("th", {}, label), html("td", {}, value));
  const rows = [];
  if (logprob) rows.push(line("target", probability(Math.exp(logprob.logprob))));
  if (rejected) rows.push(line(html("span", {}, "rejected draft ", html("code", {}, visible(rejected))), probability(sure)));
  else if (typeof sure === "number") rows.push(line(name, probability(sure)));
  const others = (logprob?.top_logprobs ?? []).filter((other) => other.token !== logprob.token).slice(0, 2);
  if (others.length) rows.push(html("tr", {}, html("th", { colspan: 2 }, "the target's other choices")));
  rows.push(...others.map((other) => line(html("code", {}, visible(other.token)), probability(Math.exp(other.logprob)))));
  return [
    html("div", { class: "what" }, html("code", {}, visible(text)), html("b", {}, name)),
    html("div", {}, rejected ? "the target's own, in place of a draft" : meaning),
    html("div", { class: "where" }, `step ${step}, position ${position + 1} of its block`),
    html("table", { class: "others" }, ...rows),
  ];
}

/** Below the place, or above it where there is no room; inside the window's width. */
function place(tip, rect) {
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const below = rect.bottom + 8;
  const fits = below + tip.offsetHeight < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(rect.left, room)) + window.scrollX}px`;
  tip.style.top = `${(fits ? below : Math.max(8, rect.top - tip.offsetHeight - 8)) + window.scrollY}px`;
}
