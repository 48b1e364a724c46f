/* The playground: a prompt goes out once with speculation and once without; both answers, and what sets them apart. */

import { stream } from "./api.js";
import { $, html, number } from "./dom.js";
import { ORIGINS, TokenView } from "./tokens.js";

export const limits = { top_logprobs: 3 }; // what the server allows
let history = []; // messages so far: the answers are those of the first run
const TITLES = { auto: "With speculation", off: "Without" };

/** One answer while it grows. */
class Pane {
  constructor(mode) {
    this.mode = mode;
    this.speed = html("span", { class: "speed" });
    this.stats = html("p", { class: "stats" });
    this.legend = html("ul", { class: "legend" });
    const label = `Answer ${TITLES[mode].toLowerCase()}. Arrow keys walk through its tokens.`;
    this.output = html("div", { class: "output waiting", tabindex: 0, role: "group", "aria-label": label });
    this.view = new TokenView(this.output);
    const top = html("div", { class: "top" }, html("h3", {}, TITLES[mode]), this.speed);
    const bottom = html("div", { class: "bottom" }, this.stats, this.legend);
    this.element = html("article", { class: "pane", "data-mode": mode }, top, this.output, bottom);
    this.rate = null; // tokens a second after the first one
    this.drafted = null; // drafts, at the end
    this.answer = ""; // without what the model thought
    this.done = false;
    this.stopped = false;
    this.cached = false; // whether the prompt was sent before
  }

  async run(body, signal) {
    await this.#send(body, signal, (chunk) => this.#take(chunk));
    this.done = !this.stopped;
  }

  /** Both runs then find the prompt in the prefix cache, where else the second one alone would. Not timed. */
  async warm(body, signal) {
    await this.#send(body, signal, () => {});
  }

  async #send(body, signal, take) {
    this.output.classList.remove("waiting");
    this.output.classList.add("live");
    try {
      for await (const chunk of stream("v1/chat/completions", body, signal)) take(chunk);
    } catch (error) {
      if (signal.aborted) {
        this.stopped = true;
        this.#note("stopped");
      } else {
        this.output.append(html("div", { class: "failed" }, error.message));
        throw error;
      }
    } finally {
      this.view.trim();
      this.output.classList.remove("live");
    }
  }

  skip() {
    this.output.classList.remove("waiting");
    this.#note("not run");
  }

  #note(text) {
    const gap = this.view.tokens.length ? " " : "";
    this.output.append(html("span", { class: "note" }, `${gap}(${text})`));
  }

  #take(chunk) {
    const choice = chunk.choices[0];
    if (choice) {
      const content = choice.delta.content ?? "";
      const thought = choice.delta.reasoning_content ?? choice.delta.reasoning ?? "";
      this.answer += content;
      this.view.add(thought + content, chunk.specd?.tokens ?? [], choice.logprobs?.content ?? []);
      this.#count();
    }
    if (chunk.timings) this.#time(chunk.timings);
    if (chunk.metrics) this.#summarise(chunk);
  }

  #time(timings) {
    if (timings.predicted_n < 2) return;
    this.rate = ((timings.predicted_n - 1) * 1000) / timings.predicted_ms;
    this.speed.replaceChildren(html("b", {}, number(this.rate, 1)), " tokens/s");
    this.first = `first after ${number(timings.prompt_ms)} ms${this.cached ? " (prompt cached)" : ""}`;
    this.stats.textContent = `${number(timings.predicted_n)} tokens · ${this.first}`;
  }

  #summarise({ metrics, usage }) {
    const found = metrics.speculative_decoding;
    this.drafted = found.num_draft_tokens;
    const parts = [`${number(usage.completion_tokens)} tokens`, this.first];
    if (found.num_spec_steps) {
      parts.push(`${number(found.mean_acceptance_length, 2)} tokens a step with drafts`);
      parts.push(`${number(found.num_accepted_draft_tokens)} of ${number(found.num_draft_tokens)} drafts kept`);
    }
    this.stats.textContent = parts.filter(Boolean).join(" · ");
  }

  #count() {
    const entries = Object.entries(ORIGINS).filter(([origin]) => this.view.counts[origin]);
    this.legend.replaceChildren(
      ...entries.map(([origin, [name]]) =>
        html("li", {}, html("i", { class: `o-${origin}` }), `${name} `, html("b", {}, number(this.view.counts[origin]))),
      ),
    );
  }
}

/** The fields of the composer that differ from their absence. */
function settings() {
  const value = (id) => $(id).value.trim();
  const number_of = (id) => (value(id) === "" ? undefined : Number(value(id)));
  const speculation = { detail: "tokens" };
  if (value("max_draft") !== "") speculation.max_draft = number_of("max_draft");
  return {
    order: value("order"),
    system: value("system"),
    prediction: value("prediction"),
    speculation,
    sampling: { temperature: number_of("temperature"), max_tokens: number_of("max_tokens"), seed: number_of("seed") },
  };
}

function bodies(prompt, { system, prediction, speculation, sampling }) {
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  const common = {
    ...sampling,
    messages: [...messages, { role: "user", content: prompt }],
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: limits.top_logprobs,
    timings_per_token: true,
  };
  const auto = { ...common, speculation: { ...speculation, mode: "auto" } };
  if (prediction) auto.prediction = { type: "content", content: prediction };
  const warm = { ...common, max_tokens: 1, logprobs: false, top_logprobs: undefined, timings_per_token: false };
  return { auto, off: { ...common, speculation: { detail: "tokens", mode: "off" } }, warm };
}

/** How far two texts agree. */
function agreement(first, second) {
  let at = 0;
  while (at < first.length && first[at] === second[at]) at += 1;
  return first === second ? null : at;
}

function verdict(auto, off) {
  const parts = [];
  if (auto.drafted === 0) parts.push(html("span", {}, "no drafts were made: the two runs were alike"));
  else if (auto.rate && off.rate) {
    const ratio = auto.rate / off.rate;
    const text = ratio >= 1 ? `${number(ratio, 2)}× as fast with speculation` : `${number(1 / ratio, 2)}× slower with speculation`;
    parts.push(html("span", {}, html("b", {}, text)));
  }
  const at = agreement(auto.view.text, off.view.text);
  if (at === null) parts.push(html("span", { class: "equal" }, "the two texts are equal"));
  else {
    parts.push(html("span", { class: "differ" }, `the texts differ from character ${number(at + 1)} on`));
    auto.view.mark(at);
    off.view.mark(at);
  }
  return parts;
}

/** One prompt, both answers. Throws ApiError when the server refuses. */
export async function ask(prompt, signal) {
  const chat = history; // of this prompt: a new chat may begin before its answers are there
  const wish = settings();
  const body = bodies(prompt, wish);
  const panes = { auto: new Pane("auto"), ...(wish.order === "one" ? {} : { off: new Pane("off") }) };
  const result = html("p", { class: "verdict", role: "status" });
  const elements = Object.values(panes).map((pane) => pane.element);
  const turn = html("article", { class: "turn", "aria-label": "Prompt and answers" },
    html("p", { class: "ask" }, prompt), html("div", { class: "panes" }, ...elements), result);
  $("welcome").hidden = true;
  $("turns").append(turn);
  turn.scrollIntoView({ block: "start", behavior: "smooth" });
  try {
    if (panes.off) {
      await panes.auto.warm(body.warm, signal);
      panes.auto.cached = panes.off.cached = true;
    }
    if (panes.auto.stopped) return;
    if (wish.order === "both") await Promise.all([panes.auto.run(body.auto, signal), panes.off.run(body.off, signal)]);
    else {
      await panes.auto.run(body.auto, signal);
      if (panes.off && panes.auto.done) await panes.off.run(body.off, signal);
    }
  } finally {
    for (const pane of Object.values(panes)) if (pane.output.classList.contains("waiting")) pane.skip();
  }
  if (panes.auto.done && panes.off?.done) result.append(...verdict(panes.auto, panes.off));
  if (panes.auto.done) chat.push({ role: "user", content: prompt }, { role: "assistant", content: panes.auto.answer });
}

export function forget() {
  history = [];
  $("turns").replaceChildren($("welcome"));
  $("welcome").hidden = false;
}
